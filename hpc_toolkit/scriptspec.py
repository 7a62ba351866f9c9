"""What a user asks of a job script, checked field by field when it is made.

An instance is valid by construction: no later step meets a value that a shell could misread.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import MISSING, dataclass, fields
from typing import Any

from hpc_toolkit.allowlist import (
    COUNTS,
    PATTERNS,
    check_count,
    check_module,
    check_text,
    check_variable,
    refusal,
    setup_words,
)
from hpc_toolkit.errors import RenderError
from hpc_toolkit.quantities import parse_mem_mib, parse_walltime


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSpec:
    """One job script, in sbatch's words; None leaves the value to the cluster's file.

    Raises RenderError or ConfigError for a value that no cluster could accept.
    """

    job_name: str = "work-queue"
    """Name of the job and, with ``.sbatch``, of the script."""
    account: str | None = None
    """Who pays."""
    partition: str | None = None
    """Comma-separated partitions; many sites choose by the time limit."""
    qos: str | None = None
    """Quality of service."""
    reservation: str | None = None
    """Comma-separated reservations."""
    constraint: str | None = None
    """Node features, in sbatch's notation."""
    nodelist: str | None = None
    """Nodes that must be in the allocation, in Slurm's notation ``n[1-4]``."""
    exclude: str | None = None
    """Nodes that must not."""
    nodes: int = 1
    """Number of nodes."""
    ntasks_per_node: int | None = None
    """Ranks on each node; by default one per GPU, or one where there is none."""
    gpus_per_node: int = 0
    """GPUs on each node."""
    cpus_per_task: int | None = None
    """CPUs of each rank; by default its share of the node's."""
    mem: str | None = None
    """Memory of each node as sbatch writes it; "0" is all of it. One of the three mem options."""
    mem_per_cpu: str | None = None
    """Memory per CPU."""
    mem_per_gpu: str | None = None
    """Memory per GPU."""
    exclusive: bool = False
    """Whether to share the nodes with no other job."""
    time: str | None = None
    """Time limit in Slurm's grammar."""
    signal: str | None = None
    """``B:USR1@seconds``: when the script is warned of the time limit (up to a minute earlier)."""
    requeue: bool = True
    """Whether the job may start again: by Slurm after a failure, by itself while items are left."""
    max_restarts: int = 10
    """After how many restarts the script stops requeueing itself."""
    output: str = "slurm/logs/%x-%j.out"
    """The log's path in sbatch's notation, relative to the directory of submission."""
    comment: str | None = None
    """A remark that Slurm keeps with the job."""
    mail_type: str | None = None
    """Comma-separated events that send mail."""
    mail_user: str | None = None
    """Who gets it."""
    run: str | None = None
    """The run directory; the script's first argument overrides it."""
    python: str
    """Absolute path of the interpreter that has hpc_toolkit."""
    modules: tuple[str, ...] = ()
    """Environment modules to load, after the cluster's."""
    setup: tuple[str, ...] = ()
    """Commands to run before the step, after the cluster's."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables to export, after the cluster's."""
    conda: str | None = None
    """Name or absolute path of a conda environment to activate."""
    venv: str | None = None
    """Absolute path of a virtual environment; its interpreter and programs come first."""
    container: str | None = None
    """Image in which the ranks run: a path, or what the site's runtime takes."""
    bind: tuple[str, ...] = ()
    """``FROM[:TO[:ro]]`` directories to see inside the container, after the cluster's."""
    node_setup: tuple[str, ...] = ()
    """Commands to run once on every node before the step, after the cluster's."""
    teardown: tuple[str, ...] = ()
    """Commands to run in the script after the step, however it ended."""
    command: tuple[str, ...] = ()
    """Program and arguments of the ``command`` template, word by word."""

    def __post_init__(self) -> None:
        unset = {field.name for field in fields(self) if field.default is None}
        unset = {name for name in unset if getattr(self, name) is None}
        for name in COUNTS.keys() - unset:
            check_count(getattr(self, name), name, option(name))
        for name in PATTERNS.keys() - unset:
            check_text(getattr(self, name), name, option(name))
        for name in ("exclusive", "requeue"):
            if not isinstance(getattr(self, name), bool):
                raise refusal(option(name), getattr(self, name), "true or false")
        if self.time is not None:
            parse_walltime(self.time, where="--time")
        _check_memory(self)
        check_environment(self.modules, self.setup, self.env)


def option(field: str) -> str:
    """The command-line option of a field."""
    return {"modules": "--module"}.get(field, f"--{field.replace('_', '-')}")


def asked(spec: ScriptSpec) -> dict[str, Any]:
    """The fields of ``spec`` that are not the default, in the order of the class."""
    values = {field.name: getattr(spec, field.name) for field in fields(ScriptSpec)}
    standard = {field.name: field.default for field in fields(ScriptSpec)}
    return {
        name: value
        for name, value in values.items()
        if standard[name] is MISSING or value != standard[name]
    }


def spec_json(spec: ScriptSpec, *, template: str, cluster: str) -> str:
    """The request on one ASCII line; equal requests give equal lines."""
    return json.dumps({"template": template, "cluster": cluster, **asked(spec)}, ensure_ascii=True)


def command_line(spec: ScriptSpec, *, template: str, cluster: str) -> str:
    """The command that renders this script again, quoted for a shell."""
    argv = ["hpctk", "render", template, "--cluster", cluster]
    for name, value in asked(spec).items():
        if name == "env":
            argv += [part for key, text in value for part in (option(name), f"{key}={text}")]
        elif isinstance(value, tuple):
            argv += [part for text in value for part in (option(name), text)]
        elif isinstance(value, bool):
            argv.append(option(name) if value else option(name).replace("--", "--no-", 1))
        else:
            argv += [option(name), str(value)]
    return shlex.join(argv)


def check_environment(
    modules: tuple[str, ...],
    setup: tuple[str, ...],
    env: tuple[tuple[str, str], ...],
    *,
    where: str = "",
) -> None:
    """Raise RenderError unless these may go into a script; ``where`` is a prefix for the error."""
    for module in modules:
        check_module(module, f"{where}{option('modules')}")
    for line in setup:
        setup_words(line, f"{where}{option('setup')}")
    for name, value in env:
        check_variable(name, value, f"{where}{option('env')}")


def _check_memory(spec: ScriptSpec) -> None:
    given = [
        name for name in ("mem", "mem_per_cpu", "mem_per_gpu") if getattr(spec, name) is not None
    ]
    for name in given:
        parse_mem_mib(getattr(spec, name), where=option(name), zero=name == "mem")
    if len(given) > 1:
        msg = f"{' and '.join(map(option, given))} exclude each other"
        raise RenderError(msg, hint="Slurm takes one memory option")
