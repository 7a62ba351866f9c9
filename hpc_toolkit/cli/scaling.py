"""Commands that measure how a training scales, and say what it costs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_toolkit.cli import scriptoptions
from hpc_toolkit.cli.arguments import (
    argument,
    complete_cluster,
    outputs,
    refuse_given,
    value,
    was_given,
    write_outputs,
)
from hpc_toolkit.cli.help import TRAIN, Commands, add_table_command
from hpc_toolkit.cli.scriptoptions import ScriptCommand, requested
from hpc_toolkit.errors import ConfigError, HpcToolkitError, RunError
from hpc_toolkit.slurm.render.rules import option
from hpc_toolkit.system.options import Option, Panels, by_name, flag, many, only_given
from hpc_toolkit.system.quantities import format_duration, parse_counts
from hpc_toolkit.system.terminal import note, printable_lines
from hpc_toolkit.training.scaling.settings import (
    DEFAULT_SIZES,
    OPTIONS,
    Settings,
    Variation,
    cases,
    sample_cost_ms,
)

if TYPE_CHECKING:
    from hpc_toolkit.submit.submission import Submission
    from hpc_toolkit.training.scaling.launches import ScalingRun
    from hpc_toolkit.training.scaling.loaders import LoaderAdvice
    from hpc_toolkit.training.scaling.page import Judged

_TRAINING = "Training"
_LEFT_OUT = {
    *("nodes", "ntasks_per_node", "nproc_per_node", "array", "array_offset", "run_dir", "run"),
    *("rank_restarts", "stage", "stage_dir", "backend"),
}
"""Options of a script that a measurement sets itself, or has no use for."""
_COMMON = {
    *("gpus_per_node", "cpus_per_task", "mem", "time", "cluster", "account", "partition", "qos"),
    *("venv", "container", "module", "sbatch"),
}
"""Options of a job that the short help shows."""
_MOST_RANKS = 999_999
PANELS: Panels = {
    _TRAINING: (
        *OPTIONS,
        many("vary", "Compare values, e.g. loader-workers=1,4,8", "NAME=VALUES"),
    ),
    "Where": (
        Option("backend", "Backend. [default: nccl with GPUs, else gloo]", "nccl|gloo"),
        flag("slurm", "Submit a job for each world size, with the options below."),
        Option("ranks_per_node", "With --slurm. [default: one per GPU, else 1]", "N", least=1),
        flag("resume", "Measure only what is missing in DIR."),
        flag("force", "Submit even if DIR has jobs already, with --slurm.", hidden=True),
        flag("dry_run", "Show what would be measured."),
    ),
} | {
    ("Ranks of a job" if panel == _TRAINING else panel): tuple(
        one._replace(hidden=one.name not in _COMMON) for one in group if one.name not in _LEFT_OUT
    )
    for panel, group in scriptoptions.PANELS.items()
}
"""The training that is measured, and the jobs of ``--slurm``."""
_PRICES = (
    many("out", "Write .md, .json or .svg", "FILE")._replace(short="-o"),
    flag("json", "Print JSON."),
    Option("samples", "Show time and cost of N samples. [default: 1000]", "N", least=1),
    Option("cluster", "For its prices. [default: measured]", "NAME", complete=complete_cluster),
    Option("price_per_gpu_hour", "Price of a GPU.", "NUMBER", hidden=True, least=0),
    Option("min_efficiency", "Exit with 1 if a world size is less efficient.", "NUMBER", least=0),
)
_COLLECTIVES = (
    Option("out", "Write .md or .json.", "FILE", short="-o"),
    flag("json", "Print JSON."),
    Option("world_size", "Number of ranks on this machine.", "N", default=2, least=2),
    Option("sizes", "Message sizes.", "SIZE,...", default=DEFAULT_SIZES),
    Option("collectives", "all, or e.g. all_reduce,all_gather.", "NAMES", default="all"),
    Option("iterations", "Measurements of each; the median is shown.", "N", default=20, least=1),
    Option("backend", "Backend. [default: nccl with GPUs, else gloo]", "nccl|gloo"),
)


def register(app: typer.Typer) -> None:
    group = Commands(
        help="""Measure how well training scales, and what it costs.

        Examples:
            hpctk scaling run -o scaling --world-sizes 1,2,4
            hpctk scaling analyze scaling
        """
    )
    add_table_command(group, run, PANELS, cls=ScriptCommand)
    add_table_command(group, analyze, {"Options": _PRICES})
    add_table_command(group, collectives, {"Options": _COLLECTIVES})
    app.add_typer(group, name="scaling", rich_help_panel=TRAIN)


def run(
    context: typer.Context,
    *,
    program: Annotated[
        list[str] | None, argument("[-- SCRIPT ARGS...]", "Your own training, for this machine.")
    ] = None,
    out: Annotated[Path, value("DIR", "Directory for records and logs.", "--out", "-o")],
    world_sizes: Annotated[str, value("N,N", "Numbers of ranks.")] = "1,2,4",
    **given: Any,
) -> None:
    """Measure a training at several world sizes, here or on Slurm.

    Prints DIR, or the job ids with --slurm. 'hpctk scaling analyze DIR' compares the results.
    After -- it measures your own training, which records its speed in three lines.

    Examples:
        hpctk scaling run -o scaling --world-sizes 1,2,4
        hpctk scaling run -o scaling --world-sizes 1,2 -- train.py --epochs 1
        hpctk scaling run -o scaling --world-sizes 4,8,16 --slurm --gpus-per-node 4
    """
    from hpc_toolkit.training.scaling.launches import ScalingRun
    from hpc_toolkit.training.scaling.records import DIRECTORY

    if program:
        sizes = parse_counts(world_sizes, "--world-sizes", most=_MOST_RANKS)
        _own(context, out.absolute(), program, sorted(sizes), given)
        return
    values = {name: given.pop(name) for name in by_name({"": OPTIONS})}
    wanted = ScalingRun(
        directory=out.absolute(),
        world_sizes=tuple(sorted(parse_counts(world_sizes, "--world-sizes", most=_MOST_RANKS))),
        settings=Settings(sample_cost_ms=sample_cost_ms(values.pop("sample_cost")), **values),
        variations=tuple(Variation.parse(text) for text in given.pop("vary") or ()),
    )
    wanted.check()
    given = only_given(given)
    dry_run, resume = given.pop("dry_run", False), given.pop("resume", False)
    if any((out / DIRECTORY).glob("*.jsonl")) and not resume:
        message = f"{out} already contains measurements"
        raise ConfigError(message, hint="--resume measures what is missing; or name another DIR")
    if not given.pop("slurm", False):
        _here(wanted, given, dry_run=dry_run)
        return
    force = given.pop("force", False)
    jobs = submissions(wanted, given, given.pop("ranks_per_node", None), dry_run=dry_run)
    if not dry_run:
        submit(wanted, jobs, force=force)


def _own(
    context: typer.Context,
    out: Path,
    program: list[str],
    world_sizes: list[int],
    given: dict[str, Any],
) -> None:
    """Measure a user's training on this machine."""
    from hpc_toolkit.training.scaling.launches import measure_own, prepare
    from hpc_toolkit.training.scaling.records import read_records

    allowed = {"program", "out", "world_sizes", "repeats", "weak", "threads", "backend"}
    refuse_given(context, {*allowed, "resume", "dry_run"}, "is for the built-in training")
    weak = given["weak"] if was_given(context, "weak") else None
    threads = given["threads"] or max(1, len(os.sched_getaffinity(0)) // max(world_sizes))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    records = read_records(out)
    words = program[2:] if program[0] == "-m" else program[1:]
    if given["resume"] and any(
        one["settings"].get("arguments") != shlex.join(words) for one in records
    ):
        message = f"{out} has measurements of another command"
        raise ConfigError(message, hint="give the same arguments, or name another DIR")
    known = {(one["world_size"], one["repeat"]) for one in records}
    if known and not given["resume"]:
        message = f"{out} already contains measurements"
        raise ConfigError(message, hint="--resume measures what is missing; or name another DIR")
    if not given["dry_run"]:
        prepare(out)
    # One repeat of all sizes after the other spreads the disturbance by other programs.
    for repeat in range(given["repeats"]):
        for size in world_sizes:
            if (size, repeat) in known:
                continue
            if given["dry_run"]:
                print(f"world size {size}, repeat {repeat}: {shlex.join(program)}")
                continue
            began = time.monotonic()
            measure_own(out, program, size, repeat, weak=weak, backend=given["backend"])
            spent = format_duration(time.monotonic() - began)
            print(f"world size {size}, repeat {repeat}: {spent}", file=sys.stderr)
    print(out)


def _here(run: ScalingRun, given: dict[str, Any], *, dry_run: bool) -> None:
    from hpc_toolkit.training.scaling.launches import launch_here, prepare, with_equal_threads

    backend = given.pop("backend", None)
    for name in given:
        message = f"{option(name)} is for jobs"
        raise ConfigError(message, hint="add --slurm, or leave it out")
    run = with_equal_threads(run)
    if dry_run:
        times = run.settings.repeats * len(cases(run.settings, run.variations))
        for size in run.world_sizes:
            print(f"world size {size}: {times} times {shlex.join(run.words())}")
        return
    prepare(run.directory)
    for size in run.world_sizes:
        began = time.monotonic()
        code = launch_here(run, size, backend=backend)
        if code:
            raise typer.Exit(code)
        print(f"world size {size}: {format_duration(time.monotonic() - began)}", file=sys.stderr)
    print(run.directory)


def submissions(
    run: ScalingRun, given: dict[str, Any], ranks_per_node: int | None, *, dry_run: bool
) -> dict[int, Submission]:
    """A job for each world size; with ``dry_run`` their scripts are printed."""
    from hpc_toolkit.submit.send import check_directory
    from hpc_toolkit.submit.submission import of_request
    from hpc_toolkit.training.scaling.launches import job_request
    from hpc_toolkit.training.scaling.program import cluster_name

    gpus, name = str(given.get("gpus_per_node") or ""), given.pop("job_name", None) or "scaling"
    count = gpus.rpartition(":")[2]
    per_node = ranks_per_node or (int(count) if count.isdecimal() and int(count) else 1)
    run = replace(run, cluster=cluster_name(given.get("cluster")))
    found = {}
    for size in run.world_sizes:
        template, asked = job_request(
            run, size, per_node, gpus=gpus, launch=given.get("launch") or None
        )
        spec, site, script = requested(template, {**given, **asked, "job_name": f"{name}-{size}"})
        check_directory(site, Path.cwd())
        found[size] = of_request(spec, site, template, run=None, cwd=Path.cwd())
        if dry_run:
            sys.stdout.write(script)
    return found


def submit(run: ScalingRun, jobs: dict[int, Submission], *, force: bool) -> None:
    """Send the jobs and print each id; where that breaks off, say what is in the queue."""
    from hpc_toolkit.submit.send import send
    from hpc_toolkit.training.scaling.launches import prepare, refuse_twice

    prepare(run.directory)
    if not force:
        refuse_twice(run.directory, run.world_sizes)
    left = list(jobs)
    try:
        for size, submission in jobs.items():
            for job in send(submission):
                print(job.job, flush=True)
            left.remove(size)
    except (HpcToolkitError, KeyboardInterrupt):
        if len(left) < len(jobs):
            sizes = ",".join(map(str, left))
            note(f"'--world-sizes {sizes}' submits the missing ones")
        raise


def analyze(
    *,
    source: Annotated[
        list[Path],
        argument(
            "SOURCE...",
            "Directory of 'scaling run' or of logs, or a .json, .csv, .jsonl or .log file.",
        ),
    ],
    **given: Any,
) -> None:
    """Compare world sizes by speed, efficiency and cost.

    Also fits a scaling law and recommends a world size, and a number of loader workers if several
    were measured (--vary loader-workers=0,1,2,4).

    Examples:
        hpctk scaling analyze scaling
        hpctk scaling analyze scaling --cluster killarney -o scaling.md -o scaling.svg
    """
    from hpc_toolkit.training.scaling.comparison import FAIR, compare, judge
    from hpc_toolkit.training.scaling.loaders import advise_loaders
    from hpc_toolkit.training.scaling.page import as_data, as_markdown, scaling_svg
    from hpc_toolkit.training.scaling.records import read_source
    from hpc_toolkit.training.scaling.series import of_samples, priced

    out, as_json = outputs(given.pop("out"), (".md", ".json", ".svg")), given.pop("json")
    min_efficiency = given.pop("min_efficiency")
    minimum = FAIR if min_efficiency is None else min_efficiency
    judged: list[Judged] = []
    notes: list[str] = []
    samples = given.pop("samples")
    loaders: list[LoaderAdvice] = []
    for path in source:
        found, left_out = read_source(path)
        notes += left_out
        loaders += advise_loaders(found)
        compared = [compare(priced(of_samples(one, samples), **given)) for one in found]
        judged += [(one, judge(one, minimum)) for one in compared]
    data = json.dumps(as_data(judged, notes, loaders), allow_nan=False) + "\n"
    page = as_markdown(judged, notes, loaders)
    sys.stdout.write(data if as_json else printable_lines(page))
    forms = {
        ".json": lambda: data,
        ".md": lambda: page,
        ".svg": lambda: scaling_svg([one for one, _ in judged], minimum),
    }
    write_outputs(out, forms)
    if min_efficiency is not None and any(verdict.below for _, verdict in judged):
        raise typer.Exit(1)


def collectives(
    context: typer.Context,
    *,
    logs: Annotated[
        list[Path] | None, argument("[LOG]...", "Print the measurements in these logs.")
    ] = None,
    **given: Any,
) -> None:
    """Measure the bandwidth of collectives over message sizes.

    Bus bandwidths are computed as in nccl-tests.

    Examples:
        hpctk scaling collectives --world-size 4 --collectives all_reduce
    """
    from hpc_toolkit.training.scaling.collectives import as_markdown, records_in
    from hpc_toolkit.training.scaling.records import read_text

    as_json, out = given.pop("json"), given.pop("out")
    files = outputs([out] if out is not None else [], (".md", ".json"))
    if logs:
        refuse_given(context, {"logs", "out", "json"}, "cannot be combined with LOGS")
        found = [one for path in logs for one in records_in(read_text(path))]
    else:
        found = _timed(**given)
    if not found:
        message = "no collective was measured"
        raise RunError(message, hint="name logs of 'hpctk scaling collectives'" if logs else "")
    data = json.dumps({"format": 1, "kind": "hpctk.collectives", "rows": found}) + "\n"
    page = as_markdown(found)
    sys.stdout.write(data if as_json else page)
    write_outputs(files, {".md": lambda: page, ".json": lambda: data})


def _timed(
    *, world_size: int, iterations: int, sizes: str, collectives: str, backend: str | None
) -> list[dict[str, Any]]:
    import tempfile

    from hpc_toolkit.training.scaling.collectives import (
        MODULE,
        parse_collectives,
        parse_sizes,
        records_in,
    )
    from hpc_toolkit.training.scaling.launches import launch_module
    from hpc_toolkit.training.scaling.records import read_text

    parse_sizes(sizes)
    parse_collectives(collectives)
    words = ("--sizes", sizes, "--collectives", collectives, "--iterations", str(iterations))
    directory = Path(tempfile.mkdtemp(prefix="hpctk-collectives-"))
    try:
        launch_module(MODULE, words, world_size, directory, backend=backend)
    except HpcToolkitError:
        # The error names a log in it, unless no rank was started.
        with suppress(OSError):
            directory.rmdir()
        raise
    outputs = sorted(directory.glob("logs/*/rank-0.*.out"))
    found = [one for path in outputs for one in records_in(read_text(path))]
    shutil.rmtree(directory, ignore_errors=True)
    return found
