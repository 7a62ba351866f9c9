"""Commands that only job scripts call: the batch process of a job, preflight, stage."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

from hpc_toolkit.cli.arguments import Argument, value
from hpc_toolkit.cli.help import SCRIPTS, Commands
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.containers import NO_CONTAINER, PROGRAMS, Container, environment_of, node_gpu
from hpc_toolkit.slurm.render.spec import MAX_RESTARTS
from hpc_toolkit.system.options import Option, flag, many
from hpc_toolkit.system.quantities import parse_duration, parse_size
from hpc_toolkit.system.ranks import host_name

Script = Annotated[Path, Argument("SCRIPT", 'The running script: "$0".')]
Words = Annotated[list[str], Argument("PROGRAM...", "Program and arguments.")]
_JOB = (
    Option("gpus", "GPUs that every node must show.", "N", default=0),
    Option("max_restarts", "Requeue the job at most N times.", "N", default=MAX_RESTARTS),
    many("node_setup", "Run this command once on each node", "LINE"),
    many("teardown", "Run this command at the end of the job", "LINE"),
    Option("check_within", "Time that a node has to start its checks.", "DURATION", default="60s"),
)
_PROGRAMS = [name.replace("-", "_") for name in PROGRAMS]
_RANKS = (
    Option("array_offset", "Added to the array's index in HPCTK_ARRAY_INDEX.", "N", default=0),
    *(Option(name, f"Run in this image by {name}.", "IMAGE", default="") for name in _PROGRAMS),
    Option("container_words", "The container's program and its arguments.", "LINE", default=""),
    Option("gpu_maker", "amd or nvidia. [default: as this node's]", "MAKER", default=""),
    many("bind", "Show this directory in the container", "FROM[:TO[:ro]]"),
    Option("container_python", "The interpreter in the container.", "PATH", default=""),
)
_WORK = (
    Option("run", "The run's directory.", "RUN", default=""),
    Option("idle_exit", "hpctk work --idle-exit DURATION.", "DURATION"),
    Option("lease", "hpctk work --lease DURATION.", "DURATION"),
    Option("workers_per_task", "hpctk work --workers N.", "N"),
    Option("shrink_every", "How often to give back nodes without work.", "DURATION"),
    flag("campaign", "Run the campaign's coordinator beside the ranks."),
    flag("one_rank", "Start one rank for all nodes."),
)
_LOOK_S = 300.0
"""Time until a job looks again whether jobs are kept for its run."""
_STEP = (many("srun", "Pass this to srun", "OPTION"),)
_STAGING = (
    flag("stage_env", "Copy this interpreter's environment to each node's disk."),
    Option("stage_dir", "To this directory; by default the job's own.", "DIR", default=""),
)
_TRAINING = (
    flag("alone", "The script is started without a launcher."),
    Option("tasks", "Tasks on each node.", "N", default=1),
    *_STEP,
    many("stage", "Copy this to each node's disk first", "PATH"),
)


def register(app: Commands) -> None:
    batch = Commands(
        "batch",
        panel=SCRIPTS,
        hidden=True,
        help="""Run the batch process of a job script.

        Examples:
            exec python -m hpc_toolkit batch work "$0" --run runs/eval
        """,
    )
    batch.add(work, {"Options": (*_WORK, *_STAGING, *_JOB, *_RANKS)})
    batch.add(command, {"Options": (*_STEP, *_STAGING, *_JOB, *_RANKS)})
    batch.add(train, {"Options": (*_TRAINING, *_STAGING, *_JOB, *_RANKS)})
    app.add_command(batch)
    for one in (preflight, stage):
        app.add(one, panel=SCRIPTS, hidden=True)


def work(
    *,
    script: Script,
    runs: Annotated[list[str] | None, Argument("[RUN]", "Instead of --run.")] = None,
    **given: Any,
) -> None:
    """Process the items of RUN on all ranks of this job.

    Requeues the job while items are left.

    Examples:
        hpctk batch work "$0" --run runs/eval --gpus 4
    """
    from hpc_toolkit.slurm.batch.work import WorkJob

    every, campaign = given["shrink_every"], bool(given["campaign"])
    named = runs or [given["run"]]
    if len(named) != 1 or not named[0]:
        what = "no run directory" if len(named) == 1 else f"{len(named)} run directories"
        raise ConfigError(what, hint="sbatch SCRIPT RUN, where RUN was created by 'hpctk init RUN'")
    # Ranks of a campaign wait for the coordinator, however long a round takes.
    idle_exit = given["idle_exit"] or ("1000d" if campaign else None)
    options = {"--idle-exit": idle_exit, "--lease": given["lease"]}
    options["--workers"] = given["workers_per_task"]
    _run(
        script,
        given,
        WorkJob,
        run=named[0],
        options=[f"{name}={value}" for name, value in options.items() if value is not None],
        python=given["container_python"] or sys.executable,
        shrink_every_s=parse_duration(every, where="--shrink-every") if every else None,
        campaign=campaign,
        one_rank=bool(given["one_rank"]),
        send_others=partial(_send_others, Path(named[0])),
    )


def _send_others(directory: Path, job: str, name: str, **how: bool) -> float:
    from hpc_toolkit.submit import kept_jobs

    if not any(record.get("by_jobs") for _, record in kept_jobs(RunPaths(directory))):
        return _LOOK_S
    from hpc_toolkit.run import Run
    from hpc_toolkit.submit.keeping import send_others

    return send_others(Run.open(directory), job, name, **how)


def command(*, script: Script, program: Words, **given: Any) -> None:
    """Run a program on all ranks of this job.

    Requeues the job when the program exits with 75.

    Examples:
        hpctk batch command "$0" -- ./simulate --seed 1
    """
    from hpc_toolkit.slurm.batch.step import ProgramJob

    _run(script, given, ProgramJob, words=tuple(program), srun=given["srun"])


def train(
    *,
    script: Script,
    program: Words,
    run_dir: Annotated[str, value("DIR", "The training's directory.")],
    **given: Any,
) -> None:
    """Start the ranks of a training on the nodes of this job.

    Requeues the job when the training exits with 75.

    Examples:
        hpctk batch train "$0" --run-dir runs/train -- python train.py
    """
    from hpc_toolkit.slurm.batch.step import ProgramJob

    _run(
        script,
        given,
        ProgramJob,
        words=tuple(program),
        check_inside=given["container_python"],
        run_dir=run_dir,
        alone=bool(given["alone"]),
        srun=given["srun"],
    )


def _run(script: Path, given: dict[str, Any], kind: Callable[..., Any], **request: Any) -> NoReturn:
    """Run the job of a kind, with what the options of all jobs say."""
    from hpc_toolkit.slurm.batch.staging import Staging
    from hpc_toolkit.slurm.batch.step import run_batch

    job = partial(
        kind,
        gpus=given["gpus"],
        container=(container := _container(given)),
        staging=Staging(
            paths=tuple(given.get("stage") or ()),
            environment=bool(given["stage_env"]),
            directory=given["stage_dir"],
            tasks=given.get("tasks", 1),
        ),
        # Rounded up: 0 of srun --immediate would mean "at once".
        within_s=math.ceil(parse_duration(given["check_within"], where="--check-within")),
        **request,
    )
    code = run_batch(
        script,
        lambda batch, restarts: job(batch=batch, restarts=restarts).main(),
        array_offset=given["array_offset"],
        max_restarts=given["max_restarts"],
        warning=container.warning,
        node_setup=given["node_setup"],
        teardown=given["teardown"],
    )
    sys.exit(code)


def _container(given: dict[str, Any]) -> Container:
    name = next((one for one in _PROGRAMS if given.get(one)), None)
    if name is None:
        return NO_CONTAINER
    return Container(
        words=tuple(shlex.split(given["container_words"])) or (name.replace("_", "-"),),
        image=given[name],
        binds=(*environment_of(given["container_python"]), *given["bind"]),
        gpu=(given["gpu_maker"] or node_gpu()) if given["gpus"] else "",
    )


def preflight(
    run: Annotated[str | None, Argument("[RUN]", "Run of the ranks.")] = None,
    gpus: Annotated[int, value("N", "GPUs that must be usable on this node.")] = 0,
    free: Annotated[str, value("SIZE", "Free space required in RUN.")] = "100M",
) -> None:
    """Check this node before a job uses it; exit with 1 on a problem.

    Examples:
        hpctk preflight runs/eval --gpus 4
    """
    from hpc_toolkit.slurm.batch.node import check_node

    root = Path(run) if run is not None else None
    is_fit, line = check_node(root, gpus=gpus, free_bytes=parse_size(free, where="--free"))
    print(line, file=sys.stdout if is_fit else sys.stderr)
    sys.exit(0 if is_fit else 1)


def stage(
    directory: Annotated[str, Argument("DIR", "Directory on this node's disk.")],
    paths: Annotated[list[str] | None, Argument("[PATH...]", "What to copy.")] = None,
    users: Annotated[int, value("N", "Tasks on this node that use the copies.")] = 1,
    environment: Annotated[str | None, value("FILE", "Extract this archive too.")] = None,
) -> None:
    """Copy files to this node's disk, below a directory of its name.

    Examples:
        hpctk stage /tmp/data /scratch/me/corpus
    """
    from hpc_toolkit.slurm.batch.node import stage_paths
    from hpc_toolkit.slurm.batch.staging import stage_environment
    from hpc_toolkit.system.processes import WARNINGS

    # The warning of the time limit goes to all steps of a job; the ranks are to act on it.
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # The script looks for the copies below Slurm's name of the node, whatever HPCTK_HOST says.
    host = os.environ.get("SLURMD_NODENAME") or host_name()
    place, sources = Path(directory) / host, [Path(path) for path in paths or ()]
    more = partial(stage_environment, Path(environment)) if environment else None
    said = stage_paths(sources, place, users=users, more=more)
    print(f"{host}: {said}")
