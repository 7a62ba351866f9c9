"""What each template starts and which options it takes: programs, trainings and plain scripts."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from typing import Any

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.clusters.choice import named_site
from hpc_toolkit.slurm.clusters.facts import Cluster
from hpc_toolkit.slurm.clusters.fitting import with_gpus
from hpc_toolkit.slurm.containers import PROGRAMS, Container, gpu_of_type, program_words
from hpc_toolkit.slurm.render import spec as s
from hpc_toolkit.slurm.render.directives import Directive, site_of
from hpc_toolkit.slurm.render.spec import ScriptSpec
from hpc_toolkit.slurm.render.values import file_name
from hpc_toolkit.system.options import launcher_option

_STARTERS = re.compile(r"(.*/)?(python[0-9.]*|torchrun|accelerate|srun|mpirun)")
_EXAMPLE = {
    "command": "hpctk render command --nodes 2 -- python train.py",
    "train-cpu": "hpctk render train-cpu -- trees.py --depth 6",
    "train-single-gpu": "hpctk render train-single-gpu -- train.py --lr 1",
    "train-multi-gpu": "hpctk render train-multi-gpu --gpus-per-node 4 -- train.py --lr 1",
    "train-multi-node": "hpctk render train-multi-node --nodes 2 --gpus-per-node 4 -- train.py",
}
BY_NODE, BY_RANK = "task-per-node", "task-per-gpu"
"""How ranks are started: by one launcher on each node, or each rank by srun."""

CPUS = 64
"""CPUs of ``train-cpu`` if the number of CPUs per node is unknown."""

RANK_RESTARTS = 3

PLAIN = ("command", *s.TRAININGS)
"""The templates of which there are plain scripts."""


def check_template(spec: ScriptSpec, template: str) -> None:
    """Raise RenderError for options that the template ignores, and for missing required ones."""
    if spec.plain and template not in PLAIN:
        msg = f"--plain: the template {template} needs hpctk on the nodes"
        raise RenderError(msg, hint=f"leave it out, or render one of {', '.join(PLAIN)}")
    if not spec.plain and spec.python is None:
        msg = "--python: the interpreter on the nodes is unknown"
        raise RenderError(msg, hint="give the absolute path of a Python with hpc_toolkit")
    _check_program(spec, template)
    for name in s.asked(spec):
        row = s.OPTIONS[name]
        if spec.plain and not row.plain:
            msg = f"{s.option(name)}: not supported by plain scripts"
            raise RenderError(msg, hint="leave it out, or leave out --plain")
        if template not in row.templates:
            msg = f"{s.option(name)}: not used by the template {template}"
            raise RenderError(
                msg, hint=f"leave it out, or render one of {', '.join(row.templates)}"
            )
    if template in s.TRAININGS:
        _check_training(spec, template)
    # The container of a command holds the program alone; any other one holds hpctk as well.
    inside = spec.container_python or spec.plain or template == "command"
    if spec.container and not inside:
        msg = "--container: the interpreter in the container is unknown"
        raise RenderError(msg, hint="give its path: --container-python /usr/bin/python3")
    if template == "array" and spec.array is None:
        msg = "the template array needs --array"
        raise RenderError(msg, hint="such as --array 0-99, or 0-99%10 for ten at a time")


def _check_program(spec: ScriptSpec, template: str) -> None:
    if template not in s.PROGRAMS:
        if spec.command:
            msg = f"the template {template} cannot run {spec.command[0]!r}"
            raise RenderError(msg, hint="use the template command for other programs")
        return
    if not spec.command:
        what = "a program" if template not in s.TRAININGS else "a training script"
        msg = f"the template {template} needs {what}"
        raise RenderError(msg, hint=f"write it after --: {_EXAMPLE[template]}")
    if spec.command[0] == "-m" and template not in s.TRAININGS:
        msg = f"the template {template} cannot start the module {spec.command[1]}"
        raise RenderError(msg, hint=f"add the interpreter: python -m {spec.command[1]}")


def _check_training(spec: ScriptSpec, template: str) -> None:
    if template != "train-multi-node" and spec.nodes > 1:
        msg = f"--nodes: the template {template} runs on one node"
        raise RenderError(msg, hint="use the template train-multi-node")
    if template == "train-single-gpu" and spec.gpus_per_node > 1:
        msg = f"--gpus-per-node: train-single-gpu uses one GPU, not {spec.gpus_per_node}"
        raise RenderError(msg, hint="use the template train-multi-gpu")
    if template == "train-multi-gpu" and not spec.gpus_per_node:
        msg = "the template train-multi-gpu needs --gpus-per-node"
        raise RenderError(msg, hint=f"such as: {_EXAMPLE[template]}")
    if spec.launch == "task-per-gpu" and spec.rank_restarts is not None:
        msg = "--rank-restarts: with --launch task-per-gpu no launcher restarts ranks"
        raise RenderError(msg, hint="leave it out, or leave out --launch")
    word = launcher_option(spec.command[1:])
    if word is not None and template != "train-cpu":  # which has no launcher
        msg = f"{word} comes after the script, which would get it"
        raise RenderError(msg, hint="write it before --, as in: --nproc-per-node 4 -- train.py")
    starter = spec.command[0]
    if _STARTERS.fullmatch(starter):
        msg = f"the template {template} starts the script itself, without {starter!r}"
        raise RenderError(msg, hint=f"write only the script after --: {_EXAMPLE[template]}")


def container_of(full: ScriptSpec, cluster: Cluster) -> Container:
    """The container of a request. Raises RenderError if the cluster's program is unknown, or for
    a directory that the program cannot show."""
    written = cluster.written("container_runtime")
    if cluster.container_runtime is None:
        msg = f"--container: the container runtime of {cluster.name} is unknown ({written})"
        raise RenderError(msg, hint=f"set it to one of {', '.join(PROGRAMS)}")
    container = Container(
        words=program_words(cluster.container_runtime, written),
        image=full.container or "",
        binds=(*cluster.binds, *full.bind),
        gpu=gpu_of_type(full.gpu_type) if full.gpus_per_node else "",
    )
    for bind in container.binds:
        if letters := container.refused(bind.replace(":", "").replace("\\", "")):
            msg = f"--bind: {container.words[0]} cannot show {bind!r}: {letters!r} separate paths"
            raise RenderError(msg, hint="use a directory without these characters in its path")
    return container


def plain_words(
    full: ScriptSpec, directives: list[Directive], template: str, cluster: Cluster
) -> list[str]:
    """The step's command, each word quoted for bash; the script's own arguments follow."""
    words = ["srun", "--kill-on-bad-exit=1"]
    if "cpus-per-task" in {name for name, _ in directives}:
        # From 22.05 to 23.02 srun ignores SLURM_CPUS_PER_TASK.
        words.append('--cpus-per-task="$SLURM_CPUS_PER_TASK"')
    words += map(shlex.quote, _srun_options(full, cluster))
    if full.container is not None:
        words.append('"${container[@]}"')
    words += _starter(full, template)
    return [*words, *map(shlex.quote, full.command)]


def _starter(full: ScriptSpec, template: str) -> list[str]:
    """What starts the program: nothing, Python, or torchrun."""
    if template == "command":
        return []
    given = full.python if full.container is None else full.container_python
    python = shlex.quote(given) if given else "python"
    if template in ("train-cpu", "train-single-gpu"):
        return [python]
    torchrun = [python, "-m", "torch.distributed.run"] if given else ["torchrun"]
    torchrun.append(f"--nproc-per-node={full.nproc_per_node}")
    if template == "train-multi-gpu":
        return [*torchrun, "--standalone"]
    return [
        *torchrun,
        *('--nnodes="$SLURM_JOB_NUM_NODES"', '--rdzv-id="$SLURM_JOB_ID"', "--rdzv-backend=c10d"),
        '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"',
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    program: tuple[str, ...]
    """What srun starts, of a training the interpreter first."""
    processes: int = 1
    """Ranks that share the CPUs of one task."""
    options: tuple[str, ...]
    """Options of the batch process."""


def prepared(spec: ScriptSpec, template: str, cluster: Cluster) -> ScriptSpec:
    """Return a training's request with its ranks, and the tasks and CPUs per node to start them.

    A task is a process that srun starts: a rank in the form task-per-gpu, else one launcher or
    program per node with the CPUs of all its ranks. ``cluster`` states CPUs per rank and per node.
    The request must have passed ``check_template``; requests for other templates are returned
    unchanged. Raises RenderError for ranks that their backend cannot join.
    """
    if template not in s.TRAININGS:
        return spec
    gpus = spec.gpus_per_node or (1 if template == "train-single-gpu" else 0)
    by_rank = spec.launch == BY_RANK
    # A rank gets its own cores; the ranks of a launcher share them.
    bound = "cores" if by_rank or template == "train-cpu" else "none"
    standard: dict[str, Any] = {
        "launch": BY_NODE,
        "nproc_per_node": gpus or 1,
        "rank_restarts": 0 if by_rank else RANK_RESTARTS,
        "backend": cluster.gpu_backend if gpus else "gloo",
        "run_dir": training_directory(spec.run_dir, spec.job_name),
        "cpu_bind": None if spec.hint else bound,
    }
    chosen = {name: value for name, value in standard.items() if getattr(spec, name) is None}
    full = replace(spec, gpus_per_node=gpus, **chosen)
    _check_ranks(full)
    tasks = full.nproc_per_node or 1 if by_rank else 1
    cpus = _cpus(full, template, cluster, tasks)
    return replace(full, ntasks_per_node=tasks, cpus_per_gpu=None, cpus_per_task=cpus)


def training_directory(run_dir: str | None, job_name: str) -> str:
    """Return the directory of a training's rendezvous, logs and jobs, relative to its job's."""
    return run_dir or f"runs/{file_name(job_name)}"


def started(full: ScriptSpec, template: str, cluster: Cluster) -> Started:
    """Return what the script of a complete request starts, and how."""
    bound = [f"--srun={word}" for word in _srun_options(full, cluster)]
    if template not in s.TRAININGS:
        return Started(program=full.command, options=tuple(bound))
    tasks = full.ntasks_per_node or 1
    alone = template == "train-cpu"
    launcher = () if alone else ("-P", "-m", "hpc_toolkit", "launch", *_launch_options(full))
    options = [f"--run-dir={full.run_dir}", *(["--alone"] if alone else []), *bound]
    options += [f"--stage={path}" for path in full.stage]
    if full.stage and tasks > 1:
        options.append(f"--tasks={tasks}")
    python = full.container_python if full.container else full.python
    return Started(
        program=(python or "", *launcher, *full.command),
        processes=(full.nproc_per_node or 1) // tasks,
        options=tuple(options),
    )


def _srun_options(full: ScriptSpec, cluster: Cluster) -> list[str]:
    names = ("cpu_bind", "mem_bind", "distribution", "hint")
    given = {name: getattr(full, name) for name in names}
    if full.launch and full.gpus_per_node and site_of(full, cluster).gpu_request == "gpus-per-task":
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


def _check_ranks(full: ScriptSpec) -> None:
    backend, ranks, gpus = full.backend, full.nproc_per_node or 1, full.gpus_per_node
    if full.numa_binding and full.launch == BY_RANK:
        msg = "--numa-binding: with --launch task-per-gpu, srun binds the ranks"
        raise RenderError(msg, hint="use --cpu-bind, or leave it out")
    if full.numa_binding and ranks > gpus:
        msg = f"--numa-binding: a node's GPUs ({gpus}) are fewer than its ranks ({ranks})"
        raise RenderError(msg, hint="one rank per GPU, or leave it out")
    if backend == "gloo":
        return
    if not gpus:
        msg = f"--backend: {backend} needs GPUs, but the job requests none"
        raise RenderError(msg, hint="add --gpus-per-node N, or leave it out for gloo")
    if ranks > gpus:
        msg = f"--nproc-per-node: {backend} cannot join {ranks} ranks on {gpus} GPUs of a node"
        raise RenderError(msg, hint="one rank per GPU, or --backend gloo")


def _cpus(full: ScriptSpec, template: str, cluster: Cluster, tasks: int) -> int | None:
    """Return the CPUs of a task; None if the task shall get its share of the node's CPUs."""
    if full.cpus_per_task:
        return full.cpus_per_task
    if full.cpus_per_gpu:
        return max(1, full.cpus_per_gpu * full.gpus_per_node // tasks)
    site = with_gpus(named_site(cluster, full.partition), full.gpus_per_node)
    if template == "train-cpu":
        return site.cpus_per_node or CPUS
    of_a_task = (full.nproc_per_node or 1) // tasks
    of_a_rank = dict(site.defaults).get("cpus_per_task")
    if of_a_rank:
        return int(of_a_rank) * of_a_task
    shared = full.gpus_per_node and site.cpus_per_node and site.gpus_per_node
    return None if shared else of_a_task
