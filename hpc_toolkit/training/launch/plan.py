"""Plan of a launch on this node: who starts the ranks, how many, and where they meet."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.errors import ConfigError, HpcToolkitError, near_miss
from hpc_toolkit.system.options import Option, by_name, flag, spelled
from hpc_toolkit.system.quantities import parse_counts
from hpc_toolkit.system.ranks import task_counts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.system.options import Panels

PANELS: Panels = {
    "Ranks": (
        Option(
            "nproc_per_node", "N, gpu, cpu or auto. [default: 1; one per GPU in Slurm]", "N|KIND"
        ),
        Option("nnodes", "Number of nodes. [default: 1]", "N"),
        Option("node_rank", "Rank of this node, from 0.", "N"),
        flag("module", "Treat SCRIPT as a module, like 'python -m'.", short="-m"),
        flag("no_python", "Treat SCRIPT as a program, not as Python."),
        Option("numa_binding", "Bind each rank to the CPUs near its GPU: node.", "MODE"),
    ),
    "Rendezvous": (
        Option("master_addr", "Address of node 0. [default: read from --run-dir]", "HOST"),
        Option("master_port", "Port of node 0. [default: 29500 with an address]", "N"),
        Option("local_addr", "Address of this node.", "HOST", hidden=True),
        flag("standalone", "Run on this node only; the default.", hidden=True),
        Option("rdzv_id", "Unique name of this launch; the same on all nodes.", "ID"),
    ),
    "Failures and signals": (
        Option("max_restarts", "Restart all ranks up to N times. [default: 0]", "N"),
        Option("shutdown_timeout", "Time for ranks to exit. [default: 30s]", "DURATION"),
    ),
    "Output": (
        Option("log_dir", "Directory of the ranks' logs. [default: logs/ in --run-dir]", "DIR"),
        Option("redirects", "Write to files: 1 stdout, 2 stderr, 3 both.", "0-3", short="-r"),
        Option("tee", "Write to files and the terminal. [default: 3]", "0-3", short="-t"),
        Option("local_ranks_filter", "Show only the output of these local ranks: 0,3.", "LIST"),
    ),
}
"""Options that torchrun has as well, by panel of the help, in torchrun's longest spelling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Position of this task in its step."""

    name: str
    """JOB.RESTART.STEP, which differs from every other step and every other start of this job."""
    task: int
    """The number of this task in the step, from 0 (SLURM_PROCID)."""
    node: int
    """The number of this node in the step, from 0 (SLURM_NODEID)."""
    local: int
    """The number of this task on its node, from 0 (SLURM_LOCALID)."""
    tasks: tuple[int, ...]
    """Number of tasks on each node of the step, in the order of the nodes."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Step | None:
        """Read srun's variables; return None outside a step, such as in a batch script.

        Raises ConfigError if a variable is missing, or contradicts another.
        """
        if not environ.get("SLURM_STEP_ID", "").isdigit():
            return None
        # SLURM_JOB_ID differs for each element of an array.
        job, restart = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_RESTART_COUNT", "0")
        tasks = tuple(task_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", "")))
        task, node, local = (
            _number(environ, f"SLURM_{name}") for name in ("PROCID", "NODEID", "LOCALID")
        )
        if node >= len(tasks) or local >= tasks[node] or task >= sum(tasks):
            message = (
                f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE', '')!r} has "
                f"no task {task} that is number {local} of node {node}"
            )
            raise ConfigError(message, hint="start hpctk launch with srun, once per task")
        name = f"{job}.{restart}.{environ['SLURM_STEP_ID']}"
        return cls(name=name, task=task, node=node, local=local, tasks=tasks)

    @property
    def per_node(self) -> bool:
        """Whether every node has one task, which then starts the node's ranks."""
        return max(self.tasks) == 1


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        message = f"{name}={text!r} in a step of Slurm is not a number"
        raise ConfigError(message, hint="start hpctk launch with srun, once per task")
    return int(text)


START_TIMEOUT_S = 600.0
_LONGEST_S = 366 * 86400.0
_SHUTDOWN_TIMEOUT_S = 30.0
_PORT = 29500
_PORTS = range(1, 1 << 16)
_MOST_RANKS = 999_999
_OF_RANKS = {"module", "no_python"}
"""Options that still apply if srun started every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A launch as the user requested it."""

    script: str
    """A file; a module with ``module``, a program with ``no_python``."""
    arguments: tuple[str, ...] = ()
    """The arguments of the script."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of :data:`PANELS` that were given, by name; a duration in seconds."""
    backend: str | None = None
    """nccl or gloo; None chooses by the node's GPUs."""
    start_timeout_s: float = START_TIMEOUT_S
    """How long to wait for all nodes."""
    run_dir: Path | None = None
    """The directory that all nodes share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What this process will do."""

    form: Literal["agent", "task"]
    """Whether it starts the ranks of its node, or becomes a rank."""
    launch: str
    """Name of this launch: the same on all nodes, and different from every other launch."""
    nodes: int
    node_rank: int
    """Number of this node, from 0."""
    ranks: int
    """Ranks on this node; with ``form`` "task", the ones that srun started there."""
    backend: str
    """nccl or gloo."""
    meeting: Literal["alone", "directory", "address"]
    """How nodes meet: one node alone, the run directory, a given address."""
    start_timeout_s: float
    host: str = ""
    """The given address of node 0."""
    port: int = 0
    """The port of node 0; with 0 the kernel chooses a free one."""
    local_addr: str = ""
    """The address under which other nodes reach this one; "" to find it."""
    max_restarts: int = 0
    """How often all ranks start again after one has failed."""
    shutdown_timeout_s: float = _SHUTDOWN_TIMEOUT_S
    """How long ranks may take to save their state and exit."""
    near_gpus: bool = False
    """Whether each rank runs on the CPUs of its GPU's NUMA node."""
    run_dir: Path | None = None
    log_dir: Path | None = None
    """Directory of the ranks' output files; None for a temporary one."""
    tee: int = 3
    """Streams that go to files and to the terminal: 1 stdout, 2 stderr, 3 both."""
    redirects: int = 0
    """Streams that go to files only."""
    shown: tuple[int, ...] = ()
    """Local ranks whose output appears on the terminal; empty for all."""

    @property
    def rendezvous(self) -> Path:
        """The symlink that names the address of node 0, if nodes meet in the run directory."""
        assert self.run_dir is not None
        return self.run_dir / "rendezvous" / self.launch


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "": ((bool,), "True or False"),
    "N": ((int,), "a whole number"),
    "DURATION": ((int, float), "a number of seconds"),
}
"""Types of an option's values by its metavar, and their name for people."""
_OTHER_KIND = ((str, int, Path), "a text or a number")


def check_request(request: Request) -> None:
    """Reject a request that cannot start, before anything is started.

    Raises ConfigError if the script is missing, or an option or a value is invalid.
    """
    known = by_name(PANELS)
    values = [("start_timeout", "DURATION", request.start_timeout_s)]
    for name, value in request.options.items():
        if name not in known:
            message = f"launch has no option {name!r}"
            raise ConfigError(message, hint=near_miss(name, list(known)))
        values.append((name, known[name].metavar, value))
    # Only a call from Python can give values of another type.
    for name, metavar, value in values:
        types, words = _KINDS.get(metavar, _OTHER_KIND)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            message = f"{name}: {value!r} is not {words}"
            raise ConfigError(message, hint="see hpctk launch --help")
    if request.backend not in (None, "nccl", "gloo"):
        message = f"--backend: {request.backend!r} is neither nccl nor gloo"
        raise ConfigError(message, hint="nccl for NVIDIA GPUs, gloo for CPUs")
    if not 0 < request.start_timeout_s <= _LONGEST_S:
        message = f"--start-timeout: {request.start_timeout_s:g} s is outside 0 s to 366 days"
        raise ConfigError(message, hint="such as --start-timeout 10min")
    _check_script(request)


def _check_script(request: Request) -> None:
    script = request.script
    if request.options.get("module"):
        top = script.partition(".")[0]
        # As 'python -m' does, look in the current directory first.
        here = any(Path(top + end).exists() for end in ("", ".py"))
        if not top or not (here or importlib.util.find_spec(top)):
            message = f"there is no module {script!r}"
            raise ConfigError(message, hint="is it installed for the Python that runs hpctk?")
    elif request.options.get("no_python"):
        if shutil.which(script) is None:
            message = f"there is no program {script!r}"
            raise ConfigError(message, hint="give its path, or leave out --no-python")
    elif not Path(script).is_file():
        message = f"there is no script {script!r}"
        raise ConfigError(message, hint="options of launch stand before the script; -m is a module")
    elif script.startswith("-"):
        message = f"Python would read {script!r} as an option of its own"
        raise ConfigError(message, hint=f"write ./{script}")


def make_plan(request: Request, *, step: Step | None, ranks: int, backend: str) -> Plan:
    """Plan the launch for the agent of one node, which starts ``ranks`` ranks.

    Raises ConfigError if options contradict each other or Slurm, or a value is invalid.
    """
    given = request.options
    if given.get("numa_binding", "node") != "node":
        message = f"--numa-binding: unknown mode {given['numa_binding']!r}"
        raise ConfigError(message, hint="the only mode is node; srun's --cpu-bind has others")
    nodes, node_rank = _place(given, step)
    meeting = _meeting(request, nodes=nodes, step=step)
    log_dir = Path(given["log_dir"]) if "log_dir" in given else None
    if log_dir is None and request.run_dir is not None:
        log_dir = request.run_dir / "logs"
    launch = _name(given.get("rdzv_id"), step)
    named = bool(given.keys() & {"master_addr", "master_port"})
    shown = str(given.get("local_ranks_filter", ""))
    return Plan(
        form="agent",
        launch=launch,
        nodes=nodes,
        node_rank=node_rank,
        ranks=ranks,
        backend=backend,
        meeting=meeting,
        start_timeout_s=request.start_timeout_s,
        host=given.get("master_addr", "127.0.0.1") if named else "",
        port=given.get("master_port", _PORT) if named else 0,
        local_addr=given.get("local_addr", ""),
        max_restarts=_at_least("max_restarts", given.get("max_restarts", 0), 0),
        shutdown_timeout_s=given.get("shutdown_timeout", _SHUTDOWN_TIMEOUT_S),
        near_gpus="numa_binding" in given,
        run_dir=request.run_dir,
        log_dir=log_dir / launch if log_dir is not None else None,
        redirects=_streams("redirects", given.get("redirects", 0)),
        tee=_streams("tee", given.get("tee", 0 if "redirects" in given else 3)),
        shown=parse_counts(shown, "--local-ranks-filter", least=0, most=_MOST_RANKS)
        if shown
        else (),
    )


def task_plan(request: Request, step: Step, *, backend: str) -> Plan:
    """Plan the launch for one of several tasks of a node, which becomes a rank.

    Raises ConfigError if an option has no effect here, or the run directory is missing.
    """
    if given := sorted(request.options.keys() - _OF_RANKS):
        words = ", ".join(map(spelled, given))
        message = f"{words}: srun started each rank here, so that there is no agent to obey it"
        hint = "start one task per node (srun --ntasks-per-node=1), or leave it to srun"
        raise ConfigError(message, hint=hint)
    if request.run_dir is None:
        raise _no_run_dir(sum(step.tasks), "ranks")
    return Plan(
        form="task",
        launch=step.name,
        nodes=len(step.tasks),
        node_rank=step.node,
        ranks=step.tasks[step.node],
        backend=backend,
        meeting="directory",
        start_timeout_s=request.start_timeout_s,
        run_dir=request.run_dir,
    )


def left_out(
    request: Request, plan: Plan, environ: Mapping[str, str] = os.environ
) -> HpcToolkitError | None:
    """Return a warning if the ranks start on only one node of a job that has several."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    if plan.form != "agent" or plan.nodes > 1 or not nodes.isdigit() or int(nodes) < 2:
        return None
    if request.options.keys() & {"nnodes", "standalone"}:
        return None
    message = f"this job has {nodes} nodes, and these ranks start on this one alone"
    hint = "start hpctk launch with srun, one task per node; or say --nnodes 1"
    return HpcToolkitError(message, hint=hint)


def _name(rdzv_id: object, step: Step | None) -> str:
    """Return the name of this launch, which is valid as a file name."""
    words = [str(rdzv_id)] if rdzv_id is not None else []
    if step is not None:
        words.append(step.name)
    elif not words:
        words.append(f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    return re.sub(r"[^A-Za-z0-9._-]", "_", ".".join(words)).lstrip(".") or "_"


def _place(given: Mapping[str, Any], step: Step | None) -> tuple[int, int]:
    """Return the number of nodes and the number of this node."""
    if step is not None:
        found = {"nnodes": len(step.tasks), "node_rank": step.node}
        for name, slurms in found.items():
            if given.get(name, slurms) != slurms:
                message = f"{spelled(name)} is {given[name]}, and Slurm says {slurms}"
                raise ConfigError(message, hint="leave it out: inside a step Slurm is asked")
        return len(step.tasks), step.node
    nodes, node_rank = _at_least("nnodes", given.get("nnodes", 1), 1), given.get("node_rank", 0)
    if not 0 <= node_rank < nodes:
        message = f"--node-rank {node_rank} is not one of the {nodes} nodes"
        raise ConfigError(message, hint="they are numbered from 0")
    return nodes, node_rank


def _meeting(
    request: Request, *, nodes: int, step: Step | None
) -> Literal["alone", "directory", "address"]:
    """Return how the nodes meet."""
    given = request.options
    if "master_port" in given and given["master_port"] not in _PORTS:
        message = f"{spelled('master_port')}: {given['master_port']} is not a valid port"
        raise ConfigError(message, hint="from 1 to 65535, or leave it out")
    if given.get("standalone") and nodes > 1:
        message = f"--standalone is for one node, and there are {nodes}"
        raise ConfigError(message, hint="leave it out")
    if nodes == 1:
        return "alone"
    if given.keys() & {"master_addr", "master_port"}:
        return "address"
    if request.run_dir is None:
        raise _no_run_dir(nodes, "nodes")
    if step is None and "rdzv_id" not in given:
        message = f"{nodes} nodes that meet in {request.run_dir} need a name for this launch"
        hint = "--rdzv-id NAME, the same on all nodes and another one each time"
        raise ConfigError(message, hint=hint)
    return "directory"


def _no_run_dir(count: int, what: str) -> HpcToolkitError:
    message = f"{count} {what} need a directory that they share, to find each other"
    return ConfigError(message, hint="--run-dir DIR; or --nnodes, --node-rank and an address")


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        message = f"{spelled(name)}: {value} is below {least}"
        raise ConfigError(message, hint="see hpctk launch --help")
    return value


def _streams(name: str, value: object) -> int:
    if str(value) not in ("0", "1", "2", "3"):
        message = f"{spelled(name)}: {str(value)!r} is not a number from 0 to 3"
        raise ConfigError(message, hint="0 for none, 1 for stdout, 2 for stderr, 3 for both")
    return int(str(value))
