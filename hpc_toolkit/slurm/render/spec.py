"""A user's request for a job script, checked when it is created.

An instance is valid by construction: no later step sees a value that a shell could misread.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import RenderError, near_miss
from hpc_toolkit.slurm.allowlist import QUANTITIES, read_quantity, refuse_twice, show_quantity
from hpc_toolkit.slurm.render.grammar import FIELDS, PASSED
from hpc_toolkit.slurm.render.rules import asked, check_request, option, option_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from dataclasses import Field

MAX_RESTARTS = 10
"""Also the default of ``hpctk batch``, so that a script need not say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSpec:
    """One job script, in sbatch's terms; None leaves the value to the cluster's file.

    Times are whole seconds and memory is MiB; ``read_spec`` reads what users write. Raises
    RenderError or ConfigError for a value that no cluster could accept.
    """

    job_name: str = "work-queue"
    """Name of the job and, with ``.sbatch``, of the script."""
    account: str | None = None
    partition: str | None = None
    """Comma-separated partitions; many sites choose by the time limit."""
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    nodes: int = 1
    ntasks: int | None = None
    """Total number of ranks; by default ``ntasks_per_node`` on each node."""
    ntasks_per_node: int | None = None
    """Ranks on each node; by default one per GPU, or one without GPUs."""
    ntasks_per_gpu: int | None = None
    """Ranks that share one GPU and see no other."""
    gpus_per_node: int = 0
    gpu_type: str | None = None
    """Type of the GPUs, if it is not the cluster's."""
    isolate_gpus: bool = False
    """Whether a rank sees only its own GPUs; otherwise it sees all GPUs of its node."""
    gpu_bind: str | None = None
    """Which GPUs a rank sees, in sbatch's notation."""
    gres: str | None = None
    """Generic resources of each node other than GPUs."""
    cpus_per_task: int | None = None
    """CPUs of each rank; by default its share of the node's."""
    cpus_per_gpu: int | None = None
    """CPUs per GPU, shared by the ranks of a node."""
    mem: int | None = None
    """MiB of each node; 0 is all of its memory. Excludes the next two options."""
    mem_per_cpu: int | None = None
    mem_per_gpu: int | None = None
    exclusive: bool | str = False
    """Whether to keep other jobs off the nodes: True for all jobs, or only for those of another
    "user", "mcs" label or "topo" block (Slurm 24.05)."""
    oversubscribe: bool = False
    """Whether other jobs may use the same CPUs."""
    time: int | None = None
    time_min: int | None = None
    """Shortest limit, in seconds, that Slurm may lower ``time`` to in order to start earlier."""
    signal: str | None = None
    """``B:USR1@seconds``: how long before the time limit the script is warned, up to a minute
    earlier."""
    requeue: bool = True
    """Whether the job may start again: by Slurm after a failure, by its script while items are
    left."""
    idle_exit: int | None = None
    """Seconds that a rank waits for work before it leaves: ``hpctk work --idle-exit``."""
    lease: int | None = None
    """Seconds of silence after which a rank counts as dead: ``hpctk work --lease``."""
    max_restarts: int = MAX_RESTARTS
    array: str | None = None
    array_offset: int = 0
    """Number that the script adds to its index; a long list of indices needs several arrays."""
    dependency: str | None = None
    kill_on_invalid_dep: bool = True
    """Whether Slurm cancels the job, or leaves it pending, if its dependency can never be met."""
    output: str | None = None
    """The log's path in sbatch's notation, relative to ``chdir``; see ``log_pattern``."""
    error: str | None = None
    open_mode: str = "append"
    """Whether a requeued job appends to its log or empties it."""
    chdir: str | None = None
    sbatch: tuple[str, ...] = ()
    """``NAME[=VALUE]``: options of sbatch that have no field of their own, such as ``begin`` and
    ``mail-type``. sbatch checks their values."""
    run: str | None = None
    """The run directory; the script's first argument overrides it."""
    plain: bool = False
    """Whether the script has nothing of hpctk in it, and gives up what hpctk does around a step."""
    python: str | None = None
    """Absolute path of the interpreter on the nodes that has hpc_toolkit; needed unless ``plain``.
    """
    container_python: str | None = None
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    conda: str | None = None
    venv: str | None = None
    """Absolute path of a virtual environment; its interpreter and programs come first."""
    container: str | None = None
    bind: tuple[str, ...] = ()
    """``FROM[:TO[:ro]]``: directories to bind into the container, after the cluster's."""
    node_setup: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()
    """Commands to run in the script after the step, however it ended."""
    launch: str | None = None
    """How the ranks of a training are started: "task-per-node", by one launcher on each node, or
    "task-per-gpu", by srun."""
    nproc_per_node: int | None = None
    """Ranks of a training on each node; by default one per GPU, or one without GPUs."""
    rank_restarts: int | None = None
    """How often a training's ranks start again inside the job after one of them failed."""
    backend: str | None = None
    run_dir: str | None = None
    """Directory of a training for its rendezvous, logs and checkpoints."""
    stage: tuple[str, ...] = ()
    stage_dir: str | None = None
    """Directory for these copies; by default the job's directory on the node's disk."""
    cpu_bind: str | None = None
    """CPUs that each task of a training is bound to: ``srun --cpu-bind``."""
    mem_bind: str | None = None
    """NUMA nodes from which a task gets memory: ``srun --mem-bind``."""
    numa_binding: str | None = None
    """How a launcher binds each rank to CPUs near its GPU: "node" for those of its NUMA node."""
    distribution: str | None = None
    """How tasks are spread over nodes, sockets and cores: ``srun --distribution``."""
    hint: str | None = None
    """How to bind tasks to cores and threads, such as nomultithread: ``srun --hint``."""
    command: tuple[str, ...] = ()
    """Program and arguments of the ``command`` template, word by word; for a training the script
    and its arguments."""

    def __post_init__(self) -> None:
        check_request(self)


def read_spec(values: Mapping[str, Any]) -> ScriptSpec:
    """The request with these fields, times and memory as users write them: "4h", "480G".

    Raises RenderError or ConfigError.
    """
    read = {
        name: read_quantity(value, name, option(name))
        for name, value in values.items()
        if name in QUANTITIES and value is not None
    }
    return ScriptSpec(**{**values, **read})


def command_line(spec: ScriptSpec, template: str, cluster: str) -> list[str]:
    """Return the words of the command that renders this script again."""
    argv = ["hpctk", "render", template, "--cluster", cluster]
    values: dict[str, Any] = {
        name: show_quantity(value, name) if name in QUANTITIES else value
        for name, value in asked(spec).items()
    }
    words = values.pop("command", ())
    for name, value in values.items():
        passed = name.replace("_", "-")
        if passed in FIELDS:
            text = "no" if value is False else value
            argv += ["--sbatch", passed if value is True else f"{passed}={text}"]
        else:
            argv += option_words(option(name), value)
    return [*argv, "--", *words] if words else argv


def read_command(argv: Sequence[str]) -> tuple[str, str, dict[str, Any]]:
    """The template, the cluster and the fields of a ``command_line`` that was split into words.

    ``read_spec(fields)`` is the request. Raises RenderError for an option that this version does
    not know, and ValueError for words that are not such a command.
    """
    known = {option(field.name): field for field in fields(ScriptSpec)}
    hpctk, render, template, name, cluster, *words = argv
    if (hpctk, render, name) != ("hpctk", "render", "--cluster"):
        raise ValueError(argv)
    found: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        if word == "--":
            found["command"] = tuple(words)
            break
        negated = word not in known and word.startswith("--no-")
        field = known.get(word.replace("--no-", "--", 1) if negated else word)
        if field is None:
            msg = f"its request has an unknown option {word!r}"
            raise RenderError(msg, hint=near_miss(word, list(known)))
        if isinstance(field.default, bool):
            found[field.name] = not negated
        else:
            found[field.name] = _read_value(field, words.pop(0), found.get(field.name, ()))
    return template, cluster, found | read_sbatch(found.pop("sbatch", ()))


def read_sbatch(texts: Sequence[str]) -> dict[str, Any]:
    """The fields that ``--sbatch NAME[=VALUE]`` sets; other names stay in the field ``sbatch``.

    Raises RenderError for a name that is given twice or lacks its value.
    """
    refuse_twice([text.partition("=")[0] for text in texts], "--sbatch")
    found: dict[str, Any] = {}
    passed = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and needs_value(name):
            msg = f"--sbatch: {name!r} needs a value"
            raise RenderError(msg, hint=f"write --sbatch {name}=VALUE")
        if name not in FIELDS:
            passed.append(text)
            continue
        field = _field(name)
        try:
            found[field.name] = _read_value(field, value) if equals else True
        except ValueError:
            found[field.name] = value  # read_spec refuses it and names the range
    return found | ({"sbatch": tuple(passed)} if passed else {})


def needs_value(name: str) -> bool:
    """Whether this option of sbatch must have a value; False for one that hpctk does not know."""
    return name in PASSED or (name in FIELDS and _field(name).default is not False)


def _field(name: str) -> Field[Any]:
    return next(field for field in fields(ScriptSpec) if field.name == name.replace("-", "_"))


def _read_value(field: Field[Any], text: str, before: tuple[Any, ...] = ()) -> Any:
    """The value of a field from one option; ``before``, of the same option given earlier."""
    if field.name == "env":
        name, _, value = text.partition("=")
        return (*before, (name, value))
    if isinstance(field.default, tuple):
        return (*before, text)
    if isinstance(field.default, bool):
        return {"yes": True, "no": False}.get(text, text)
    is_count = "int" in str(field.type).split(" | ") and field.name not in QUANTITIES
    return int(text) if is_count else text
