"""The keys of a cluster file: which field each key sets, and what its value must be."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.allowlist import matches
from hpc_toolkit.slurm.clusters.nodes import read_gres
from hpc_toolkit.slurm.containers import program_words
from hpc_toolkit.slurm.render import values as v
from hpc_toolkit.slurm.render.file import read_sbatch
from hpc_toolkit.slurm.render.spec import DEFAULT_OPTIONS, MEMORY_OPTIONS, OPTIONS, read_quantity
from hpc_toolkit.system import tomltable as t

GpuRequest = Literal["gpus-per-node", "gres", "gpus-per-task", "gpus", "none"]
MemStyle = Literal["mem", "mem-per-cpu", "mem-per-gpu", "none"]
Backend = Literal["nccl", "gloo"]

MAX_AMOUNT = 1_000_000

NCCL_NAME = r"(NCCL|TORCH_NCCL|RCCL|OFI_NCCL|GLOO|TP|UCX|FI|CXI|PSM3)_[A-Z0-9_]{1,100}"
"""Variables of NCCL, RCCL, Gloo, TensorPipe, UCX and libfabric with its providers."""

PARTITION_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+@-]{0,127}"


def _matching(pattern: str, wanted: str) -> Callable[[Any, str], str]:
    return t.kept(lambda value: matches(value, pattern), wanted)


def _checked(read: Callable[[Any, str], Any], check: Callable[..., object]) -> Callable[..., Any]:
    """A converter whose values must pass ``check``."""

    def convert(value: object, where: str) -> Any:
        found = read(value, where)
        check(found, where)
        return found

    return convert


def _check_directories(values: tuple[str, ...], where: str) -> None:
    for one in values:
        _matching(r"(/|~(/|$)).*", "an absolute path, or one below ~")(one, where)


partition_name = _matching(PARTITION_NAME, "a partition's name")
variable = _matching(r"[A-Za-z_][A-Za-z0-9_]*=.+", "NAME=VALUE")
binds = _checked(t.texts, v.BINDS.check)
modules = _checked(t.texts, v.MODULES.check)
commands = _checked(t.texts, v.COMMANDS.check)
directories = _checked(t.texts, _check_directories)
exports = _checked(t.pairs, v.VARIABLES.check)
runtime = _checked(t.text, program_words)


def nccl(value: object, where: str) -> tuple[tuple[str, str], ...]:
    found: tuple[tuple[str, str], ...] = exports(value, where)
    for name, _ in found:
        if not re.fullmatch(NCCL_NAME, name):
            msg = f"{where}: {name} is not a variable of NCCL, Gloo, UCX or libfabric"
            raise ConfigError(msg, hint="NCCL_..., GLOO_..., UCX_... or FI_...; others go to [env]")
    return found


@dataclass(frozen=True, slots=True)
class Option:
    """Converter for the value of an sbatch option into that of a request."""

    name: str

    def __call__(self, value: object, where: str) -> str | int:
        kind = OPTIONS[self.name].value
        if kind.quantity is not None:
            return read_quantity(self.name, t.text(value, where), where)
        read = t.count if kind.word is int else t.text
        found = read(value, where)
        kind.check(found, where)
        return found


_amount = t.number_from(0, MAX_AMOUNT, f"a number from 0 to {MAX_AMOUNT}")


def amount(value: object, where: str) -> float:
    """A price or a power, with or without a fraction."""
    return float(_amount(value, where))


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Converter for an inner table, into pairs of its keys and their values."""

    keys: dict[str, t.Key]
    rivals: tuple[str, ...] = ()
    """Keys of which only one may be there."""
    of: str = ""
    """The dataclass whose fields the keys set."""

    def __call__(self, value: object, where: str) -> tuple[tuple[str, Any], ...]:
        if not isinstance(value, dict):
            raise t.wrong(where, value, "a table")
        found = t.convert(value, self.keys, where)
        both = [key for key in found if key in self.rivals]
        if len(both) > 1:
            msg = f"{where}: {' and '.join(both)} exclude each other"
            raise ConfigError(msg, hint="give only one memory option")
        return tuple(found.items())


def sbatch_defaults(value: object, where: str) -> tuple[tuple[str, Any], ...]:
    """Options of sbatch as ``--sbatch`` takes them; a field of a request sets that field."""
    if not isinstance(value, dict):
        raise t.wrong(where, value, "a table of options of sbatch")
    found: dict[str, Any] = {}
    for name, given in value.items():
        place = f"{where}.{t.text(name, where)}"
        if type(given) not in (str, int, bool):
            raise t.wrong(place, given, "text, a whole number, true or false")
        field = name.replace("-", "_")
        if field in DEFAULT_OPTIONS:
            found[field] = Option(field)(given, place)
            continue
        if given == "":
            raise t.wrong(place, given, "a value, or false to leave it out")
        word = "no" if given is False else str(given)
        ((field, read),) = read_sbatch([name if given is True else f"{name}={word}"], place).items()
        if OPTIONS[field].templates != OPTIONS["nodes"].templates:
            raise ConfigError(f"{place}: some templates do not have it", hint=f"--sbatch {name}")
        if OPTIONS[field].value.quantity is not None:
            read = read_quantity(field, read, place)
        OPTIONS[field].value.check(read, place)
        passed = {f"sbatch.{name}": given is True or (word if given is not False else "")}
        found |= passed if field == "sbatch" else {field: read}
    return tuple(found.items())


_DEFAULTS: dict[str, t.Key] = {option: (option, Option(option)) for option in DEFAULT_OPTIONS}
DEFAULTS = Table({**_DEFAULTS, "sbatch": ("sbatch", sbatch_defaults)}, MEMORY_OPTIONS)


def defaults(value: object, where: str) -> tuple[tuple[str, Any], ...]:
    """Values of a request's fields; other options of sbatch are called ``sbatch.NAME``."""
    found = dict(DEFAULTS(value, where))
    return tuple({**dict(found.pop("sbatch", ())), **found}.items())


identify = Table(
    {
        "slurm_cluster": ("slurm_cluster", t.word),
        "env": ("env", variable),
        "hostname": ("hostname", t.text),
    }
)


_GRES = r"[A-Za-z0-9_][\w.-]*(:[\w.+-]+)*(,[A-Za-z0-9_][\w.-]*(:[\w.+-]+)*)*"


def _resources(value: object, where: str, before: str = "") -> list[tuple[str, str, int]]:
    text = t.text(value, where)
    if text and not re.fullmatch(_GRES, text):
        raise t.wrong(where, value, "resources as in Gres of Slurm, such as 'a100:4'")
    return read_gres(",".join(before + one for one in text.split(",") if one))


def gpus(value: object, where: str) -> tuple[tuple[str, int], ...]:
    """Types and numbers of a node's GPUs, from ``a100:4`` or ``4``."""
    return tuple((kind, number) for _, kind, number in _resources(value, where, "gpu:"))


def gres(value: object, where: str) -> tuple[tuple[str, int], ...]:
    return tuple((f"{n}:{kind}".rstrip(":"), many) for n, kind, many in _resources(value, where))


_NODE_KIND_KEYS: dict[str, t.Key] = {
    "nodes": ("nodes", t.count),
    "cpus": ("cpus", t.count),
    "mem": ("mem_mib", t.mem),
    "gpus": ("gpus", gpus),
    "gres": ("gres", gres),
    "features": ("features", t.texts),
}


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """Converter for a table whose keys are names, into pairs of names and values."""

    each: Callable[[Any, str], Any]
    """Converter of a value."""

    def __call__(self, value: object, where: str) -> tuple[tuple[str, Any], ...]:
        if not isinstance(value, dict):
            raise t.wrong(where, value, "a table")
        return tuple(
            (t.word(name, where), self.each(one, f"{where}.{name}")) for name, one in value.items()
        )


_QOS_KEYS: dict[str, t.Key] = {
    "max_walltime": ("max_walltime_s", t.walltime),
    "nodes": ("nodes", t.count_or_zero),
    "gpus": ("gpus", t.count_or_zero),
    "gpu_types": ("gpu_types", Named(t.count_or_zero)),
    "cpus": ("cpus", t.count_or_zero),
    "max_submit_jobs": ("max_submit_jobs", t.count_or_zero),
    "overrides_partition": ("overrides_partition", t.flag),
    "overrides_partition_qos": ("overrides_partition_qos", t.flag),
}


def restricted(value: object, where: str) -> bool | str:
    return value if isinstance(value, bool) else t.text(value, where)


qos = Named(Table(_QOS_KEYS, of="Qos"))
kinds = Named(Table(_NODE_KIND_KEYS, of="NodeKind"))
kind_counts = Named(t.count)


def partitions(value: object, where: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise t.wrong(where, value, "a list of [[partitions]] tables")
    found = []
    for number, entry in enumerate(value, 1):
        named = matches(entry.get("name"), PARTITION_NAME)
        place = f"{where}.{entry['name']}" if named else f"{where}[{number}]"
        found.append(t.convert(entry, PARTITION_KEYS, place))
    names = [entry.get("name") for entry in found]
    for name in names:
        if name is None or names.count(name) > 1:
            what = "one has no 'name'" if name is None else f"{name!r} is listed twice"
            raise ConfigError(f"{where}: {what}", hint="give each partition its own name")
    return tuple(found)


NODE_KEYS: dict[str, t.Key] = {
    "nodes": ("nodes", t.count),
    "min_nodes": ("min_nodes", t.count),
    "max_walltime": ("max_walltime_s", t.walltime),
    "gpus_per_node": ("gpus_per_node", t.count_or_zero),
    "gpu_type": ("gpu_type", t.word),
    "cpus_per_node": ("cpus_per_node", t.count),
    "mem_per_node": ("mem_per_node_mib", t.mem),
    "max_cpus_per_node": ("max_cpus_per_node", t.count),
    "max_mem_per_node": ("max_mem_per_node_mib", t.mem),
    "max_mem_per_cpu": ("max_mem_per_cpu_mib", t.mem),
    "gpu_request": ("gpu_request", t.Choice(get_args(GpuRequest))),
    "mem_style": ("mem_style", t.Choice(get_args(MemStyle))),
    "whole_nodes": ("whole_nodes", t.flag),
    "accounts": ("accounts", t.texts),
    "denied_accounts": ("denied_accounts", t.texts),
    "allowed_qos": ("allowed_qos", t.texts),
    "denied_qos": ("denied_qos", t.texts),
    "partition_qos": ("partition_qos", t.word),
    "price_per_node_hour": ("price_per_node_hour", amount),
    "price_per_gpu_hour": ("price_per_gpu_hour", amount),
}
"""Keys that a partition may state as well as the cluster."""

SHAPE_KEYS = ("gpus_per_node", "gpu_type", "cpus_per_node", "mem_per_node")
"""Keys that describe nodes which are all equal; otherwise ``kinds`` describes them."""

PARTITION_KEYS: dict[str, t.Key] = {
    "name": ("name", partition_name),
    **NODE_KEYS,
    "kinds": ("kinds", kind_counts),
    "restricted": ("restricted", restricted),
    "defaults": ("defaults", defaults),
}

KEYS: dict[str, t.Key] = {
    "description": ("description", t.text),
    "extends": ("extends", t.word),
    "source": ("source", t.text),
    "checked": ("checked", t.date),
    "verified": ("verified", t.flag),
    "identify": ("identify", identify),
    **NODE_KEYS,
    "kinds": ("kinds", kinds),
    "qos": ("qos", qos),
    "default_qos": ("default_qos", t.word),
    "max_submit_jobs": ("max_submit_jobs", t.count),
    "currency": ("currency", t.word),
    "account_required": ("account_required", t.flag),
    "account_hint": ("account_hint", t.text),
    "choose_partition": ("choose_partition", t.flag),
    "partitions": ("partitions", partitions),
    "max_array_size": ("max_array_size", t.count),
    "shrink_jobs": ("shrink_jobs", t.flag),
    "forbidden_submit_dirs": ("forbidden_submit_dirs", directories),
    "login_shell": ("login_shell", t.flag),
    "modules": ("modules", modules),
    "setup": ("setup", commands),
    "node_setup": ("node_setup", commands),
    "env": ("env", exports),
    "gpu_backend": ("gpu_backend", t.Choice(get_args(Backend))),
    "nccl": ("nccl", nccl),
    "conda_base": ("conda_base", t.path),
    "container_runtime": ("container_runtime", runtime),
    "binds": ("binds", binds),
    "defaults": ("defaults", defaults),
    "facts": ("facts", t.pairs),
}
"""All keys of a cluster file, in the order in which a person would write them."""
