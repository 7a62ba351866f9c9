"""The tables of a cluster file: their fields, and what the value of each key must be."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.clusters import read_gres
from hpc_toolkit.slurm.containers import program_words
from hpc_toolkit.slurm.render import matches
from hpc_toolkit.slurm.render import values as v
from hpc_toolkit.slurm.render.file import read_sbatch
from hpc_toolkit.slurm.render.spec import DEFAULT_OPTIONS, MEMORY_OPTIONS, OPTIONS, read_quantity
from hpc_toolkit.system import tomltable as t

MAX_AMOUNT = 1_000_000

NCCL_NAME = r"(NCCL|TORCH_NCCL|RCCL|OFI_NCCL|GLOO|TP|UCX|FI|CXI|PSM3)_[A-Z0-9_]{1,100}"
"""Variables of NCCL, RCCL, Gloo, TensorPipe, UCX and libfabric with its providers."""

PARTITION_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+@-]{0,127}"


T = TypeVar("T")


def keyed(default: T, read: Callable[[Any, str], Any]) -> T:
    """A field with the converter of the key that sets it."""
    found: T = field(default=default, metadata={"read": read})
    return found


def keys_of(kind: Any) -> dict[str, t.Key]:
    """The keys of a table: the names of fields, less the units of seconds and MiB."""
    return {
        re.sub("_(s|mib)$", "", one.name): (one.name, one.metadata["read"])
        for one in fields(kind)
        if "read" in one.metadata
    }


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
gpu_request = t.Choice(("gpus-per-node", "gres", "gpus-per-task", "gpus", "none"))
mem_style = t.Choice(("mem", "mem-per-cpu", "mem-per-gpu", "none"))
backend = t.Choice(("nccl", "gloo"))
_table = t.kept(lambda value: isinstance(value, dict), "a table")


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

    def __call__(self, value: object, where: str) -> Any:
        kind = OPTIONS[self.name].value
        read = t.count if kind.word is int else t.text
        found = read_quantity(self.name, read(value, where), where)
        kind.check(found, where)
        return found


amount = t.number_from(0, MAX_AMOUNT, f"a number from 0 to {MAX_AMOUNT}")
"""A price, with or without a fraction."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Converter for an inner table, into pairs of its keys and their values."""

    keys: dict[str, t.Key]
    rivals: tuple[str, ...] = ()
    """Keys of which only one may be there."""
    of: str = ""
    """The dataclass whose fields the keys set."""

    def __call__(self, value: object, where: str) -> tuple[tuple[str, Any], ...]:
        found = t.convert(_table(value, where), self.keys, where)
        both = [key for key in found if key in self.rivals]
        if len(both) > 1:
            msg = f"{where}: {' and '.join(both)} exclude each other"
            raise ConfigError(msg, hint="give only one memory option")
        return tuple(found.items())


def sbatch_defaults(value: object, where: str) -> tuple[tuple[str, Any], ...]:
    """Options of sbatch as ``--sbatch`` takes them; a field of a request sets that field."""
    found: dict[str, Any] = {}
    for name, given in _table(value, where).items():
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


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """Converter for a table whose keys are names, into pairs of names and values."""

    each: Callable[[Any, str], Any]
    """Converter of a value."""

    def __call__(self, value: object, where: str) -> tuple[tuple[str, Any], ...]:
        return tuple(
            (t.word(name, where), self.each(one, f"{where}.{name}"))
            for name, one in _table(value, where).items()
        )


def restricted(value: object, where: str) -> bool | str:
    return value if isinstance(value, bool) else t.text(value, where)


_NODE_KIND_KEYS: dict[str, t.Key] = {
    "nodes": ("nodes", t.count),
    "cpus": ("cpus", t.count),
    "mem": ("mem_mib", t.mem),
    "gpus": ("gpus", gpus),
    "gres": ("gres", gres),
    "features": ("features", t.texts),
}
kinds = Named(Table(_NODE_KIND_KEYS, of="NodeKind"))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits and node facts that a cluster file gives for the cluster or for one partition.

    None means unknown, or without a limit.
    """

    nodes: int | None = keyed(None, t.count)
    """How many nodes one job can get at most."""
    min_nodes: int | None = keyed(None, t.count)
    """How many nodes a job must request at least."""
    max_walltime_s: int | None = keyed(None, t.walltime)
    """Longest job that it accepts."""
    gpus_per_node: int | None = keyed(None, t.count_or_zero)
    """Physical GPUs of a node; 0 for nodes without GPUs."""
    gpu_type: str | None = keyed(None, t.word)
    """The type in a GPU request, as in ``l40s:4``; without it, requests are untyped."""
    cpus_per_node: int | None = keyed(None, t.count)
    """CPUs of a node that a job can have, as Slurm counts them."""
    mem_per_node_mib: int | None = keyed(None, t.mem)
    """Memory of a node that a job can have."""
    max_cpus_per_node: int | None = keyed(None, t.count)
    """Most CPUs of a node that one job may use, if that is less than the node has."""
    max_mem_per_node_mib: int | None = keyed(None, t.mem)
    """Most memory of a node that one job may request, if that is less than the node has."""
    max_mem_per_cpu_mib: int | None = keyed(None, t.mem)
    """Most memory for each CPU of a job: a job that needs more must request more CPUs."""
    gpu_request: str | None = keyed(None, gpu_request)
    """The option with which a script requests GPUs, because Slurm refuses a mix of them; "none" if
    the nodes of the partition imply the GPUs."""
    mem_style: str | None = keyed(None, mem_style)
    """The option with which a script requests memory; "none" if the site sets memory itself."""
    whole_nodes: bool | None = keyed(None, t.flag)
    """Whether a job gets, and pays for, complete nodes."""
    accounts: tuple[str, ...] | None = keyed(None, t.texts)
    """The accounts that jobs may charge; other accounts are refused."""
    denied_accounts: tuple[str, ...] | None = keyed(None, t.texts)
    """Accounts that are refused."""
    allowed_qos: tuple[str, ...] | None = keyed(None, t.texts)
    """The QOS that jobs may have; others, and a default QOS that is not listed, are refused."""
    denied_qos: tuple[str, ...] | None = keyed(None, t.texts)
    """QOS that are refused."""
    partition_qos: str | None = keyed(None, t.word)
    """The QOS whose limits bind every job of the partition."""
    price_per_node_hour: float | None = keyed(None, amount)
    """Price of a node for one hour, in the currency; added to the price of its GPUs."""
    price_per_gpu_hour: float | None = keyed(None, amount)
    """Price of a GPU for one hour, in the currency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(Limits):
    """One partition of a site. None stands for the cluster's value, which may be unknown."""

    name: str = field(metadata={"read": partition_name})
    """Its name in Slurm."""
    kinds: tuple[tuple[str, int], ...] = keyed((), Named(t.count))
    """How many nodes of each of the cluster's kinds it has."""
    restricted: bool | str = keyed(False, restricted)
    """Whether only some users may use it, or why you may not; a job gets it only by naming it."""
    defaults: tuple[tuple[str, Any], ...] = keyed((), defaults)
    """Values of sbatch options that a request for this partition leaves open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qos:
    """Limits of a quality of service (QOS) for one job of one user. None means no limit."""

    name: str
    """Its name in Slurm."""
    max_walltime_s: int | None = keyed(None, t.walltime)
    """Longest job."""
    nodes: int | None = keyed(None, t.count_or_zero)
    """Most nodes of a job."""
    gpus: int | None = keyed(None, t.count_or_zero)
    """Most GPUs of a job on all of its nodes."""
    gpu_types: tuple[tuple[str, int], ...] = keyed((), Named(t.count_or_zero))
    """Most GPUs of a type, if this is less: a100 = 4."""
    cpus: int | None = keyed(None, t.count_or_zero)
    """Most CPUs of a job on all of its nodes."""
    max_submit_jobs: int | None = keyed(None, t.count_or_zero)
    """Most jobs, including elements of arrays, that a user may have submitted."""
    overrides_partition: bool = keyed(False, t.flag)
    """Whether its jobs may exceed the time and node limits of the partition."""
    overrides_partition_qos: bool = keyed(False, t.flag)
    """Whether its limits come before those of the partition's QOS (OverPartQOS)."""


NODE_KEYS = keys_of(Limits)
"""Keys that a partition may state as well as the cluster."""

qos = Named(Table(keys_of(Qos), of="Qos"))

SHAPE_KEYS = ("gpus_per_node", "gpu_type", "cpus_per_node", "mem_per_node")
"""Keys that describe nodes which are all equal; otherwise ``kinds`` describes them."""

PARTITION_KEYS = keys_of(Partition)
