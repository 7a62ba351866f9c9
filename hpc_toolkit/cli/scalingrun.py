"""The command that measures a training at several world sizes, here or through Slurm.

Annotations are objects here, not text: typer reads those of a command with a script's options so.
"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_toolkit.cli.scriptoptions import ScriptCommand, requested
from hpc_toolkit.cli.scripttable import PANELS
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.scaling.settings import DEFAULT_MODEL, Settings, Variation, parse_world_sizes

if TYPE_CHECKING:
    from hpc_toolkit.scaling.launches import ScalingRun

_TRAINING = "Training"
_WHERE = "Where"
_OWN = {
    "nodes": "--world-sizes",
    "ntasks": "--world-sizes",
    "ntasks_per_node": "--ranks-per-node",
    # Its jobs would measure the same at the same time, into the same files.
    "array": "--world-sizes",
}
"""Options of a script that another one decides here."""

_REFUSED = {*_OWN, "array_offset", "run", "idle_exit", "lease"}
"""Not shown, beside those of trainings: no job of a measurement takes them."""


class RunCommand(ScriptCommand):
    """``scaling run``: the options of a script, for ``--slurm``, without its arguments."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        hidden = _REFUSED | {option.name for option in PANELS[_TRAINING]}
        found: dict[str, Any] = {}
        params: list[Any] = list(self.params)
        for one in params:
            if one.param_type_name == "option" and one.name not in found:
                # Ours come first, and hold for those of a script that have the same name.
                one.hidden = one.name in hidden and one.name != "backend"
                found[one.name] = one
        self.params = list(found.values())


def run(
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Where records and logs go.")
    ],
    world_sizes: Annotated[str, typer.Option(help="Numbers of ranks.")] = "1,2,4",
    batch_size: Annotated[
        int,
        typer.Option(
            help="Samples of a forward pass, of all ranks together.", rich_help_panel=_TRAINING
        ),
    ] = 8,
    weak: Annotated[
        bool,
        typer.Option(
            "--weak/--strong",
            help="Let each rank have that batch, instead of all together.",
            rich_help_panel=_TRAINING,
        ),
    ] = False,
    seq_length: Annotated[
        int, typer.Option(help="Tokens of a sample.", rich_help_panel=_TRAINING)
    ] = 128,
    max_steps: Annotated[
        int, typer.Option(help="Steps that are measured.", rich_help_panel=_TRAINING)
    ] = 20,
    warmup: Annotated[int, typer.Option(help="Steps before.", rich_help_panel=_TRAINING)] = 5,
    repeats: Annotated[
        int, typer.Option(help="Measurements of each case.", rich_help_panel=_TRAINING)
    ] = 3,
    model: Annotated[
        str,
        typer.Option(
            help="decoder-LAYERSxWIDTH, or a model of transformers; weights are random.",
            rich_help_panel=_TRAINING,
        ),
    ] = DEFAULT_MODEL,
    lora_rank: Annotated[
        int, typer.Option(help="Train adapters of this rank alone.", rich_help_panel=_TRAINING)
    ] = 0,
    load_in_4bit: Annotated[
        bool,
        typer.Option(
            "--load-in-4bit",
            help="Keep frozen weights in 4 bits; CUDA only.",
            rich_help_panel=_TRAINING,
        ),
    ] = False,
    precision: Annotated[
        str, typer.Option(help="float32, or bf16.", rich_help_panel=_TRAINING)
    ] = "float32",
    accumulate: Annotated[
        int, typer.Option(help="Forward passes of a step.", rich_help_panel=_TRAINING)
    ] = 1,
    loader_workers: Annotated[
        int,
        typer.Option(help="Processes that make each rank's samples.", rich_help_panel=_TRAINING),
    ] = 0,
    bucket_cap_mb: Annotated[
        int, typer.Option(help="MiB of gradients exchanged at once.", rich_help_panel=_TRAINING)
    ] = 25,
    sample_cost_ms: Annotated[
        float, typer.Option(help="CPU time that a sample costs.", rich_help_panel=_TRAINING)
    ] = 0.0,
    threads: Annotated[
        int,
        typer.Option(
            help="Threads of each rank; by default what the largest world size has CPUs for here, "
            "and what the launcher gives in a job.",
            rich_help_panel=_TRAINING,
        ),
    ] = 0,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="Compare values, as in loader-workers=1,4,8; may be repeated.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="nccl or gloo; by default what suits the node.", rich_help_panel=_WHERE),
    ] = None,
    slurm: Annotated[
        bool,
        typer.Option(
            "--slurm",
            help="Submit a job for each world size; the options below are theirs.",
            rich_help_panel=_WHERE,
        ),
    ] = False,
    interleave: Annotated[
        bool,
        typer.Option(
            "--interleave",
            help="Launch each repeat by itself, world sizes in turn: slower, and fairer on a "
            "machine that others use; not with --slurm.",
            rich_help_panel=_WHERE,
        ),
    ] = False,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --slurm; by default the GPUs of a node, else 1.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Measure only what DIR does not hold yet.", rich_help_panel=_WHERE
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be measured.", rich_help_panel=_WHERE),
    ] = False,
    **given: Any,
) -> None:
    """Measure the same training at several world sizes, here or through Slurm.

    Prints DIR, or with --slurm the jobs' ids; 'hpctk scaling analyze DIR' compares.
    """
    from hpc_toolkit.scaling.launches import ScalingRun

    settings = Settings(
        batch_size=batch_size,
        seq_length=seq_length,
        max_steps=max_steps,
        warmup=warmup,
        repeats=repeats,
        weak=weak,
        model=model,
        accumulate=accumulate,
        loader_workers=loader_workers,
        bucket_cap_mb=bucket_cap_mb,
        sample_cost_ms=sample_cost_ms,
        lora_rank=lora_rank,
        load_in_4bit=load_in_4bit,
        precision=precision,
        threads=threads,
    )
    variations = tuple(Variation.parse(text) for text in vary or ())
    wanted = ScalingRun(
        directory=out.absolute(),
        world_sizes=parse_world_sizes(world_sizes),
        settings=settings,
        variations=variations,
    )
    wanted.check()
    if backend not in (None, "nccl", "gloo"):
        message = f"--backend: {backend!r} is neither nccl nor gloo"
        raise ConfigError(message, hint="nccl for NVIDIA GPUs, gloo for CPUs")
    _check_directory(out, resume=resume)
    if not slurm:
        given["ranks_per_node"] = ranks_per_node
        _here(wanted, given, interleave=interleave, backend=backend, dry_run=dry_run)
        return
    if interleave:
        message = "--interleave: jobs do not take turns"
        raise ConfigError(message, hint="leave it out; each job measures its repeats by itself")
    _through_slurm(wanted, given, ranks_per_node=ranks_per_node, backend=backend, dry_run=dry_run)


def _check_directory(out: Path, *, resume: bool) -> None:
    from hpc_toolkit.scaling.records import DIRECTORY

    if any((out / DIRECTORY).glob("*.jsonl")) and not resume:
        message = f"{out} holds measurements"
        raise ConfigError(message, hint="--resume measures what is missing; or name another DIR")


def _here(
    run: "ScalingRun",
    given: dict[str, Any],
    *,
    interleave: bool,
    backend: str | None,
    dry_run: bool,
) -> None:
    from hpc_toolkit.scaling.launches import with_equal_threads

    named = [name for name, value in given.items() if value not in (None, (), [])]
    if named:
        message = f"--{named[0].replace('_', '-')} is for jobs"
        raise ConfigError(message, hint="add --slurm, or leave it out")
    run = with_equal_threads(run)
    if dry_run:
        for size in run.world_sizes:
            print(f"world size {size}: {run.measurements()} times {shlex.join(run.words())}")
        return
    turns = range(1, run.settings.repeats + 1) if interleave else [run.settings.repeats]
    for count in turns:
        for size in run.world_sizes:
            _launch(run.first_repeats(count), size, backend)
    print(run.directory)


def _launch(run: "ScalingRun", size: int, backend: str | None) -> None:
    import time

    from hpc_toolkit.quantities import format_duration
    from hpc_toolkit.scaling.launches import launch_here

    began = time.monotonic()
    code = launch_here(run, size, backend=backend)
    if code:
        raise typer.Exit(code)
    took = format_duration(time.monotonic() - began)
    print(f"world size {size}: {took}", file=sys.stderr)


def _through_slurm(
    run: "ScalingRun",
    given: dict[str, Any],
    *,
    ranks_per_node: int | None,
    backend: str | None,
    dry_run: bool,
) -> None:
    from hpc_toolkit.scaling.launches import job_command, nodes_of
    from hpc_toolkit.submit.send import check_directory, send
    from hpc_toolkit.submit.submission import of_request

    for name, instead in _OWN.items():
        if given.get(name):
            message = f"--{name.replace('_', '-')}: {instead} decides that here"
            raise ConfigError(message, hint=f"leave it out, and give {instead}")
    gpus = str(given.get("gpus_per_node") or "").rpartition(":")[2]
    per_node = ranks_per_node or (int(gpus) if gpus.isdecimal() and int(gpus) else 1)
    shapes = {size: nodes_of(size, per_node) for size in run.world_sizes}
    name = given.pop("job_name", None) or "scaling"
    submissions = []
    for size, nodes in shapes.items():
        python = given.get("python") or sys.executable
        values = {
            **given,
            "nodes": nodes,
            "ntasks_per_node": 1,
            "job_name": f"{name}-{size}",
            "command": tuple(job_command(run, size, per_node, python=python, backend=backend)),
        }
        if gpus.isdecimal() and 0 < size < int(gpus):
            # Else the smallest world size would be charged for a whole node.
            kind = str(given["gpus_per_node"]).rpartition(":")[0]
            values["gpus_per_node"] = f"{kind}:{size}" if kind else str(size)
        spec, site, script = requested("command", values)
        check_directory(site, Path.cwd())
        submissions.append(of_request(spec, site, "command", run=None, cwd=Path.cwd()))
        if dry_run:
            sys.stdout.write(script)
    if dry_run:
        return
    for submission in submissions:
        for job in send(submission):
            print(job.job, flush=True)
