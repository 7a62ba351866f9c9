"""Commands that only job scripts call: the batch process of a job, preflight, stage."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from hpc_toolkit.cli.help import SCRIPTS, Commands
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.quantities import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_toolkit.slurm.batch.program import ProgramRequest
    from hpc_toolkit.slurm.batch.requeue import Restarts
    from hpc_toolkit.slurm.batch.step import Batch, Container

Script = Annotated[Path, typer.Argument(metavar="SCRIPT", help='The running script: "$0".')]
Words = Annotated[
    list[str], typer.Argument(metavar="PROGRAM...", help="The program and its arguments.")
]
Gpus = Annotated[int, typer.Option(metavar="N", help="GPUs that every node must show.")]
MaxRestarts = Annotated[int, typer.Option(metavar="N", help="Requeue the job at most N times.")]
NodeSetup = Annotated[
    list[str] | None,
    typer.Option("--node-setup", metavar="LINE", help="Run this command once on each node."),
]
Teardown = Annotated[
    list[str] | None,
    typer.Option("--teardown", metavar="LINE", help="Run this command at the end of the job."),
]
ArrayOffset = Annotated[
    int, typer.Option(metavar="N", help="Added to the array's index in HPCTK_ARRAY_INDEX.")
]
Apptainer = Annotated[str, typer.Option(metavar="IMAGE", help="Run in this image by apptainer.")]
Pyxis = Annotated[str, typer.Option(metavar="IMAGE", help="Run in this image by pyxis.")]
Bind = Annotated[
    list[str] | None,
    typer.Option("--bind", metavar="FROM[:TO[:ro]]", help="Show this directory in the container."),
]
CheckWithin = Annotated[
    str, typer.Option(metavar="DURATION", help="Time that a node has to start its checks.")
]
MAX_RESTARTS = 10
_FOREVER = "1000d"
"""Ranks of a campaign wait for the coordinator, however long a round takes."""


def register(app: typer.Typer) -> None:
    one: Callable[..., None]
    batch = Commands(
        help="""Run the batch process of a job script.

        Examples:
            exec python -m hpc_toolkit batch work "$0" --run runs/eval
        """
    )
    for one in (work, command, train, ray):
        batch.command()(one)
    app.add_typer(batch, name="batch", rich_help_panel=SCRIPTS, hidden=True)
    for one in (preflight, stage):
        app.command(rich_help_panel=SCRIPTS, hidden=True)(one)


def work(
    script: Script,
    given: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]", help="The run, instead of --run.")
    ] = None,
    run: Annotated[str, typer.Option(metavar="RUN", help="The run's directory.")] = "",
    gpus: Gpus = 0,
    max_restarts: MaxRestarts = MAX_RESTARTS,
    idle_exit: Annotated[
        str | None, typer.Option(metavar="DURATION", help="hpctk work --idle-exit DURATION.")
    ] = None,
    lease: Annotated[
        str | None, typer.Option(metavar="DURATION", help="hpctk work --lease DURATION.")
    ] = None,
    shrink_every: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How often to give back nodes without work."),
    ] = None,
    node_setup: NodeSetup = None,
    teardown: Teardown = None,
    array_offset: ArrayOffset = 0,
    apptainer: Apptainer = "",
    pyxis: Pyxis = "",
    bind: Bind = None,
    container_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="The interpreter in the container.")
    ] = None,
    check_within: CheckWithin = "60s",
    campaign: Annotated[
        bool, typer.Option("--campaign", help="Run the campaign's coordinator beside the ranks.")
    ] = False,
) -> None:
    """Process the items of RUN on all ranks of this job.

    Requeues the job while items are left.

    Examples:
        hpctk batch work "$0" --run runs/eval --gpus 4
    """
    from hpc_toolkit.slurm.batch.process import run_batch
    from hpc_toolkit.slurm.batch.work import WorkJob, WorkRequest
    from hpc_toolkit.system.quantities import parse_duration

    every_s = parse_duration(shrink_every, where="--shrink-every") if shrink_every else None
    within_s = _whole_seconds(check_within)

    def body(batch: Batch, restarts: Restarts) -> None:
        options = {"--idle-exit": idle_exit or (_FOREVER if campaign else None), "--lease": lease}
        request = WorkRequest(
            run=_one_run(given or [run]),
            gpus=gpus,
            options=[f"{name}={value}" for name, value in options.items() if value is not None],
            container=_container(apptainer, pyxis, bind, gpus=gpus),
            python=container_python or sys.executable,
            shrink_every_s=every_s,
            campaign=campaign,
            within_s=within_s,
        )
        WorkJob(batch, restarts, request).run()

    code = run_batch(
        script,
        body,
        array_offset=array_offset,
        max_restarts=max_restarts,
        forward=not apptainer,
        node_setup=node_setup or (),
        teardown=teardown or (),
    )
    sys.exit(code)


def command(
    script: Script,
    program: Words,
    gpus: Gpus = 0,
    max_restarts: MaxRestarts = MAX_RESTARTS,
    node_setup: NodeSetup = None,
    teardown: Teardown = None,
    array_offset: ArrayOffset = 0,
    apptainer: Apptainer = "",
    pyxis: Pyxis = "",
    bind: Bind = None,
    check_within: CheckWithin = "60s",
) -> None:
    """Run a program on all ranks of this job.

    Requeues the job when the program exits with 75.

    Examples:
        hpctk batch command "$0" -- ./simulate --seed 1
    """
    from hpc_toolkit.slurm.batch.program import ProgramRequest

    request = ProgramRequest(
        words=tuple(program),
        gpus=gpus,
        container=_container(apptainer, pyxis, bind, gpus=gpus),
        within_s=_whole_seconds(check_within),
    )
    _run_program(script, request, max_restarts, node_setup, teardown, array_offset=array_offset)


def train(
    script: Script,
    program: Words,
    run_dir: Annotated[str, typer.Option(metavar="DIR", help="The training's directory.")],
    gpus: Gpus = 0,
    max_restarts: MaxRestarts = MAX_RESTARTS,
    alone: Annotated[
        bool, typer.Option("--alone", help="The script is started without a launcher.")
    ] = False,
    tasks: Annotated[int, typer.Option(metavar="N", help="Tasks on each node.")] = 1,
    srun: Annotated[
        list[str] | None, typer.Option("--srun", metavar="OPTION", help="Pass this to srun.")
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option("--stage", metavar="PATH", help="Copy this to each node's disk first."),
    ] = None,
    stage_dir: Annotated[
        str, typer.Option(metavar="DIR", help="To this directory; by default the job's own.")
    ] = "",
    node_setup: NodeSetup = None,
    teardown: Teardown = None,
    apptainer: Apptainer = "",
    pyxis: Pyxis = "",
    bind: Bind = None,
    container_python: Annotated[
        str, typer.Option(metavar="PATH", help="The interpreter in the container.")
    ] = "",
    check_within: CheckWithin = "60s",
) -> None:
    """Start the ranks of a training on the nodes of this job.

    Requeues the job when the training exits with 75.

    Examples:
        hpctk batch train "$0" --run-dir runs/train -- python train.py
    """
    from hpc_toolkit.slurm.batch.program import ProgramRequest

    request = ProgramRequest(
        words=tuple(program),
        gpus=gpus,
        srun=tuple(srun or ()),
        container=_container(apptainer, pyxis, bind, gpus=gpus),
        check_inside=container_python,
        run_dir=run_dir,
        alone=alone,
        stage=tuple(stage or ()),
        stage_dir=stage_dir,
        tasks=tasks,
        within_s=_whole_seconds(check_within),
    )
    _run_program(script, request, max_restarts, node_setup, teardown, forward=not apptainer)


def ray(
    script: Script,
    program: Words,
    gpus: Gpus = 0,
    max_restarts: MaxRestarts = MAX_RESTARTS,
    node_setup: NodeSetup = None,
    teardown: Teardown = None,
    check_within: CheckWithin = "60s",
) -> None:
    """Start Ray on the nodes of this job and run a driver program.

    Requeues the job when the driver exits with 75.

    Examples:
        hpctk batch ray "$0" -- python driver.py
    """
    from hpc_toolkit.slurm.batch.program import ProgramRequest, ray_words

    request = ProgramRequest(
        words=tuple(program),
        gpus=gpus,
        srun=("--ntasks-per-node=1",),
        bare=True,
        prepare=ray_words,
        within_s=_whole_seconds(check_within),
    )
    _run_program(script, request, max_restarts, node_setup, teardown)


def _run_program(
    script: Path,
    request: ProgramRequest,
    max_restarts: int,
    node_setup: list[str] | None,
    teardown: list[str] | None,
    *,
    array_offset: int = 0,
    forward: bool = True,
) -> NoReturn:
    from hpc_toolkit.slurm.batch.process import run_batch
    from hpc_toolkit.slurm.batch.program import ProgramJob

    code = run_batch(
        script,
        lambda batch, restarts: ProgramJob(batch, restarts, request).run(),
        array_offset=array_offset,
        max_restarts=max_restarts,
        forward=forward,
        node_setup=node_setup or (),
        teardown=teardown or (),
    )
    sys.exit(code)


def _whole_seconds(check_within: str) -> int:
    """Seconds for srun --immediate, rounded up: 0 would mean "at once"."""
    from hpc_toolkit.system.quantities import parse_duration

    return math.ceil(parse_duration(check_within, where="--check-within"))


def _one_run(given: list[str]) -> str:
    if len(given) != 1 or not given[0]:
        what = "no run directory" if len(given) == 1 else f"{len(given)} run directories"
        hint = "sbatch SCRIPT RUN, with a RUN that 'hpctk init RUN' has made"
        raise ConfigError(what, hint=hint)
    return given[0]


def _container(apptainer: str, pyxis: str, bind: list[str] | None, *, gpus: int) -> Container:
    from hpc_toolkit.slurm.batch.step import Container

    return Container(
        runtime="apptainer" if apptainer else "pyxis" if pyxis else "",
        image=apptainer or pyxis,
        binds=tuple(bind or ()),
        gpus=gpus > 0,
    )


def preflight(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Run that the ranks write to.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs that must be usable on this node.")] = 0,
    free: Annotated[str, typer.Option(metavar="SIZE", help="Free space required in RUN.")] = "100M",
) -> None:
    """Check this node before a job uses it; exit with 1 on a problem.

    Examples:
        hpctk preflight runs/eval --gpus 4
    """
    from hpc_toolkit.slurm.batch.preflight import check_node

    root = Path(run) if run is not None else None
    report = check_node(root, gpus=gpus, free_bytes=parse_size(free, where="--free"))
    print(report.line(), file=sys.stderr if report.problems else sys.stdout)
    sys.exit(1 if report.problems else 0)


def stage(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Directory on this node's disk.")],
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files and directories to copy.")
    ],
    users: Annotated[int, typer.Option(help="Tasks on this node that use the copies.")] = 1,
) -> None:
    """Copy files to this node's disk, below a directory of its name.

    Examples:
        hpctk stage /tmp/data /scratch/me/corpus
    """
    import signal

    from hpc_toolkit.slurm.batch.staging import stage_paths
    from hpc_toolkit.system.ranks import host_name

    # The warning of the time limit goes to all steps of a job; the ranks are to act on it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # The script looks for the copies below Slurm's name of the node, whatever HPCTK_HOST says.
    host = os.environ.get("SLURMD_NODENAME") or host_name()
    said = stage_paths([Path(path) for path in paths], Path(directory) / host, users=users)
    print(f"{host}: {said}")
