"""Check the values of a request, one by one and together."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.allowlist import (
    COUNTS,
    PATTERNS,
    check_bind,
    check_command,
    check_count,
    check_module,
    check_staged,
    check_text,
    check_variable,
    refusal,
    setup_words,
)
from hpc_toolkit.slurm.render.grammar import (
    FIELDS,
    check_dependency,
    check_passed,
    parse_array,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Request = Any
"""A ``ScriptSpec``; not imported, because its module imports this one."""

RIVALS = (
    ("mem", "mem_per_cpu", "mem_per_gpu"),
    ("cpus_per_task", "cpus_per_gpu"),
    ("exclusive", "oversubscribe"),
    ("ntasks_per_node", "ntasks_per_gpu"),
    ("ntasks", "ntasks_per_gpu"),
    ("gpu_bind", "isolate_gpus"),
    ("gpu_bind", "ntasks_per_gpu"),
    ("isolate_gpus", "ntasks_per_gpu"),
    ("cpu_bind", "hint"),
    ("stage", "container"),
    ("conda", "venv"),
)
"""Groups of fields that exclude each other."""

_NEEDS = {"bind": ("container", "IMAGE"), "stage_dir": ("stage", "PATH")}
"""Fields that need another one, and the metavar of its value."""

_OF_GPUS = (
    *("ntasks_per_gpu", "gpu_type", "isolate_gpus", "gpu_bind", "cpus_per_gpu", "mem_per_gpu"),
)
_FLAGS = ("isolate_gpus", "oversubscribe", "requeue", "kill_on_invalid_dep", "plain")
_GRAMMARS: dict[str, Callable[[str, str], object]] = {
    "array": parse_array,
    "dependency": check_dependency,
}


def option(field: str) -> str:
    name = {"modules": "module"}.get(field, field).replace("_", "-")
    return f"--sbatch {name}" if name in FIELDS else f"--{name}"


def asked(spec: Request) -> dict[str, Any]:
    """Return the fields of ``spec`` that differ from their defaults, in the order of the class."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    standard = {field.name: field.default for field in fields(spec)}
    return {
        name: value
        for name, value in values.items()
        if standard[name] is MISSING or value != standard[name]
    }


def option_words(name: str, value: Any) -> list[str]:
    """Return an option and its value as words; one word for a flag, a pair for each of a tuple."""
    if value is True:
        return [name]
    if value is False:
        return [name.replace("--", "--no-", 1)]
    values = value if isinstance(value, tuple) else (value,)
    texts = ["=".join(one) if isinstance(one, tuple) else str(one) for one in values]
    return [word for text in texts for word in (name, text)]


def check_request(spec: Request) -> None:
    """Raise RenderError or ConfigError for a request that no cluster could accept."""
    _check_values(spec)
    check_passed(spec.sbatch, "--sbatch")
    for module in spec.modules:
        check_module(module, "--module")
    for name in ("setup", "node_setup", "teardown"):
        for line in getattr(spec, name):
            setup_words(line, option(name))
    for name, value in spec.env:
        check_variable(name, value, "--env")
    for directory in spec.bind:
        check_bind(directory, "--bind")
    check_staged(spec.stage, "--stage")
    if spec.command:
        check_command(spec.command)
    _check_together(spec)


def _check_values(spec: Request) -> None:
    unset = {
        field.name
        for field in fields(spec)
        if field.default is None and getattr(spec, field.name) is None
    }
    for name in COUNTS.keys() - unset:
        check_count(getattr(spec, name), COUNTS[name], option(name))
    for name in PATTERNS.keys() - unset:
        check_text(getattr(spec, name), name, option(name))
    for name in _FLAGS:
        if not isinstance(getattr(spec, name), bool):
            raise refusal(option(name), getattr(spec, name), "yes or no; in Python, True or False")
    if not isinstance(spec.exclusive, bool) and spec.exclusive not in ("user", "mcs", "topo"):
        wanted = "no value, or one of user, mcs and topo"
        raise refusal(option("exclusive"), spec.exclusive, wanted)
    for name in _GRAMMARS.keys() - unset:
        value = getattr(spec, name)
        if not isinstance(value, str):
            raise refusal(option(name), value, "text")
        _GRAMMARS[name](value, option(name))


def _check_together(spec: Request) -> None:
    given = asked(spec)
    for rivals in RIVALS:
        both = [option(name) for name in rivals if name in given]
        if len(both) > 1:
            msg = f"{' and '.join(both)} exclude each other"
            raise RenderError(msg, hint="leave one of them out")
    alone = [option(name) for name in _OF_GPUS if name in given and not spec.gpus_per_node]
    if alone:
        msg = f"{alone[0]}: the job requests no GPU"
        raise RenderError(msg, hint="add --gpus-per-node N, or leave the option out")
    for name, (other, value) in _NEEDS.items():
        if name in given and other not in given:
            msg = f"{option(name)} needs {option(other)}"
            raise RenderError(msg, hint=f"add {option(other)} {value}, or leave it out")
    _check_ranks(spec)


def _check_ranks(spec: Request) -> None:
    if spec.ntasks is not None and spec.ntasks < spec.nodes:
        msg = f"--sbatch ntasks: {spec.ntasks} ranks are fewer than {spec.nodes} nodes"
        raise RenderError(msg, hint="request fewer nodes")
    most = spec.nodes * (spec.ntasks_per_node or COUNTS["ntasks_per_node"][1])
    if spec.ntasks is not None and spec.ntasks > most:
        msg = f"--sbatch ntasks: {spec.ntasks} are more than"
        msg += f" --nodes x --ntasks-per-node, at most {most}"
        raise RenderError(msg, hint="leave out --ntasks-per-node, or request more nodes")
