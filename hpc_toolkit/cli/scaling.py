"""Commands that measure how a training scales, and say what it costs.

Annotations are objects here, not text: typer reads those of a command with a script's options so.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_toolkit.cli.arguments import JsonOption
from hpc_toolkit.cli.scriptoptions import ScriptCommand, add_script_command, requested
from hpc_toolkit.errors import ConfigError, RunError, near_miss
from hpc_toolkit.scaling.collectives import DEFAULT_SIZES
from hpc_toolkit.scaling.settings import DEFAULT_MODEL, Settings, Variation, parse_world_sizes

if TYPE_CHECKING:
    from hpc_toolkit.scaling.launches import ScalingRun
    from hpc_toolkit.scaling.page import Judged

_ENDINGS = (".md", ".json", ".svg")
_TRAINING = "Training"
_WHERE = "Where"
_OWN = {"nodes": "--world-sizes", "ntasks": "--world-sizes", "ntasks_per_node": "--ranks-per-node"}
"""Options of a script that another one decides here."""


class RunCommand(ScriptCommand):
    """``scaling run``: the options of a script, for ``--slurm``, without its arguments."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params = [one for one in self.params if one.param_type_name == "option"]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = typer.Typer(
        help="Measure one training on several numbers of ranks, and what it costs.",
        no_args_is_help=True,
    )
    add_script_command(group, run, panel="Commands", cls=RunCommand)
    group.command()(analyze)
    group.command()(collectives)
    app.add_typer(group, name="scaling", rich_help_panel="Training")


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


def analyze(
    source: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="DIR of 'scaling run' or of pods' logs, or a .json, .csv, .jsonl, .log file.",
        ),
    ],
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(min=0, help="What one rank's GPU costs in an hour.")
    ] = None,
    min_efficiency: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Exit with 1 if any world size has less; the advice goes by it, by default 0.85.",
        ),
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", "-o", help="Write .md, .json or .svg; can be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare world sizes: speed-up, efficiency, GPU-hours, cost, a fitted law and advice."""
    from hpc_toolkit.scaling.page import as_data, as_markdown

    for path in out or []:
        if path.suffix not in _ENDINGS:
            message = f"{path}: unknown format {path.suffix!r}"
            raise ConfigError(message, hint=near_miss(path.suffix, list(_ENDINGS)))
    judged, notes = _judged(source, price_per_gpu_hour, min_efficiency)
    if as_json:
        print(json.dumps(as_data(judged, notes), allow_nan=False))
    else:
        sys.stdout.write(as_markdown(judged, notes))
    for path in out or []:
        _write(path, judged, notes)
    if min_efficiency is not None and any(verdict.below for _, verdict, _ in judged):
        raise typer.Exit(1)


def _judged(
    sources: list[Path], price: float | None, minimum: float | None
) -> tuple[list["Judged"], list[str]]:
    from dataclasses import replace

    from hpc_toolkit.scaling.claims import check_claims
    from hpc_toolkit.scaling.comparison import compare
    from hpc_toolkit.scaling.sources import read_source
    from hpc_toolkit.scaling.verdict import FAIR, judge

    judged: list[Judged] = []
    notes: list[str] = []
    for path in sources:
        found, left_out = read_source(path)
        notes += left_out
        for series in found:
            priced = series if price is None else replace(series, price_per_gpu_hour=price)
            comparison = compare(priced)
            verdict = judge(comparison, FAIR if minimum is None else minimum)
            judged.append((comparison, verdict, check_claims(comparison)))
    return judged, notes


def _write(path: Path, judged: list["Judged"], notes: list[str]) -> None:
    from hpc_toolkit.files import replace_file
    from hpc_toolkit.scaling.page import as_data, as_markdown
    from hpc_toolkit.scaling.picture import scaling_svg

    if path.suffix == ".json":
        text = json.dumps(as_data(judged, notes), allow_nan=False) + "\n"
    elif path.suffix == ".md":
        text = as_markdown(judged, notes)
    else:
        text = scaling_svg([one for one, _, _ in judged], judged[0][1].minimum)
    try:
        replace_file(path, iter([text.encode()]))
    except OSError as error:
        message = f"{path}: cannot be written: {error.strerror}"
        raise RunError(message, hint="name a file in a directory that you can write to") from error


def collectives(
    logs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[LOG]...", help="Show what these logs hold; measure nothing."),
    ] = None,
    world_size: Annotated[int, typer.Option(min=2, help="Ranks on this machine.")] = 2,
    sizes: Annotated[str, typer.Option(help="Sizes of messages.")] = DEFAULT_SIZES,
    names: Annotated[
        str, typer.Option("--collectives", help="all_reduce, all_gather ...; or all.")
    ] = "all",
    iterations: Annotated[int, typer.Option(min=1, help="Of each, of which the median.")] = 20,
    backend: Annotated[
        str | None, typer.Option(help="nccl or gloo; by default what suits the machine.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write .md or .json.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time collectives over sizes of messages; bus bandwidths as nccl-tests computes them."""
    from hpc_toolkit.files import replace_file
    from hpc_toolkit.scaling.collectives import as_markdown, records_in
    from hpc_toolkit.scaling.sources import read_text

    if out is not None and out.suffix not in (".md", ".json"):
        message = f"{out}: unknown format {out.suffix!r}"
        raise ConfigError(message, hint=".md, or .json")
    if logs:
        found = [one for path in logs for one in records_in(read_text(path))]
    else:
        found = _timed(world_size, sizes, names, iterations, backend)
    if not found:
        message = "no collective was timed"
        raise RunError(message, hint="the logs are those of hpc_toolkit.scaling.collectives")
    data = json.dumps({"format": 1, "kind": "hpctk.collectives", "rows": found}) + "\n"
    page = as_markdown(found)
    sys.stdout.write(data if as_json else page)
    if out is not None:
        text = page if out.suffix == ".md" else data
        replace_file(out, iter([text.encode()]))


def _timed(
    world_size: int, sizes: str, names: str, iterations: int, backend: str | None
) -> list[dict[str, Any]]:
    import tempfile

    from hpc_toolkit.launcher.launch import launch
    from hpc_toolkit.launcher.plan import Request
    from hpc_toolkit.scaling.collectives import (
        MODULE,
        parse_collectives,
        parse_sizes,
        records_in,
    )
    from hpc_toolkit.scaling.sources import read_text

    parse_sizes(sizes)
    parse_collectives(names)
    words = ("--sizes", sizes, "--collectives", names, "--iterations", str(iterations))
    with tempfile.TemporaryDirectory() as directory:
        options = {"nproc_per_node": world_size, "module": True, "redirects": "3"}
        request = Request(
            script=MODULE,
            arguments=words,
            options=options,
            backend=backend,
            run_dir=Path(directory),
        )
        outcome = launch(request)
        if outcome.error is not None:
            raise outcome.error
        outputs = sorted(Path(directory, "logs").glob("*/rank-0.*.out"))
        return [one for path in outputs for one in records_in(read_text(path))]
