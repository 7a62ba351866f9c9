"""Training jobs: their ranks and CPUs, the programs that start them, and staged files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.clusters.partitions import named_site
from hpc_toolkit.slurm.render.kinds import RAY, TRAININGS

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.render.spec import ScriptSpec

BY_NODE, BY_RANK = "task-per-node", "task-per-gpu"
"""How ranks are started: by one launcher on each node, or each rank by srun."""

CPUS = 64
"""CPUs of ``train-cpu`` if the number of CPUs per node is unknown."""

RANK_RESTARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    program: tuple[str, ...]
    """What srun starts, the interpreter first."""
    processes: int
    """Ranks that share the CPUs of one task."""
    options: tuple[str, ...]


def prepared(spec: ScriptSpec, template: str, cluster: Cluster) -> ScriptSpec:
    """Return a training's request with its ranks, and the tasks and CPUs per node to start them.

    A task is a process that srun starts: a rank in the form task-per-gpu, else one launcher or
    program per node with the CPUs of all its ranks. ``cluster`` states CPUs per rank and per node.
    The request must have passed ``check_template``. A request for the template ray gets one task
    per node; requests for other templates are returned unchanged. Raises RenderError for ranks that
    their backend cannot join.
    """
    if template == RAY:
        return replace(spec, ntasks_per_node=1)
    if template not in TRAININGS:
        return spec
    gpus = spec.gpus_per_node or (1 if template == "train-single-gpu" else 0)
    by_rank = spec.launch == BY_RANK
    standard: dict[str, Any] = {
        "launch": BY_NODE,
        "nproc_per_node": gpus or 1,
        "rank_restarts": 0 if by_rank else RANK_RESTARTS,
        "backend": cluster.gpu_backend if gpus else "gloo",
        "run_dir": training_directory(spec.run_dir, spec.job_name),
        "cpu_bind": None if spec.hint else _bound(template, by_rank=by_rank),
    }
    chosen = {name: value for name, value in standard.items() if getattr(spec, name) is None}
    full = replace(spec, gpus_per_node=gpus, **chosen)
    _check_backend(full)
    if full.numa_binding:
        _check_binding(full)
    tasks = full.nproc_per_node or 1 if by_rank else 1
    cpus = _cpus(full, template, cluster, tasks)
    return replace(full, ntasks_per_node=tasks, cpus_per_gpu=None, cpus_per_task=cpus)


def training_directory(run_dir: str | None, job_name: str) -> str:
    """Return the directory of a training's rendezvous, logs and jobs, relative to its job's."""
    return run_dir or f"runs/{job_name}"


def training(full: ScriptSpec, template: str, cluster: Cluster) -> Training | None:
    """Return the training parts of a complete request's script; None for other templates."""
    if template not in TRAININGS or full.ntasks_per_node is None:
        return None
    alone = template == "train-cpu"
    launcher = () if alone else ("-P", "-m", "hpc_toolkit", "launch", *_launch_options(full))
    options = [f"--run-dir={full.run_dir}", *(["--alone"] if alone else [])]
    options += [f"--srun={word}" for word in _srun_options(full, cluster)]
    options += [f"--stage={path}" for path in full.stage]
    if full.stage_dir:
        options.append(f"--stage-dir={full.stage_dir}")
    if full.stage and full.ntasks_per_node > 1:
        options.append(f"--tasks={full.ntasks_per_node}")
    python = full.container_python if full.container else full.python
    return Training(
        program=(python or "", *launcher, *full.command),
        processes=(full.nproc_per_node or 1) // full.ntasks_per_node,
        options=tuple(options),
    )


def _srun_options(full: ScriptSpec, cluster: Cluster) -> list[str]:
    names = ("cpu_bind", "mem_bind", "distribution", "hint")
    given = {name: getattr(full, name) for name in names}
    if cluster.gpu_request == "gpus-per-task" and full.gpus_per_node:
        # Otherwise each rank would see only its own GPU, with no direct path to its node's others.
        given["gpu_bind"] = "none"
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value]


def _launch_options(full: ScriptSpec) -> list[str]:
    options: dict[str, Any] = {"--run-dir": full.run_dir, "--backend": full.backend}
    if full.ntasks_per_node == 1:
        options["--nproc-per-node"] = full.nproc_per_node
        options["--max-restarts"] = full.rank_restarts
        if full.numa_binding:
            options["--numa-binding"] = full.numa_binding
    return [f"{name}={value}" for name, value in options.items()]


def _check_backend(full: ScriptSpec) -> None:
    backend, ranks, gpus = full.backend, full.nproc_per_node or 1, full.gpus_per_node
    if backend == "gloo":
        return
    if not gpus:
        msg = f"--backend: {backend} needs GPUs, but the job requests none"
        raise RenderError(msg, hint="add --gpus-per-node N, or leave it out for gloo")
    if ranks > gpus:
        msg = f"--nproc-per-node: {backend} cannot join {ranks} ranks on {gpus} GPUs of a node"
        raise RenderError(msg, hint="one rank per GPU, or --backend gloo")


def _check_binding(full: ScriptSpec) -> None:
    ranks, gpus = full.nproc_per_node or 1, full.gpus_per_node
    if full.launch == BY_RANK:
        msg = "--numa-binding: with --launch task-per-gpu, srun binds the ranks"
        raise RenderError(msg, hint="use --cpu-bind, or leave it out")
    if ranks > gpus:
        msg = f"--numa-binding: a node's GPUs ({gpus}) are fewer than its ranks ({ranks})"
        raise RenderError(msg, hint="one rank per GPU, or leave it out")


def _bound(template: str, *, by_rank: bool) -> str:
    """Return the default CPU binding: a rank gets its own cores, a launcher's ranks share them."""
    return "cores" if by_rank or template == "train-cpu" else "none"


def _cpus(full: ScriptSpec, template: str, cluster: Cluster, tasks: int) -> int | None:
    """Return the CPUs of a task; None if the task shall get its share of the node's CPUs."""
    if full.cpus_per_task:
        return full.cpus_per_task
    if full.cpus_per_gpu:
        return max(1, full.cpus_per_gpu * full.gpus_per_node // tasks)
    if template == "train-cpu":
        return named_site(cluster, full.partition).cpus_per_node or CPUS
    of_a_task = (full.nproc_per_node or 1) // tasks
    of_a_rank = dict(cluster.defaults).get("cpus_per_task")
    if of_a_rank:
        return int(of_a_rank) * of_a_task
    shared = full.gpus_per_node and cluster.cpus_per_node and cluster.gpus_per_node
    return None if shared else of_a_task
