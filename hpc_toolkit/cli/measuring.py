"""``hpctk scaling run`` on this machine, and its Slurm jobs."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_toolkit.cli.arguments import refuse_given
from hpc_toolkit.cli.scriptoptions import requested
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.slurm.render.spec import option
from hpc_toolkit.system.quantities import format_duration
from hpc_toolkit.system.terminal import note, printable_lines
from hpc_toolkit.training.scaling.settings import OPTIONS, cases

if TYPE_CHECKING:
    from hpc_toolkit.training.scaling.launches import Job, ScalingRun


def refuse_built_in(table: dict[str, Any], *, slurm: bool) -> None:
    """Refuse options of the built-in training where a user's own is measured."""
    names = {one.name or "" for one in click.get_current_context().command.params}
    foreign = {one.name.partition("/")[0] for one in OPTIONS} | {"vary"}
    of_here = {"program", "out", "world_sizes", "backend", "cluster", "resume", "dry_run", *table}
    allowed = names - foreign if slurm else {*of_here, "threads"}
    refuse_given({*allowed, "repeats"}, "is for the built-in training")


def unmeasured(
    out: Path,
    program: list[str],
    world_sizes: tuple[int, ...],
    repeats: int,
    records: list[dict[str, Any]],
) -> list[tuple[int, int]]:
    """Return the world sizes and repeats of a user's training that have no record yet."""
    words = shlex.join(program[2:] if program[0] == "-m" else program[1:])
    if any(one["settings"].get("arguments") != words for one in records):
        message = f"{out} has measurements of another command"
        raise ConfigError(message, hint="give the same arguments, or name another DIR")
    known = {(one["world_size"], one["repeat"]) for one in records}
    # One repeat of all sizes after the other spreads the disturbance by other programs.
    pairs = ((size, repeat) for repeat in range(repeats) for size in world_sizes)
    return [pair for pair in pairs if pair not in known]


def own_here(
    out: Path,
    program: list[str],
    missing: list[tuple[int, int]],
    given: dict[str, Any],
    table: dict[str, Any],
    *,
    dry_run: bool,
) -> None:
    """Measure a user's training on this machine."""
    from hpc_toolkit.training.scaling.launches import measure_own, prepare

    if dry_run:
        for size, repeat in missing:
            print(f"world size {size}, repeat {repeat}: {shlex.join(program)}")
        return
    cluster = given.get("cluster")
    _check_cluster(cluster)
    prepare(out)
    for size, repeat in missing:
        began = time.monotonic()
        measure_own(out, program, size, repeat, backend=given.get("backend"))
        spent = format_duration(time.monotonic() - began)
        print(f"world size {size}, repeat {repeat}: {spent}", file=sys.stderr)
    _finish(out, table, cluster)


def here(run: ScalingRun, given: dict[str, Any], table: dict[str, Any], *, dry_run: bool) -> None:
    """Measure with ranks on this machine."""
    from hpc_toolkit.training.scaling.launches import launch_program, prepare

    backend, cluster = given.pop("backend", None), given.pop("cluster", None)
    for name in given:
        raise ConfigError(f"{option(name)} is for jobs", hint="add --slurm, or leave it out")
    if not run.settings.threads:
        # Otherwise one rank would compute with all CPUs of this machine and two with half of them
        # each, which does not measure scaling.
        threads = max(1, len(os.sched_getaffinity(0)) // max(run.world_sizes))
        run = replace(run, settings=replace(run.settings, threads=threads))
    if dry_run:
        times = run.settings.repeats * len(cases(run.settings, run.variations))
        for size in run.world_sizes:
            print(f"world size {size}: {times} times {shlex.join(run.words())}")
        return
    _check_cluster(cluster)
    prepare(run.directory)
    for size in run.world_sizes:
        began = time.monotonic()
        ranks = {"nproc_per_node": size}
        code = launch_program(run.program(), ranks, run.directory, backend=backend)
        if code:
            sys.exit(code)
        print(f"world size {size}: {format_duration(time.monotonic() - began)}", file=sys.stderr)
    _finish(run.directory, table, cluster)


def _check_cluster(name: str | None) -> None:
    """Raise ConfigError for a wrong cluster before anything is measured, which may take an hour."""
    from hpc_toolkit.slurm.clusters.facts import load_cluster

    if name is not None:
        load_cluster(name)


def _finish(directory: Path, table: dict[str, Any], cluster: str | None) -> None:
    """Print the table of a run that has ended, and where its measurements are."""
    where = shlex.quote(os.path.relpath(directory))
    note(f"'hpctk scaling analyze {where}' prints this table again")
    show_analysis([directory], table, cluster)


def show_analysis(sources: Sequence[Path], table: dict[str, Any], cluster: str | None) -> None:
    """Print the table of the sources; exit with 1 if an efficiency is below the wanted one."""
    from hpc_toolkit.training.scaling.analysis import analyze

    wanted = {name: value for name, value in table.items() if name != "json"}
    found = analyze(sources, cluster=cluster, **wanted)
    sys.stdout.write(found.as_json() if table["json"] else printable_lines(found.as_markdown()))
    sys.stdout.flush()
    if table["min_efficiency"] is not None and any(verdict.below for _, verdict in found.judged):
        sys.exit(1)


def submit(
    directory: Path, jobs: Sequence[Job], given: dict[str, Any], *, dry_run: bool, force: bool
) -> None:
    """Send the jobs and print their ids; with ``dry_run`` print their scripts.

    If sending fails between two jobs, a note names the missing ones.
    """
    from hpc_toolkit.submit.send import check_directory, send
    from hpc_toolkit.submit.submission import of_request
    from hpc_toolkit.training.scaling.launches import job_request, prepare, refuse_twice

    gpus, name = str(given.get("gpus_per_node") or ""), given.pop("job_name", None) or "scaling"
    count = gpus.rpartition(":")[2]
    per_node = given.pop("ranks_per_node", None)
    per_node = per_node or (int(count) if count.isdecimal() and int(count) else 1)
    found = []
    for job in jobs:
        launch = given.get("launch") or None
        template, asked = job_request(directory, job, per_node, gpus=gpus, launch=launch)
        env = (*given.get("env", ()), *job.env)
        values = {**given, **asked, "env": env, "job_name": f"{name}-{job.name}"}
        spec, site, script = requested(template, values)
        check_directory(site, Path.cwd())
        made = of_request(spec, site, template, run=None, cwd=Path.cwd())
        found.append((job.world_size, made))
        if dry_run:
            sys.stdout.write(script)
    if dry_run:
        return
    prepare(directory)
    left = [size for size, _ in found]
    if not force:
        refuse_twice(directory, left)
    try:
        for _, submission in found:
            for sent in send(submission):
                print(sent.job, flush=True)
            left = left[1:]
    except (HpcToolkitError, KeyboardInterrupt):
        if len(left) < len(found):
            sizes = ",".join(map(str, dict.fromkeys(left)))
            note(f"'--world-sizes {sizes}' submits the missing ones")
        raise
