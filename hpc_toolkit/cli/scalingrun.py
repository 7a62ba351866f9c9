"""The command that measures a training at several world sizes, here or through Slurm."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_toolkit.cli import scriptoptions
from hpc_toolkit.cli.scriptoptions import requested
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.system.options import Option, Panels, by_name, flag, many, only_given
from hpc_toolkit.training.scaling.settings import (
    Settings,
    Variation,
    parse_world_sizes,
    sample_cost_ms,
)

if TYPE_CHECKING:
    from hpc_toolkit.submit.submission import Submission
    from hpc_toolkit.training.scaling.launches import ScalingRun

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


_DEFAULTS = Settings()


def _setting(name: str, help_text: str, metavar: str = "N", *, hidden: bool = False) -> Option:
    """The option of a field of Settings."""
    default = getattr(_DEFAULTS, name.partition("/")[0])
    return Option(name, help_text, metavar, default=default, hidden=hidden)


_SETTINGS: Panels = {
    _TRAINING: (
        _setting("batch_size", "Samples per forward pass, of all ranks together."),
        _setting("weak/strong", "Use --batch-size samples per rank (weak) or in all (strong).", ""),
        _setting("seq_length", "Tokens per sample."),
        _setting("max_steps", "Measured steps."),
        _setting("warmup", "Steps before the measured ones."),
        _setting("repeats", "Measurements of each case."),
        _setting("model", "decoder-LAYERSxWIDTH or a model of transformers.", "NAME"),
        _setting("lora_rank", "Train only adapters of this rank.", hidden=True),
        _setting("precision", "float32 or bf16.", "NAME"),
        _setting("accumulate", "Forward passes per step.", hidden=True),
        _setting("loader_workers", "Data loader processes per rank.", hidden=True),
        _setting("bucket_cap_mb", "Size of a gradient bucket, in MiB.", hidden=True),
        Option("sample_cost", "CPU time of a sample.", "DURATION", default="0", hidden=True),
        _setting("threads", "Threads per rank; 0: its share of the CPUs.", hidden=True),
    )
}
"""Every field of Settings."""
PANELS: Panels = {
    _TRAINING: (
        *_SETTINGS[_TRAINING],
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


def run(
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Directory for records and logs.")
    ],
    world_sizes: Annotated[str, typer.Option(metavar="N,N", help="Numbers of ranks.")] = "1,2,4",
    **given: Any,
) -> None:
    """Measure a training at several world sizes, here or on Slurm.

    Prints DIR, or the job ids with --slurm. 'hpctk scaling analyze DIR' compares the results.

    Examples:
        hpctk scaling run -o scaling --world-sizes 1,2,4
        hpctk scaling run -o scaling --world-sizes 4,8,16 --slurm --gpus-per-node 4
    """
    from hpc_toolkit.training.scaling.launches import ScalingRun

    values = {name: given.pop(name) for name in by_name(_SETTINGS)}
    settings = Settings(sample_cost_ms=sample_cost_ms(values.pop("sample_cost")), **values)
    variations = tuple(Variation.parse(text) for text in given.pop("vary") or ())
    wanted = ScalingRun(
        directory=out.absolute(),
        world_sizes=parse_world_sizes(world_sizes),
        settings=settings,
        variations=variations,
    )
    wanted.check()
    given = only_given(given)
    dry_run = given.pop("dry_run", False)
    _check_directory(out, resume=given.pop("resume", False))
    if not given.pop("slurm", False):
        _here(wanted, given, dry_run=dry_run)
        return
    force = given.pop("force", False)
    jobs = submissions(wanted, given, given.pop("ranks_per_node", None), dry_run=dry_run)
    if not dry_run:
        submit(wanted, jobs, force=force)


def _check_directory(out: Path, *, resume: bool) -> None:
    from hpc_toolkit.training.scaling.records import DIRECTORY

    if any((out / DIRECTORY).glob("*.jsonl")) and not resume:
        message = f"{out} holds measurements"
        raise ConfigError(message, hint="--resume measures what is missing; or name another DIR")


def _here(run: ScalingRun, given: dict[str, Any], *, dry_run: bool) -> None:
    from hpc_toolkit.slurm.render.rules import option
    from hpc_toolkit.training.scaling.launches import prepare, with_equal_threads

    backend = given.pop("backend", None)
    for name in given:
        message = f"{option(name)} is for jobs"
        raise ConfigError(message, hint="add --slurm, or leave it out")
    run = with_equal_threads(run)
    if dry_run:
        for size in run.world_sizes:
            print(f"world size {size}: {run.measurements()} times {shlex.join(run.words())}")
        return
    prepare(run.directory)
    for size in run.world_sizes:
        _launch(run, size, backend)
    print(run.directory)


def _launch(run: ScalingRun, size: int, backend: str | None) -> None:
    import time

    from hpc_toolkit.system.quantities import format_duration
    from hpc_toolkit.training.scaling.launches import launch_here

    began = time.monotonic()
    code = launch_here(run, size, backend=backend)
    if code:
        raise typer.Exit(code)
    took = format_duration(time.monotonic() - began)
    print(f"world size {size}: {took}", file=sys.stderr)


def submissions(
    run: ScalingRun, given: dict[str, Any], ranks_per_node: int | None, *, dry_run: bool
) -> dict[int, Submission]:
    """A job for each world size; with ``dry_run`` their scripts are printed."""
    from hpc_toolkit.submit.send import check_directory
    from hpc_toolkit.submit.submission import of_request
    from hpc_toolkit.training.scaling.launches import job_name, job_request

    gpus, name = str(given.get("gpus_per_node") or ""), given.pop("job_name", None)
    count = gpus.rpartition(":")[2]
    per_node = ranks_per_node or (int(count) if count.isdecimal() and int(count) else 1)
    run = replace(run, cluster=_cluster(given.get("cluster")))
    found = {}
    for size in run.world_sizes:
        template, asked = job_request(
            run, size, per_node, gpus=gpus, launch=given.get("launch") or None
        )
        values = {**given, **asked, "job_name": job_name(name, size)}
        spec, site, script = requested(template, values)
        check_directory(site, Path.cwd())
        found[size] = of_request(spec, site, template, run=None, cwd=Path.cwd())
        if dry_run:
            sys.stdout.write(script)
    return found


def _cluster(given: str | None) -> str:
    """What records shall call the cluster of the jobs; "" for one of which nothing is known."""
    from hpc_toolkit.slurm.clusters.choice import FALLBACK, resolve_cluster

    site = resolve_cluster(given).cluster
    if site.name == FALLBACK:
        return ""
    named = site.argument or site.name
    return os.path.abspath(named) if "/" in named or named.endswith(".toml") else named


def submit(run: ScalingRun, jobs: dict[int, Submission], *, force: bool) -> None:
    """Send the jobs and print each id; where that breaks off, say what is in the queue."""
    from hpc_toolkit.rundir.layout import RunPaths
    from hpc_toolkit.submit.jobs import record_job
    from hpc_toolkit.submit.send import send
    from hpc_toolkit.training.scaling.launches import prepare, refuse_twice

    prepare(run.directory)
    if not force:
        refuse_twice(run.directory, run.world_sizes)
    left = list(jobs)
    try:
        for size, submission in jobs.items():
            for job in send(submission):
                record_job(RunPaths(run.directory), job)
                print(job.job, flush=True)
            left.remove(size)
    except (HpcToolkitError, KeyboardInterrupt):
        if len(left) < len(jobs):
            sizes = ",".join(map(str, left))
            print(f"note: '--world-sizes {sizes}' sends what is missing", file=sys.stderr)
        raise
