"""Plan of a launch on this node: its step, who starts the ranks, how many, and where they meet."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hpc_toolkit.errors import ConfigError, HpcToolkitError, near_miss
from hpc_toolkit.system import tomltable
from hpc_toolkit.system.options import spelled
from hpc_toolkit.system.quantities import parse_counts
from hpc_toolkit.system.ranks import in_step, other_hosts, other_job, task_counts
from hpc_toolkit.system.tomltable import kept, number_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Position of this task in its step."""

    name: str
    """JOB.RESTART.STEP, which differs from every other step and every other start of this job;
    under Flux, where each ``flux run`` is a job, the job."""
    task: int
    """The number of this task in the step, from 0 (SLURM_PROCID, FLUX_TASK_RANK)."""
    node: int
    """The number of this node in the step, from 0 (SLURM_NODEID)."""
    local: int
    """The number of this task on its node, from 0 (SLURM_LOCALID)."""
    tasks: tuple[int, ...]
    """Number of tasks on each node of the step, in the order of the nodes."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Step | None:
        """Read the variables of srun or Flux; return None outside a step, as in a batch script.

        Raises ConfigError if a variable is missing or contradicts another, or if Flux has started
        several tasks on a node.
        """
        if not in_step(environ):
            return _of_flux(environ)
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


def _of_flux(environ: Mapping[str, str]) -> Step | None:
    """Return the step of a task of Flux (flux-environment(7)); None for any other process."""
    job = other_job(environ)
    if job is None or job.scheduler.name != "flux" or "FLUX_TASK_RANK" not in environ:
        return None
    tasks, nodes, task = (
        _number(environ, f"FLUX_{name}") for name in ("JOB_SIZE", "JOB_NNODES", "TASK_RANK")
    )
    if tasks != nodes or task >= nodes:
        message = f"flux run has started {tasks} tasks on {nodes} nodes"
        hint = f"start one task per node: flux run --nodes={nodes} --tasks-per-node=1"
        raise ConfigError(message, hint=f"{hint}; it starts the ranks of its node")
    return Step(name=job.id, task=task, node=task, local=0, tasks=(1,) * nodes)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        message = f"{name}={text!r} in a step is not a number"
        raise ConfigError(message, hint="start hpctk launch with srun or flux run, once per task")
    return int(text)


START_TIMEOUT_S = 600.0
_LONGEST_S = 366 * 86400.0
_SHUTDOWN_TIMEOUT_S = 30.0
_STREAMS = "[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*"
_ENDPOINT = r"(?P<host>\[[^\]]+\]|[^:\s]+)(:(?P<port>[0-9]{1,5}))?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A launch as the user requested it."""

    script: str
    """A file; a module with ``module``, a program with ``no_python``."""
    arguments: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of :data:`_VALUES` that were given, by name; a duration in seconds."""
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
    tee: int | str = 3
    """Streams that go to files and to the terminal: 1 stdout, 2 stderr, 3 both; or such as
    ``0:3,1:2`` by local rank."""
    redirects: int | str = 0
    """Streams that go to files only."""
    role: str = "default"
    shown: tuple[int, ...] = ()
    """Local ranks whose output appears on the terminal; empty for all."""

    @property
    def rendezvous(self) -> Path:
        """The symlink that names the address of node 0, if nodes meet in the run directory."""
        assert self.run_dir is not None
        return self.run_dir / "rendezvous" / self.launch


def _is_text(value: object) -> bool:
    return isinstance(value, str | int | Path) and not isinstance(value, bool)


_text = kept(_is_text, "a text or a number")
_streams = kept(
    lambda value: _is_text(value) and re.fullmatch(_STREAMS, str(value)) is not None,
    "0 for none, 1 for stdout, 2 for stderr or 3 for both; or such as 0:3,1:2 by local rank",
)
INSTEAD = {
    "rdzv_conf": "write --start-timeout DURATION for its timeouts; other keys have no meaning here",
    "start_method": "leave it out: every rank is a new process",
    "monitor_interval": "leave it out: the end of a rank is noticed at once",
    "run_path": "leave it out: every rank is a new Python",
    "virtual_local_rank": "leave it out: choose the device by LOCAL_RANK, or use torchrun",
}
"""Options of torchrun that are refused, and what to do instead."""


def _nodes(value: Any, where: str) -> int:
    least, _, most = value.partition(":") if isinstance(value, str) else ("", "", "")
    if most not in ("", least):
        message = f"{where} {value}: the number of nodes cannot change here"
        raise ConfigError(message, hint=f"write {where} {most}, or use torchrun")
    return int(tomltable.count(int(least) if least.isdecimal() else value, where))


_VALUES: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("nproc_per_node", "master_addr", "local_addr", "rdzv_id"), _text),
    **dict.fromkeys(("log_dir", "local_ranks_filter", "role"), _text),
    "nnodes": _nodes,
    "rdzv_endpoint": kept(
        lambda value: isinstance(value, str) and re.fullmatch(_ENDPOINT, value) is not None,
        "HOST or HOST:PORT",
    ),
    "rdzv_backend": kept(
        lambda value: value in ("c10d", "static"), "c10d or static: no other server is needed"
    ),
    **dict.fromkeys(("module", "no_python", "standalone"), tomltable.flag),
    **dict.fromkeys(("redirects", "tee"), _streams),
    **dict.fromkeys(("node_rank", "max_restarts"), tomltable.count_or_zero),
    "master_port": number_from(1, 65535, "a port from 1 to 65535", whole=True),
    "numa_binding": kept(lambda value: value == "node", "node (srun's --cpu-bind has others)"),
    "shutdown_timeout": number_from(0, _LONGEST_S, "a number of seconds"),
    "start_timeout": number_from(1e-3, _LONGEST_S, "a number of seconds up to 366 days"),
    "backend": tomltable.Choice(("nccl", "gloo")),
}
"""A check of the value of each option; a call from Python can give values of any type."""


def check_request(request: Request) -> Request:
    """Reject a request that cannot start, before anything is started.

    Returns it with the number of nodes and the address of node 0 as the plan needs them. Raises
    ConfigError if the script is missing, or an option or a value is invalid.
    """
    given = {"start_timeout": request.start_timeout_s, **request.options}
    if request.backend is not None:
        given["backend"] = request.backend
    for name, value in given.items():
        if name in INSTEAD:
            message = f"{spelled(name)}: hpctk launch has no such option of torchrun"
            raise ConfigError(message, hint=INSTEAD[name])
        if name not in _VALUES:
            message = f"launch: unknown option {name!r}"
            raise ConfigError(message, hint=near_miss(name, list(_VALUES)))
        _VALUES[name](value, spelled(name))
    _check_script(request)
    return replace(request, options=_translated(request.options))


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(given)
    if "nnodes" in found:
        found["nnodes"] = _nodes(found["nnodes"], "--nnodes")
    match = re.fullmatch(_ENDPOINT, found.get("rdzv_endpoint", ""))
    # Port 0 is any free one, which is for a single node.
    if match is not None and match["port"] != "0":
        if found.keys() & {"master_addr", "master_port"}:
            message = f"--rdzv-endpoint and {spelled('master_addr')} exclude each other"
            raise ConfigError(message, hint="leave one of them out")
        port = _VALUES["master_port"](int(match["port"] or 29500), "--rdzv-endpoint")
        found |= {"master_addr": match["host"].strip("[]"), "master_port": port}
    return found


def _check_script(request: Request) -> None:
    script = request.script
    if request.options.get("module"):
        top = script.partition(".")[0]
        # As 'python -m' does, look in the current directory first.
        here = any(Path(top + end).exists() for end in ("", ".py"))
        if not top or not (here or importlib.util.find_spec(top)):
            message = f"no module named {script!r}"
            raise ConfigError(message, hint="install it for the Python that runs hpctk")
    elif request.options.get("no_python"):
        if shutil.which(script) is None:
            message = f"program {script!r} not found"
            raise ConfigError(message, hint="give its path, or leave out --no-python")
    elif not Path(script).is_file():
        message = f"script {script!r} not found"
        hint = "options of launch go before the script; use -m for a module"
        raise ConfigError(message, hint=hint)
    elif script.startswith("-"):
        raise ConfigError(f"Python would read {script!r} as an option", hint=f"write ./{script}")


def make_plan(request: Request, *, step: Step | None, ranks: int, backend: str) -> Plan:
    """Plan the launch for the agent of one node, which starts ``ranks`` ranks.

    ``request`` has passed :func:`check_request`. Raises ConfigError if options contradict each
    other or Slurm.
    """
    given = request.options
    nodes, node_rank = _place(given, step)
    run_logs = None if request.run_dir is None else request.run_dir / "logs"
    log_dir = Path(given["log_dir"]) if "log_dir" in given else run_logs
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
        meeting=_meeting(request, nodes=nodes, step=step),
        start_timeout_s=request.start_timeout_s,
        host=given.get("master_addr", "127.0.0.1") if named else "",
        port=given.get("master_port", 29500) if named else 0,
        local_addr=given.get("local_addr", ""),
        max_restarts=given.get("max_restarts", 0),
        shutdown_timeout_s=given.get("shutdown_timeout", _SHUTDOWN_TIMEOUT_S),
        near_gpus="numa_binding" in given,
        run_dir=request.run_dir,
        log_dir=log_dir / launch if log_dir is not None else None,
        redirects=given.get("redirects", 0),
        tee=given.get("tee", 0 if "redirects" in given else 3),
        role=str(given.get("role", "default")),
        shown=parse_counts(shown, "--local-ranks-filter", least=0, most=999_999) if shown else (),
    )


def task_plan(request: Request, step: Step, *, backend: str) -> Plan:
    """Plan the launch for one of several tasks of a node, which becomes a rank.

    Raises ConfigError if an option has no effect here, or the run directory is missing.
    """
    if given := sorted(request.options.keys() - {"module", "no_python"}):
        words = ", ".join(map(spelled, given))
        message = f"{words}: not available when srun starts each rank"
        hint = "start one task per node (srun --ntasks-per-node=1), or leave it out"
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


def left_out(request: Request, plan: Plan, environ: Mapping[str, str] = os.environ) -> str:
    """Return a warning if the ranks start on only one node of a job that has several."""
    if plan.nodes > 1 or request.options.keys() & {"nnodes", "standalone"}:
        return ""
    text = environ.get("SLURM_JOB_NUM_NODES", "")
    nodes, starter = (int(text), "srun") if text.isdigit() else other_hosts(environ)
    if nodes < 2:
        return ""
    way = f"with {starter}, one task per node"
    if starter == "mpiexec":  # which tells no process how many nodes there are
        way = "on each, with --nnodes and --node-rank"
    alone = f"this job has {nodes} nodes, and these ranks start on this one alone"
    return f"{alone} (start hpctk launch {way}; or say --nnodes 1)"


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
        for name, steps in found.items():
            if given.get(name, steps) != steps:
                message = f"{spelled(name)} is {given[name]}, and the job's step has {steps}"
                raise ConfigError(message, hint="leave it out: it is known inside a step")
        return len(step.tasks), step.node
    nodes, node_rank = given.get("nnodes", 1), given.get("node_rank", 0)
    if node_rank >= nodes:
        message = f"--node-rank {node_rank} is not one of the {nodes} nodes"
        raise ConfigError(message, hint="they are numbered from 0")
    return nodes, node_rank


def _meeting(
    request: Request, *, nodes: int, step: Step | None
) -> Literal["alone", "directory", "address"]:
    given = request.options
    if given.get("standalone") and nodes > 1:
        raise ConfigError(f"--standalone works on one node, not {nodes}", hint="leave it out")
    if nodes == 1:
        return "alone"
    if given.keys() & {"master_addr", "master_port"}:
        if "rdzv_endpoint" in given and step is None and "node_rank" not in given:
            message = f"--rdzv-endpoint: {nodes} nodes need numbers"
            raise ConfigError(message, hint="add --node-rank N on each node, from 0; or use srun")
        return "address"
    if request.run_dir is None:
        raise _no_run_dir(nodes, "nodes")
    if step is None and "rdzv_id" not in given:
        message = f"{nodes} nodes that meet in {request.run_dir} need an --rdzv-id"
        hint = "add --rdzv-id NAME, the same on all nodes and new for each launch"
        raise ConfigError(message, hint=hint)
    return "directory"


def _no_run_dir(count: int, what: str) -> HpcToolkitError:
    message = f"{count} {what} need a shared directory to find each other"
    return ConfigError(message, hint="add --run-dir DIR; or --nnodes, --node-rank and an address")
