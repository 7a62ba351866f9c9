"""Plan of a launch on this node: who starts the ranks, how many, and where they meet."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.system.ranks import task_counts
from hpc_toolkit.training.launch.options import all_options

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Position of this task in its step."""

    job: str
    """The job ID (SLURM_JOB_ID), which differs for each element of an array."""
    restart: int
    """How often Slurm restarted this job (SLURM_RESTART_COUNT)."""
    step: str
    """The step's number in its job."""
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

        Raises:
            ConfigError: a variable is missing, or contradicts another.
        """
        if not environ.get("SLURM_STEP_ID", "").isdigit():
            return None
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
        return cls(
            job=environ.get("SLURM_JOB_ID", "0"),
            restart=_number({"SLURM_RESTART_COUNT": "0", **environ}, "SLURM_RESTART_COUNT"),
            step=environ["SLURM_STEP_ID"],
            task=task,
            node=node,
            local=local,
            tasks=tasks,
        )

    @property
    def name(self) -> str:
        """Name that differs from every other step and every other start of this job."""
        return f"{self.job}.{self.restart}.{self.step}"

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
_PORT = 29500
_PORTS = range(1, 1 << 16)
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
    """The options of torchrun that were given, by name."""
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
    meeting: Literal["alone", "directory", "address", "torch"]
    """How nodes meet: one node alone, the run directory, a given address, torch's rendezvous."""
    start_timeout_s: float
    host: str = ""
    """Where node 0 listens, with the meeting "address"."""
    port: int = 0
    """The port of node 0; with 0 the kernel chooses a free one."""
    run_dir: Path | None = None
    log_dir: Path | None = None
    """Directory of the ranks' output files; None for a temporary one."""
    own_logs: bool = True
    """Whether hpctk names the output files, by rank and restart."""

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        values = asdict(self)
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in values.items()
        }


def check_request(request: Request) -> None:
    """Reject a request that cannot start, before anything is started.

    Raises:
        ConfigError: the script is missing, or an option or a value is invalid.
    """
    known = all_options()
    for name in request.options:
        if name not in known:
            from hpc_toolkit.errors import near_miss

            message = f"launch has no option {name!r}"
            raise ConfigError(message, hint=near_miss(name, list(known)))
    _check_kinds(request)
    if request.backend not in (None, "nccl", "gloo"):
        message = f"--backend: {request.backend!r} is neither nccl nor gloo"
        raise ConfigError(message, hint="nccl for NVIDIA GPUs, gloo for CPUs")
    if not 0 < request.start_timeout_s <= _LONGEST_S:
        message = f"--start-timeout: {request.start_timeout_s:g} s is outside 0 s to 366 days"
        raise ConfigError(message, hint="such as --start-timeout 10min")
    _check_script(request)


def _check_kinds(request: Request) -> None:
    """Reject values of the wrong type, which only a call from Python can give."""
    if isinstance(request.start_timeout_s, bool) or not isinstance(
        request.start_timeout_s, int | float
    ):
        message = f"start_timeout: {request.start_timeout_s!r} is not a number"
        raise ConfigError(message, hint="such as start_timeout=600, in seconds")
    known = all_options()
    for name, value in request.options.items():
        if value is None:
            continue
        if not known[name].metavar and not isinstance(value, bool):
            message = f"{name}: {value!r} is neither True nor False"
            raise ConfigError(message, hint=f"such as {name}=True, or leave it out")
        if known[name].metavar and not isinstance(value, str | int | float | Path):
            message = f"{name}: {value!r} is neither a text nor a number"
            raise ConfigError(message, hint="see hpctk launch --help")


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


def make_plan(
    request: Request,
    namespace: Any,
    environ: Mapping[str, str] = os.environ,
    *,
    step: Step | None,
    backend: str,
) -> Plan:
    """Plan the launch for the agent of one node.

    Args:
        request: the script and the options that were given.
        namespace: torchrun's options, including the defaults and PET_ variables, with
            ``nproc_per_node`` as a number.
        environ: this process's variables.
        step: the position of this task in its step; None outside a step.
        backend: nccl or gloo.

    Raises:
        ConfigError: options contradict each other or Slurm.
    """
    given = given_options(request, environ)
    nodes, node_rank = _place(namespace, given, step)
    meeting = _meeting(request, namespace, given, nodes=nodes, step=step)
    log_dir = Path(namespace.log_dir) if namespace.log_dir else None
    if log_dir is None and request.run_dir is not None:
        log_dir = request.run_dir / "logs"
    launch = _name(namespace, given, step)
    named = meeting != "torch" and bool(given & {"master_addr", "master_port"})
    return Plan(
        form="agent",
        launch=launch,
        nodes=nodes,
        node_rank=node_rank,
        ranks=namespace.nproc_per_node,
        backend=backend,
        meeting=meeting,
        start_timeout_s=request.start_timeout_s,
        host=namespace.master_addr if named else "",
        port=(namespace.master_port or _PORT) if named else 0,
        run_dir=request.run_dir,
        log_dir=log_dir / launch if log_dir is not None else None,
        own_logs=namespace.logs_specs is None,
    )


def task_plan(
    request: Request, step: Step, environ: Mapping[str, str] = os.environ, *, backend: str
) -> Plan:
    """Plan the launch for one of several tasks of a node, which becomes a rank.

    Raises:
        ConfigError: an option has no effect here, or the run directory is missing.
    """
    given = given_options(request, environ) - _OF_RANKS
    if given:
        spelled = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        message = f"{spelled}: srun started each rank here, so that there is no agent to obey it"
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


def _name(namespace: Any, given: set[str], step: Step | None) -> str:
    """Return the name of this launch, which is valid as a file name."""
    words = [namespace.rdzv_id] if "rdzv_id" in given else []
    if step is not None:
        words.append(step.name)
    elif not words:
        words.append(f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    return re.sub(r"[^A-Za-z0-9._-]", "_", ".".join(words)).lstrip(".") or "_"


def given_options(request: Request, environ: Mapping[str, str] = os.environ) -> set[str]:
    """Return the options that were given, also by torchrun's variables such as PET_NNODES."""
    from_environ = {name for name in all_options() if f"PET_{name.upper()}" in environ}
    return {*request.options, *from_environ}


def left_out(
    request: Request, plan: Plan, environ: Mapping[str, str] = os.environ
) -> HpcToolkitError | None:
    """Return a warning if the ranks start on only one node of a job that has several."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    if plan.form != "agent" or plan.nodes > 1 or not nodes.isdigit() or int(nodes) < 2:
        return None
    if given_options(request, environ) & {"nnodes", "standalone"}:
        return None
    message = f"this job has {nodes} nodes, and these ranks start on this one alone"
    hint = "start hpctk launch with srun, one task per node; or say --nnodes 1"
    return HpcToolkitError(message, hint=hint)


def _place(namespace: Any, given: set[str], step: Step | None) -> tuple[int, int]:
    """Return the number of nodes and the number of this node."""
    least, _, most = str(namespace.nnodes).partition(":")
    if (
        not least.isdigit()
        or (most and not most.isdigit())
        or not 0 < int(least) <= int(most or least)
    ):
        message = f"--nnodes: {namespace.nnodes!r} is not a number of nodes"
        raise ConfigError(message, hint="such as --nnodes 4, or 2:4 with --rdzv-backend c10d")
    nodes, node_rank = int(most or least), namespace.node_rank
    if step is not None:
        found = {"nnodes": (len(step.tasks), nodes), "node_rank": (step.node, node_rank)}
        for name, (slurm, value) in found.items():
            if name in given and slurm != value:
                message = f"--{name.replace('_', '-')} is {value}, and Slurm says {slurm}"
                raise ConfigError(message, hint="leave it out: inside a step Slurm is asked")
        return len(step.tasks), step.node
    if most and least != most and not _torchs(given):
        message = f"--nnodes {namespace.nnodes}: only torch's c10d takes a range of nodes"
        raise ConfigError(message, hint="give a number, or --rdzv-backend c10d --rdzv-endpoint ..")
    if not _torchs(given) and not 0 <= node_rank < nodes:
        message = f"--node-rank {node_rank} is not one of the {nodes} nodes"
        raise ConfigError(message, hint="they are numbered from 0")
    return nodes, node_rank


def _torchs(given: set[str]) -> bool:
    return bool(given & {"rdzv_backend", "rdzv_endpoint"})


def _meeting(
    request: Request, namespace: Any, given: set[str], *, nodes: int, step: Step | None
) -> Literal["alone", "directory", "address", "torch"]:
    """Return how the nodes meet."""
    port = namespace.master_port
    if port is not None and port not in _PORTS:
        message = f"{all_options()['master_port'].spelling}: {port} is not a valid port"
        raise ConfigError(message, hint="from 1 to 65535, or leave it out")
    if namespace.standalone:
        if nodes > 1:
            message = f"--standalone is for one node, and there are {nodes}"
            raise ConfigError(message, hint="leave it out")
        return "alone"
    if _torchs(given):
        return "torch"
    if "rdzv_conf" in given:
        message = "--rdzv-conf says how torch's own rendezvous works, which is not used"
        raise ConfigError(message, hint="give --rdzv-backend with it, or leave it out")
    if nodes == 1:
        return "alone"
    if given & {"master_addr", "master_port"}:
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
