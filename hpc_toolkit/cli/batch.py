"""Commands that only job scripts call: the batch process of a job."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_toolkit.cli.help import SCRIPTS, Commands
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from hpc_toolkit.slurm.batch.requeue import Restarts
    from hpc_toolkit.slurm.batch.step import Batch, Container

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help='The running script: "$0".')]
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
    """Add the commands of this module."""
    batch = Commands(
        help="""Run the batch process of a job script.

        Examples:
            exec python -m hpc_toolkit batch work "$0" --run runs/eval
        """
    )
    batch.command()(work)
    batch.command()(command)
    batch.command()(train)
    batch.command()(ray)
    app.add_typer(batch, name="batch", rich_help_panel=SCRIPTS, hidden=True)


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
        Path(script),
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
    from hpc_toolkit.slurm.batch.process import run_batch
    from hpc_toolkit.slurm.batch.program import ProgramJob, ProgramRequest

    request = ProgramRequest(
        words=tuple(program),
        gpus=gpus,
        container=_container(apptainer, pyxis, bind, gpus=gpus),
        within_s=_whole_seconds(check_within),
    )
    code = run_batch(
        Path(script),
        lambda batch, restarts: ProgramJob(batch, restarts, request).run(),
        array_offset=array_offset,
        max_restarts=max_restarts,
        node_setup=node_setup or (),
        teardown=teardown or (),
    )
    sys.exit(code)


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
    from hpc_toolkit.slurm.batch.process import run_batch
    from hpc_toolkit.slurm.batch.program import ProgramJob, ProgramRequest, Staging

    request = ProgramRequest(
        words=tuple(program),
        gpus=gpus,
        srun=tuple(srun or ()),
        container=_container(apptainer, pyxis, bind, gpus=gpus),
        check_inside=container_python,
        run_dir=run_dir,
        alone=alone,
        staging=Staging(paths=tuple(stage or ()), directory=stage_dir, users=tasks),
        within_s=_whole_seconds(check_within),
    )
    code = run_batch(
        Path(script),
        lambda batch, restarts: ProgramJob(batch, restarts, request).run(),
        max_restarts=max_restarts,
        forward=not apptainer,
        node_setup=node_setup or (),
        teardown=teardown or (),
    )
    sys.exit(code)


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
    from hpc_toolkit.slurm.batch.process import run_batch
    from hpc_toolkit.slurm.batch.program import ProgramJob, ProgramRequest, ray_words

    within_s = _whole_seconds(check_within)

    def body(batch: Batch, restarts: Restarts) -> None:
        request = ProgramRequest(
            words=tuple(program),
            gpus=gpus,
            srun=("--ntasks-per-node=1",),
            bare=True,
            within_s=within_s,
            prepare=lambda words: ray_words(batch.job, words),
        )
        ProgramJob(batch, restarts, request).run()

    code = run_batch(
        Path(script),
        body,
        max_restarts=max_restarts,
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
