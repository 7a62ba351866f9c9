"""Compute what a job script does around its program, as lines and words for the templates.

All decisions are made here; a template only tests which values are set.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.allowlist import setup_words
from hpc_toolkit.slurm.environment import check_directory
from hpc_toolkit.slurm.render.shares import cpus_of_rank, ranks

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.render.directives import Directive
    from hpc_toolkit.slurm.render.spec import ScriptSpec

Step = tuple[list[str], str]
"""The words of a command, and the log message if the command fails."""

_SRUN_READS = {
    "mem": "SLURM_MEM_PER_NODE",
    "mem-per-cpu": "SLURM_MEM_PER_CPU",
    "mem-per-gpu": "SLURM_MEM_PER_GPU",
    "gpus": "SLURM_GPUS",
    "gpus-per-node": "SLURM_GPUS_PER_NODE",
    "gpus-per-task": "SLURM_GPUS_PER_TASK",
    "gpu-bind": "SLURM_GPU_BIND",
    "gres": "SLURM_GRES",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
    "cpus-per-gpu": "SLURM_CPUS_PER_GPU",
    "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "ntasks-per-gpu": "SLURM_NTASKS_PER_GPU",
    "ntasks-per-socket": "SLURM_NTASKS_PER_SOCKET",
    "distribution": "SLURM_DISTRIBUTION",
    "hint": "SLURM_HINT",
    "threads-per-core": "SLURM_THREADS_PER_CORE",
}
"""Variables that srun reads (srun(1), INPUT ENVIRONMENT VARIABLES), by the option of sbatch that
sets them for a job's own steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The parts of a script before and after its step, in order of execution."""

    shebang: str
    """The first line."""
    leftovers: tuple[str, ...]
    """Variables that, if they are set, belong to another job; never empty."""
    env: tuple[tuple[str, str], ...]
    """Variables to export: the site's, its network's, the user's."""
    preparation: tuple[Step, ...]
    """Modules, then conda."""
    venv: str
    """The virtual environment, "" for none."""
    setup: tuple[Step, ...]
    """The site's and the user's commands."""
    node_setup: str
    """The bash command that runs once on each node, "" for none."""
    teardown: tuple[Step, ...]
    """The user's commands after the step."""
    runtime: Literal["", "apptainer", "pyxis"]
    """The container runtime, "" for none."""
    container: tuple[str, ...]
    """First words of the apptainer command; the job's directories and the image follow."""
    mounts: str
    """Further directories for pyxis, each after a comma."""
    image: str
    """The container's image."""
    gpus: int
    """GPUs that a task alone on its node must see."""
    gpu_bound: bool
    """Whether a task sees only some of its node's GPUs, unless srun gets another --gpu-bind."""
    work: tuple[str, ...]
    """Options of ``hpctk work``."""
    threads: int
    """CPUs that a rank can count on."""
    cpus_per_task: bool
    """Whether the script requests CPUs per task, not CPUs per GPU."""
    shrink: bool
    """Whether nodes without work are given back. Not with a container, where scontrol is out of
    reach, nor in an array, where the id of the last element means all elements."""


def surroundings(full: ScriptSpec, cluster: Cluster, directives: list[Directive]) -> Surroundings:
    """Compute what surrounds the program of a complete request on ``cluster``.

    Args:
        full: the request, with every value that the script needs.
        cluster: the site's facts.
        directives: the script's options for sbatch.

    Raises:
        RenderError: the request needs a fact that the site's file does not state.
    """
    given = {name for name, _ in directives}
    unset = [name for option, name in _SRUN_READS.items() if option not in given]
    runtime = _runtime(full, cluster)
    binds = (*cluster.binds, *full.bind) if runtime else ()
    return Surroundings(
        shebang="#!/bin/bash -l" if cluster.login_shell else "#!/bin/bash",
        leftovers=tuple(unset),
        env=(*cluster.env, *_network(full, cluster), *full.env),
        preparation=(*_modules(full, cluster), *_conda(full, cluster)),
        venv=(full.venv or "").rstrip("/"),
        setup=_steps((*cluster.setup, *full.setup), "--setup"),
        node_setup=_node_setup((*cluster.node_setup, *full.node_setup)),
        teardown=_steps(full.teardown, "--teardown"),
        runtime=runtime,
        container=_apptainer(binds, gpus=full.gpus_per_node),
        mounts="".join(f",{_mount(directory)}" for directory in binds),
        image=full.container or "",
        gpus=_gpus_of_a_task(full, given),
        gpu_bound="gpu-bind" in given,
        work=_work_options(full),
        threads=cpus_of_rank(full),
        cpus_per_task="cpus-per-task" in given,
        shrink=cluster.shrink_jobs and full.nodes > 1 and not (full.array or runtime),
    )


def _network(full: ScriptSpec, cluster: Cluster) -> tuple[tuple[str, str], ...]:
    """Return the site's network variables: all with GPUs, else those of Gloo for a training."""
    if full.gpus_per_node:
        return cluster.nccl
    trains = full.launch is not None
    return tuple(pair for pair in cluster.nccl if trains and pair[0].startswith("GLOO_"))


def _steps(lines: tuple[str, ...], option: str) -> tuple[Step, ...]:
    what = option.removeprefix("--")
    words = [setup_words(line, option) for line in lines]
    return tuple((step, f"{what} failed: {' '.join(step)}") for step in words)


def _modules(full: ScriptSpec, cluster: Cluster) -> tuple[Step, ...]:
    names = (*cluster.modules, *full.modules)
    return tuple((["module", "load", name], f"cannot load module {name}") for name in names)


def _conda(full: ScriptSpec, cluster: Cluster) -> tuple[Step, ...]:
    if full.conda is None:
        return ()
    path = PurePosixPath(full.conda)
    base = cluster.conda_base
    if base is None and path.is_absolute() and path.parent.name == "envs":
        base = str(path.parents[1])
    if base is None:
        msg = f"--conda: nothing says where conda is installed ({cluster.written('conda_base')})"
        raise RenderError(msg, hint="write it there, or give the path .../envs/NAME")
    check_directory(base, cluster.written("conda_base"))
    functions = f"{base.rstrip('/')}/etc/profile.d/conda.sh"
    # Not 'conda init', which would edit the user's ~/.bashrc.
    return (
        (["source", functions], f"no conda in {base}"),
        (["conda", "activate", full.conda], f"cannot activate {full.conda}"),
    )


def _node_setup(lines: tuple[str, ...]) -> str:
    if not lines:
        return ""
    commands = " && ".join(shlex.join(setup_words(line, "--node-setup")) for line in lines)
    return f'{commands} || {{ echo "failed on $SLURMD_NODENAME" >&2; exit 1; }}'


def _runtime(full: ScriptSpec, cluster: Cluster) -> Literal["", "apptainer", "pyxis"]:
    if full.container is None:
        return ""
    if cluster.container_runtime is None:
        written = cluster.written("container_runtime")
        msg = f"--container: nothing says what runs containers on {cluster.name} ({written})"
        raise RenderError(msg, hint='write "apptainer" or "pyxis" there')
    return cluster.container_runtime


def _apptainer(binds: tuple[str, ...], *, gpus: int) -> tuple[str, ...]:
    shown = [word for directory in binds for word in ("--bind", directory)]
    return ("apptainer", "exec", *(["--nv"] if gpus else []), *shown)


def _mount(directory: str) -> str:
    """Return ``FROM:TO[:ro]``, because pyxis takes a single path for a volume."""
    return directory if ":" in directory else f"{directory}:{directory}"


def _gpus_of_a_task(full: ScriptSpec, given: set[str]) -> int:
    if "gpus-per-task" in given:
        return full.gpus_per_node // ranks(full)
    return full.gpus_per_node


def _work_options(full: ScriptSpec) -> tuple[str, ...]:
    given = {"--idle-exit": full.idle_exit, "--lease": full.lease}
    return tuple(f"{name}={value}" for name, value in given.items() if value is not None)
