"""The options of job scripts, one row each, and a user's request, checked when it is created.

``ScriptSpec`` is the table: the command line, the header of a script, its directives, the
[defaults] of cluster files and the reference read its rows. An instance is valid by construction:
no later step sees a value that a shell could misread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.render import refusal
from hpc_toolkit.slurm.render import values as v
from hpc_toolkit.slurm.render.values import check_passed, count, path, text

MAX_RESTARTS = 10
"""Also the default of ``hpctk batch``, so that a script need not say it."""

QUEUES = ("work-queue", "array", "campaign")
"""Templates that start workers on a run."""

TRAININGS = ("train-cpu", "train-single-gpu", "train-multi-gpu", "train-multi-node")
"""Templates that start the ranks of a training script."""

PROGRAMS = ("command", *TRAININGS)
"""Templates that start a user's program instead of workers on a run."""

ARRAYS = ("array", "command")
"""Templates that can be job arrays."""

TASKS = (*QUEUES, "command")
"""Templates whose ranks are Slurm's tasks."""

_ALL = (*QUEUES, *PROGRAMS)
_WITH_GPUS = tuple(one for one in _ALL if one != "train-cpu")
_LAUNCHED = TRAININGS[1:]
_SEVERAL = TRAININGS[2:]

RESOURCES, PLACEMENT, SCHEDULING = "Resources", "Placement", "Scheduling"
JOB, TRAINING, ENVIRONMENT = "Job and its log", "Training", "Environment"
_ARGUMENTS = "Arguments"
_RANKS_MAX = 4096


class Row(NamedTuple):
    """What one option is, beside its name and its default."""

    panel: str
    """Heading of the help; "" for an option that is written ``--sbatch NAME[=VALUE]``."""
    value: v.Value
    help: str
    """One line for people."""
    metavar: str = "TEXT"
    directive: int = 0
    """Group of its directive, 0 for none; directives are sorted by it, then as the table is."""
    templates: tuple[str, ...] = _ALL
    """Templates that use it; others refuse it."""
    plain: bool = True
    """Whether it works in a script without hpctk."""
    excludes: tuple[str, ...] = ()
    """Later or earlier rows that a request must not have together with this one."""
    needs: str = ""
    """The row without which this one has no effect, or several, of which one is enough."""
    site: int = 0
    """Group of its default in a cluster file, 0 for none; sorted as directives are."""


T = TypeVar("T")


def _field(default: T, row: Row) -> T:
    found: T = field(default=default, metadata={"row": row})
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSpec:
    """One job script, in sbatch's terms; None leaves the value to the cluster's file.

    Times are whole seconds and memory is MiB; ``read_spec`` reads what users write. Raises
    RenderError or ConfigError for a value that no cluster could accept.
    """

    # Two or three lines for each row, as in a table.
    # fmt: off
    job_name: str = _field("work-queue", Row(JOB, v.NAME,
        "Name of the job and script. [default: TEMPLATE]", directive=1))
    account: str | None = _field(None, Row(PLACEMENT, text(v.WORD, "one account name"),
        "Account to charge.", directive=1, site=1))
    partition: str | None = _field(None, Row(PLACEMENT,
        text(v.WORDS, "partition names, separated by commas"), "Comma-separated partitions.",
        directive=1, site=1))
    qos: str | None = _field(None, Row(PLACEMENT, text(v.WORD, "one name of a quality of service"),
        "Quality of service.", directive=1, site=1))
    reservation: str | None = _field(None, Row("",
        text(v.WORDS, "reservation names, separated by commas"), "Comma-separated reservations.",
        directive=1, site=1))
    constraint: str | None = _field(None, Row("",
        text(v.FEATURES, "node features joined by & or |"), "Features that the nodes must have.",
        directive=1, site=1))
    nodelist: str | None = _field(None, Row("", v.HOSTS, "Nodes that the job must get.",
        directive=1))
    exclude: str | None = _field(None, Row("", v.HOSTS, "Nodes that the job must not get.",
        directive=1))
    nodes: int = _field(1, Row(RESOURCES, count(1, 65536), "Number of nodes. [default: 1]", "N",
        directive=1))
    ntasks: int | None = _field(None, Row("", count(1, 2**28),
        "Number of ranks in all. [default: --ntasks-per-node on each node]", "N", directive=1,
        templates=TASKS, excludes=("ntasks_per_gpu",)))
    ntasks_per_node: int | None = _field(None, Row(RESOURCES, count(1, _RANKS_MAX),
        "Ranks on each node. [default: one per GPU]", "N", directive=1, templates=TASKS,
        excludes=("ntasks_per_gpu",)))
    one_rank: bool = _field(False, Row(RESOURCES, v.FLAG,
        "Start one rank for all nodes; its items start steps by srun.", "", templates=QUEUES,
        excludes=("container",)))
    ntasks_per_gpu: int | None = _field(None, Row("", count(1, 32),
        "Ranks that share one GPU and see no other.", "N", templates=TASKS, needs="gpus_per_node"))
    gpus_per_node: int = _field(0, Row(RESOURCES, count(0, 128),
        "GPUs on each node: 4 or l40s:4. [default: 0]", "[TYPE:]N", directive=1,
        templates=_WITH_GPUS))
    gpu_type: str | None = _field(None, Row(RESOURCES, v.GPU_TYPE,
        "Type of the GPUs. [default: the cluster's]", "TYPE", needs="gpus_per_node"))
    isolate_gpus: bool = _field(False, Row(RESOURCES, v.FLAG,
        "Let each rank see only its own GPUs.", "", templates=TASKS, excludes=("ntasks_per_gpu",),
        needs="gpus_per_node"))
    gpu_bind: str | None = _field(None, Row("", v.GPU_BIND, "GPUs that a rank sees.", directive=1,
        templates=TASKS, excludes=("isolate_gpus", "ntasks_per_gpu"), needs="gpus_per_node"))
    gres: str | None = _field(None, Row("", v.GRES,
        "Generic resources of each node other than GPUs."))
    cpus_per_task: int | None = _field(None, Row(RESOURCES, count(1, 4096),
        "CPUs of each rank. [default: an equal share]", "N", directive=1,
        excludes=("cpus_per_gpu",), site=2))
    workers_per_task: int | None = _field(None, Row(RESOURCES, count(1, 1024),
        "Workers that share the CPUs and GPUs of each rank. [default: 1]", "N", templates=QUEUES))
    cpus_per_gpu: int | None = _field(None, Row("", count(1, 4096),
        "CPUs per GPU, shared by the ranks of a node.", "N", directive=1, needs="gpus_per_node"))
    mem: int | None = _field(None, Row(RESOURCES, v.NODE_MEMORY,
        "Memory of each node: 480G; 0: all; none: Slurm chooses.", "SIZE", directive=1,
        excludes=("mem_per_cpu", "mem_per_gpu"), site=2))
    mem_per_cpu: int | None = _field(None, Row("", v.MEMORY, "Memory per CPU.", "SIZE", directive=1,
        excludes=("mem_per_gpu",), site=2))
    mem_per_gpu: int | None = _field(None, Row("", v.MEMORY, "Memory per GPU.", "SIZE", directive=1,
        needs="gpus_per_node", site=2))
    exclusive: bool | str | None = _field(None, Row("", v.EXCLUSIVE,
        "Keep other jobs off the nodes; user, mcs or topo (24.05): only those of others.",
        "WHO", directive=1, excludes=("oversubscribe",)))
    oversubscribe: bool | None = _field(None, Row("", v.FLAG,
        "Let other jobs use the same CPUs.", "", directive=1))
    time: int | None = _field(None, Row(RESOURCES, v.WALLTIME,
        "Time limit, e.g. 4:00:00 or 4h; a plain number is minutes.", "TIME", directive=1,
        site=1))
    time_min: int | None = _field(None, Row("", v.WALLTIME,
        "Shortest limit that Slurm may choose to start earlier.", "TIME", directive=1))
    signal: str | None = _field(None, Row("", v.SIGNAL,
        "How long before the time limit the script is warned, up to a minute earlier.",
        f"{v.SIGNALLED}SECONDS", directive=1, plain=False))
    requeue: bool = _field(True, Row(SCHEDULING, v.FLAG,
        "Requeue the job while work remains. [default: on]", "", directive=2))
    idle_exit: int | None = _field(None, Row(ENVIRONMENT, v.DURATION,
        "How long a rank waits for work. [default: 10min]", "DURATION", templates=QUEUES))
    lease: int | None = _field(None, Row(ENVIRONMENT, v.DURATION,
        "Silence after which a rank counts as dead. [default: 3min]", "DURATION", templates=QUEUES))
    max_restarts: int = _field(MAX_RESTARTS, Row(SCHEDULING, count(0, 1000),
        f"Restarts, including Slurm's own. [default: {MAX_RESTARTS}]", "N", plain=False))
    array: str | None = _field(None, Row(SCHEDULING, v.ARRAY,
        "Indices of a job array; %8: at most 8 at once.", "0-99%8", directive=1, templates=ARRAYS))
    array_offset: int = _field(0, Row(SCHEDULING, count(0, 2**31),
        "Number added to the array index. [default: 0]", "N", needs="array", templates=ARRAYS,
        plain=False))
    dependency: str | None = _field(None, Row(SCHEDULING, v.DEPENDENCY,
        "Jobs to wait for: afterok:JOB, afterany:JOB ...", directive=1))
    kill_on_invalid_dep: bool | None = _field(None, Row("", v.FLAG,
        "no: leave the job pending if its dependency can never be met.", "no", directive=1))
    output: str | None = _field(None, Row(JOB, v.LOG, "The log. [default: slurm/logs/%x-%j.out]",
        "PATTERN", directive=4))
    error: str | None = _field(None, Row("", v.LOG, "A log for stderr alone.", "PATTERN",
        directive=4))
    open_mode: str | None = _field(None, Row("", text("append|truncate", "append or truncate"),
        "Whether a requeued job appends to its log or empties it.", directive=3))
    chdir: str | None = _field(None, Row("", v.DIRECTORY, "Working directory of the job.", "DIR",
        directive=4))
    sbatch: tuple[str, ...] = _field((), Row(JOB,
        v.Value(lambda texts, where: check_passed(texts, where, _OWN, _DEFAULTED)),
        "Any other option of sbatch; may be repeated.", "NAME[=VALUE]"))
    run: str | None = _field(None, Row(ENVIRONMENT,
        path(v.NO_OPTION, "a run's path; ./-x for one called -x"),
        "Run directory; the script's argument overrides it.", "DIR", templates=QUEUES))
    plain: bool = _field(False, Row(ENVIRONMENT, v.FLAG,
        "Use only srun and torchrun, without hpctk.", ""))
    python: str | None = _field(None, Row(ENVIRONMENT,
        path(v.ABSOLUTE, "the absolute path of an interpreter"),
        "Interpreter on the nodes. [default: this one]", "FILE"))
    container_python: str | None = _field(None, Row(ENVIRONMENT,
        path(v.ABSOLUTE, "an absolute path in the container"), "Interpreter in the container.",
        "FILE", needs="container", templates=(*QUEUES, *TRAININGS)))
    modules: tuple[str, ...] = _field((), Row(ENVIRONMENT, v.MODULES,
        "Load this module; may be repeated."))
    setup: tuple[str, ...] = _field((), Row(ENVIRONMENT, v.COMMANDS,
        "Run this command before the work starts; may be repeated.", "COMMAND"))
    env: tuple[tuple[str, str], ...] = _field((), Row(ENVIRONMENT, v.VARIABLES,
        "Export this variable; may be repeated.", "NAME=VALUE"))
    conda: str | None = _field(None, Row(ENVIRONMENT,
        text(v.CONDA, "an environment's name, or its absolute path without ':'"),
        "Activate this conda environment: name or path.", excludes=("venv",)))
    venv: str | None = _field(None, Row(ENVIRONMENT,
        text(v.PROGRAMS, "an absolute path without ':'"), "Use this virtual environment.", "DIR"))
    container: str | None = _field(None, Row(ENVIRONMENT,
        text(v.NO_OPTION, "an image: a file, or docker://name:tag"), "Run the ranks in this image.",
        "IMAGE", templates=_ALL))
    bind: tuple[str, ...] = _field((), Row(ENVIRONMENT, v.BINDS, "Bind a directory.",
        "FROM[:TO[:ro]]", needs="container"))
    stage_env: bool = _field(False, Row(ENVIRONMENT, v.FLAG,
        "Copy the environment of --python to each node's disk first.", "", excludes=("container",),
        plain=False))
    stage_dir: str | None = _field(None, Row(ENVIRONMENT,
        path(v.ABSOLUTE, "an absolute path on the nodes' own disks"),
        "Directory for copies. [default: $SLURM_TMPDIR or $TMPDIR]", "DIR", needs="stage stage_env",
        plain=False))
    node_setup: tuple[str, ...] = _field((), Row(ENVIRONMENT, v.COMMANDS,
        "Run this first, once on each node.", "COMMAND", plain=False))
    teardown: tuple[str, ...] = _field((), Row(ENVIRONMENT, v.COMMANDS,
        "Run this command at the end.", "COMMAND", plain=False))
    launch: str | None = _field(None, Row(TRAINING,
        text("task-per-node|task-per-gpu", "task-per-node or task-per-gpu"),
        "task-per-node (default) or task-per-gpu.", "FORM", templates=_SEVERAL, plain=False))
    nproc_per_node: int | None = _field(None, Row(TRAINING, count(1, 4096),
        "Ranks on each node. [default: one per GPU]", "N", templates=_SEVERAL))
    rank_restarts: int | None = _field(None, Row(TRAINING, count(0, 1000),
        "Restarts of ranks inside a job. [default: 3]", "N", templates=_LAUNCHED, plain=False))
    backend: str | None = _field(None, Row(TRAINING, text("nccl|gloo", "nccl or gloo"),
        "nccl or gloo. [default: nccl with GPUs]", "NAME", templates=_LAUNCHED, plain=False))
    run_dir: str | None = _field(None, Row(TRAINING,
        path(v.NO_OPTION, "a directory's path; ./-x for one called -x"),
        "Directory for rendezvous and logs. [default: runs/JOB-NAME]", "DIR", templates=TRAININGS,
        plain=False))
    stage: tuple[str, ...] = _field((), Row(TRAINING, v.STAGED,
        "Copy this to each node's disk first.", "PATH", excludes=("container",),
        templates=TRAININGS, plain=False))
    cpu_bind: str | None = _field(None, Row(TRAINING, v.CPU_BIND,
        "CPUs of each task: 'srun --cpu-bind'.", "WHAT", excludes=("hint",), templates=PROGRAMS))
    mem_bind: str | None = _field(None, Row(TRAINING, v.MEM_BIND,
        "NUMA nodes of each task: 'srun --mem-bind'.", "WHAT", templates=PROGRAMS))
    numa_binding: str | None = _field(None, Row(TRAINING,
        text("node", "node: each rank runs on the CPUs of its GPU's NUMA node"),
        "node: bind each rank to the CPUs near its GPU.", "MODE", templates=_LAUNCHED, plain=False))
    distribution: str | None = _field(None, Row(TRAINING, v.DISTRIBUTION,
        "Order of the tasks: 'srun --distribution'.", "HOW", templates=PROGRAMS))
    hint: str | None = _field(None, Row(TRAINING, v.HINT,
        "nomultithread, memory_bound ...: 'srun --hint'.", "WORD", templates=PROGRAMS))
    command: tuple[str, ...] = _field((), Row(_ARGUMENTS, v.PROGRAM,
        "Program and arguments; of a training the script and its arguments."))
    # fmt: on

    def __post_init__(self) -> None:
        for name, row in OPTIONS.items():
            value = getattr(self, name)
            if value is not None or DEFAULTS[name] is not None:
                row.value.check(value, option(name))
        _check_together(self)


OPTIONS: dict[str, Row] = {one.name: one.metadata["row"] for one in fields(ScriptSpec)}
"""The table, by the names of the fields."""

DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(ScriptSpec)}

FIELDS = tuple(name.replace("_", "-") for name, row in OPTIONS.items() if not row.panel)
"""Names that ``--sbatch`` takes for fields, which are checked."""

RIVALS = tuple((name, other) for name, row in OPTIONS.items() for other in row.excludes)
"""Pairs of fields that exclude each other."""

DEFAULT_OPTIONS = tuple(
    sorted((name for name, row in OPTIONS.items() if row.site), key=lambda n: OPTIONS[n].site)
)
"""Fields that may have a default in ``[defaults]``, or in a variable ``HPCTK_...``."""

MEMORY_OPTIONS = ("mem", *OPTIONS["mem"].excludes)


def option(name: str) -> str:
    """The option of a field, as users write it."""
    word = {"modules": "module"}.get(name, name).replace("_", "-")
    return f"--sbatch {word}" if word in FIELDS else f"--{word}"


def rivals_of(name: str) -> list[str]:
    return [one for pair in RIVALS if name in pair for one in pair if one != name]


_OWN: dict[str, str] = {
    name.replace("_", "-"): f"use {option(name)}"
    for name, row in OPTIONS.items()
    if row.directive or not row.panel
}
"""Options of sbatch that are rows, and how to write them."""

_DEFAULTED: tuple[str, ...] = (*FIELDS, *(name.replace("_", "-") for name in DEFAULT_OPTIONS))
"""Those of which a cluster file may have a default."""


def read_spec(values: Mapping[str, Any]) -> ScriptSpec:
    """The request with these fields, times and memory as users write them: "4h", "480G".

    Raises RenderError or ConfigError.
    """
    known = {name: value for name, value in values.items() if name in OPTIONS and value is not None}
    read = {name: read_quantity(name, value, option(name)) for name, value in known.items()}
    return ScriptSpec(**{**values, **read})


def read_quantity(name: str, value: Any, where: str) -> Any:
    """Parse the text of a field with a unit into seconds or MiB; keep other fields as they are."""
    read = OPTIONS[name].value.quantity
    if read is None:
        return value
    if not isinstance(value, str):
        raise refusal(where, value, "text with a unit, such as '4h' or '480G'")
    return read(value, where=where)


def shown(name: str, value: Any) -> Any:
    """The value of a field as ``read_spec`` and Slurm read it."""
    kind = OPTIONS[name].value
    return value if value is None or kind.quantity is None else kind.show(value)


def asked(spec: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, in their order."""
    return {
        one.name: getattr(spec, one.name)
        for one in fields(spec)
        if getattr(spec, one.name) != one.default
    }


def _check_together(spec: ScriptSpec) -> None:
    given = asked(spec)
    for name, other in RIVALS:
        if name in given and other in given:
            msg = f"{option(name)} and {option(other)} exclude each other"
            raise RenderError(msg, hint="leave one of them out")
    for name in given:
        needed = OPTIONS[name].needs.split()
        if needed == ["gpus_per_node"] and not spec.gpus_per_node:
            msg = f"{option(name)}: the job requests no GPU"
            raise RenderError(msg, hint="add --gpus-per-node N, or leave the option out")
        if needed and given.keys().isdisjoint(needed):
            msg = f"{option(name)} needs {' or '.join(map(option, needed))}"
            hint = f"add {option(needed[0])} {OPTIONS[needed[0]].metavar}, or leave it out"
            raise RenderError(msg, hint=hint)
    if (workers := spec.workers_per_task or 1) > (spec.cpus_per_task or workers):
        msg = f"--workers-per-task: {workers} workers are more than the {spec.cpus_per_task} CPUs"
        hint = f"each worker has CPUs of its own: add --cpus-per-task {workers}"
        raise RenderError(f"{msg} of a rank", hint=hint)
    _check_logs(spec)
    if spec.ntasks is None:
        return
    if spec.ntasks < spec.nodes:
        msg = f"--sbatch ntasks: {spec.ntasks} ranks are fewer than {spec.nodes} nodes"
        raise RenderError(msg, hint="request fewer nodes")
    most = spec.nodes * (spec.ntasks_per_node or _RANKS_MAX)
    if spec.ntasks > most:
        msg = f"--sbatch ntasks: {spec.ntasks} are more than"
        msg += f" --nodes x --ntasks-per-node, at most {most}"
        raise RenderError(msg, hint="leave out --ntasks-per-node, or request more nodes")


def _check_logs(spec: ScriptSpec) -> None:
    for name in ("output", "error"):
        if "/" in spec.job_name and re.search("%[0-9]*x", getattr(spec, name) or ""):
            msg = f"{option(name)}: %x is the job's name, whose '/' would name a directory"
            raise RenderError(msg, hint="leave out %x, or the '/' in --job-name")
