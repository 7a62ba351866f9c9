"""Compute what a job script does around its program, as lines and words for the templates.

All decisions are made here; a template only tests which values are set.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.allowlist import setup_words
from hpc_toolkit.slurm.containers import (
    PROGRAMS,
    Container,
    gpu_of_type,
    plain_lines,
    program_words,
)
from hpc_toolkit.slurm.render.directives import cpus_of_rank, ranks
from hpc_toolkit.slurm.render.spec import MAX_RESTARTS, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.render.directives import Directive
    from hpc_toolkit.slurm.render.kinds import Training
    from hpc_toolkit.slurm.render.spec import ScriptSpec

Step = tuple[list[str], str]
"""The words of a command, and the log message if the command fails."""

_KIND = {
    "work-queue": "work",
    "array": "work",
    "campaign": "work",
    "command": "command",
    "ray": "ray",
}
"""The subcommand of hpctk batch; "train" for a training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """All that a script does before hpctk takes over, in the order in which it happens."""

    shebang: str
    env: tuple[tuple[str, str], ...]
    preparation: tuple[Step, ...]
    venv: str
    setup: tuple[Step, ...]
    teardown: tuple[list[str], ...]
    threads: str
    """The value of OMP_NUM_THREADS, as bash reads it."""
    container: tuple[str, ...]
    """Lines of a plain script that set the bash array ``container``, the words of a container."""
    batch: tuple[str, ...]
    """The command of the batch process, up to "--" and the words of the job."""


def surroundings(
    full: ScriptSpec,
    cluster: Cluster,
    directives: list[Directive],
    template: str,
    trained: Training | None,
) -> Surroundings:
    """Compute what surrounds the program of a complete request on ``cluster``.

    Raises RenderError: the request needs a fact that the site's file does not state.
    """
    given = {name for name, _ in directives}
    return Surroundings(
        shebang="#!/bin/bash -l" if cluster.login_shell else "#!/bin/bash",
        env=(*cluster.env, *_network(full, cluster), *full.env),
        preparation=(*_modules(full, cluster), *_conda(full, cluster)),
        venv=(full.venv or "").rstrip("/"),
        setup=_setup(full, cluster),
        teardown=tuple(setup_words(line, "--teardown") for line in full.teardown),
        threads=_threads(full, given, trained),
        container=_plain_container(full, cluster),
        batch=(
            *(full.python or "", "-P", "-m", "hpc_toolkit", "batch", _KIND.get(template, "train")),
            *(f"--{name}={value}" for name, value in _values(full, cluster, given, template)),
            *(trained.options if trained else ()),
        ),
    )


def _values(
    full: ScriptSpec, cluster: Cluster, given: set[str], template: str
) -> Iterator[tuple[str, object]]:
    """Options of the batch process, those that are not its defaults."""
    standard = {
        "run": (full.run, None),
        "gpus": (_gpus_of_a_task(full, given), 0),
        "max-restarts": (full.max_restarts, MAX_RESTARTS),
        "array-offset": (full.array_offset, 0),
    }
    yield from ((name, value) for name, (value, usual) in standard.items() if value != usual)
    for name in ("idle_exit", "lease"):
        if seconds := getattr(full, name):
            yield name.replace("_", "-"), shown(name, seconds)
    # Not in an array, whose last element scontrol would take for all of them.
    several = full.nodes > 1 and not (full.array or full.container)
    if template == "work-queue" and cluster.shrink_jobs and several:
        yield "shrink-every", "1min"
    commands = {"node-setup": (*cluster.node_setup, *full.node_setup), "teardown": full.teardown}
    for name, lines in commands.items():
        yield from ((name, shlex.join(setup_words(line, f"--{name}"))) for line in lines)
    if full.container is not None:
        yield from _container(full, cluster, template)


def _container(full: ScriptSpec, cluster: Cluster, template: str) -> Iterator[tuple[str, object]]:
    container = container_of(full, cluster)
    name = PurePosixPath(container.words[0]).name
    yield name, full.container
    if container.words != (name,):
        yield "container-words", shlex.join(container.words)
    if container.gpu:
        yield "gpu-maker", container.gpu
    for directory in container.binds:
        yield "bind", directory
    if template != "command":
        yield "container-python", full.container_python


def _plain_container(full: ScriptSpec, cluster: Cluster) -> tuple[str, ...]:
    if not (full.plain and full.container):
        return ()
    return tuple(plain_lines(container_of(full, cluster), gpus=full.gpus_per_node > 0))


def _threads(full: ScriptSpec, given: set[str], trained: Training | None) -> str:
    processes = trained.processes if trained else 1
    if processes > 1 and "cpus-per-task" in given:
        return f"$((SLURM_CPUS_PER_TASK > {processes} ? SLURM_CPUS_PER_TASK / {processes} : 1))"
    return "$SLURM_CPUS_PER_TASK" if "cpus-per-task" in given else str(cpus_of_rank(full))


def _network(full: ScriptSpec, cluster: Cluster) -> tuple[tuple[str, str], ...]:
    """Return the site's network variables: all with GPUs, else those of Gloo for a training."""
    if full.gpus_per_node:
        return cluster.nccl
    trains = full.launch is not None
    return tuple(pair for pair in cluster.nccl if trains and pair[0].startswith("GLOO_"))


def _setup(full: ScriptSpec, cluster: Cluster) -> tuple[Step, ...]:
    steps = [setup_words(line, "--setup") for line in (*cluster.setup, *full.setup)]
    return tuple((words, f"setup failed: {' '.join(words)}") for words in steps)


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
        msg = f"--conda: the path of conda is unknown ({cluster.written('conda_base')})"
        raise RenderError(msg, hint="set it there, or give the environment's path .../envs/NAME")
    functions = f"{base.rstrip('/')}/etc/profile.d/conda.sh"
    # Not 'conda init', which would edit the user's ~/.bashrc.
    return (
        (["source", functions], f"no conda in {base}"),
        (["conda", "activate", full.conda], f"cannot activate {full.conda}"),
    )


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


def _gpus_of_a_task(full: ScriptSpec, given: set[str]) -> int:
    if "gpus-per-task" in given:
        return full.gpus_per_node // ranks(full)
    return full.gpus_per_node
