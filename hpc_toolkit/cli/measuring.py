"""``hpctk scaling run`` on this machine, alone or among several hosts, and its Slurm jobs."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_toolkit.cli.arguments import refuse_given
from hpc_toolkit.cli.scriptoptions import requested
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.slurm.render.spec import option
from hpc_toolkit.system.options import Option, only_given
from hpc_toolkit.system.quantities import format_duration, parse_duration
from hpc_toolkit.system.terminal import note, printable_lines
from hpc_toolkit.training.scaling.settings import OPTIONS, cases

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.submit.submission import Submission
    from hpc_toolkit.training.scaling.launches import Host, Job, ScalingRun

HOSTS = (
    Option("node_rank", "Number of this host. [default: no other hosts]", "N", least=0),
    Option("master_addr", "Address of host 0.", "HOST"),
    Option("master_port", "First port of host 0. [default: 29500]", "N", least=1),
    Option("start_timeout", "Time to wait for all hosts. [default: 10m]", "DURATION"),
)
"""Options for several hosts without Slurm, each of which runs the same command."""


def not_empty(directory: Path) -> ConfigError:
    message = f"{directory} already contains measurements"
    return ConfigError(message, hint="--resume measures what is missing; or name another DIR")


def own(
    out: Path,
    program: list[str],
    world_sizes: tuple[int, ...],
    given: dict[str, Any],
    table: dict[str, Any],
) -> None:
    """Measure a user's training on this machine, or submit its jobs."""
    from hpc_toolkit.training.scaling.records import read_records

    names = {one.name or "" for one in click.get_current_context().command.params}
    foreign = {one.name.partition("/")[0] for one in (*OPTIONS, *HOSTS)} | {"vary"}
    of_here = {"backend", "cluster", "resume", "dry_run", "threads", *table}
    allowed = names - foreign if given["slurm"] else {"program", "out", "world_sizes", *of_here}
    refuse_given({*allowed, "repeats"}, "is for the built-in training")
    records = read_records(out)
    words = program[2:] if program[0] == "-m" else program[1:]
    if given["resume"] and any(
        one["settings"].get("arguments") != shlex.join(words) for one in records
    ):
        message = f"{out} has measurements of another command"
        raise ConfigError(message, hint="give the same arguments, or name another DIR")
    known = {(one["world_size"], one["repeat"]) for one in records}
    if known and not given["resume"]:
        raise not_empty(out)
    # One repeat of all sizes after the other spreads the disturbance by other programs.
    pairs = ((size, repeat) for repeat in range(given["repeats"]) for size in world_sizes)
    missing = [pair for pair in pairs if pair not in known]
    if given["slurm"]:
        submit_own(out, program, missing, given)
    else:
        given["threads"] = given["threads"] or len(os.sched_getaffinity(0)) // max(world_sizes)
        _own_here(out, program, missing, given, table)


def _own_here(
    out: Path,
    program: list[str],
    missing: list[tuple[int, int]],
    given: dict[str, Any],
    table: dict[str, Any],
) -> None:
    from hpc_toolkit.training.scaling.launches import measure_own, prepare

    if given["dry_run"]:
        for size, repeat in missing:
            print(f"world size {size}, repeat {repeat}: {shlex.join(program)}")
        return
    _check_cluster(given["cluster"])
    os.environ["OMP_NUM_THREADS"] = str(max(1, given["threads"]))
    prepare(out)
    for size, repeat in missing:
        began = time.monotonic()
        measure_own(out, program, size, repeat, backend=given["backend"])
        spent = format_duration(time.monotonic() - began)
        print(f"world size {size}, repeat {repeat}: {spent}", file=sys.stderr)
    _finish(out, table, given["cluster"])


def _host(given: dict[str, Any]) -> Host | None:
    """Take the options of several hosts out of ``given``; None if this machine measures alone."""
    from hpc_toolkit.training.scaling.launches import Host

    values = {one.name: given.pop(one.name, None) for one in HOSTS}
    asked = [name for name, value in values.items() if value is not None]
    if not asked:
        return None
    for name in ("node_rank", "master_addr"):
        if values[name] is None:
            message = f"{option(asked[0])}: {option(name)} is missing"
            raise ConfigError(message, hint="run the same command on each host, with both options")
    timeout = values["start_timeout"] or "10m"
    return Host(
        number=values["node_rank"],
        address=values["master_addr"],
        port=values["master_port"] or 29500,
        ranks=given.pop("ranks_per_node", None) or 1,
        start_timeout_s=parse_duration(timeout, where="--start-timeout"),
    )


def here(
    run: ScalingRun,
    given: dict[str, Any],
    table: dict[str, Any],
    *,
    dry_run: bool,
    show_records: bool,
) -> None:
    """Measure with ranks on this machine, or with this host's ranks among those of several."""
    from hpc_toolkit.training.scaling.launches import (
        launch_program,
        launches_of,
        prepare,
        with_equal_threads,
    )
    from hpc_toolkit.training.scaling.records import DIRECTORY

    backend, cluster, host = given.pop("backend", None), given.pop("cluster", None), _host(given)
    for name in given:
        raise ConfigError(f"{option(name)} is for jobs", hint="add --slurm, or leave it out")
    run = with_equal_threads(run) if host is None else run
    launches = list(launches_of(run.world_sizes, host))
    if dry_run:
        times = run.settings.repeats * len(cases(run.settings, run.variations))
        for size, _ in launches:
            print(f"world size {size}: {times} times {shlex.join(run.words())}")
        return
    _check_cluster(cluster)
    prepare(run.directory)
    main = host is None or not host.number
    for size, options in launches:
        began = time.monotonic()
        code = launch_program(run.program(), options, run.directory, backend=backend)
        if code:
            sys.exit(code)
        print(f"world size {size}: {format_duration(time.monotonic() - began)}", file=sys.stderr)
        if main:
            _show_measured(run.directory / DIRECTORY / f"world-{size}.jsonl", show_records)
    if main:
        _finish(run.directory, table, cluster, kept=not show_records)


def _show_measured(path: Path, show_records: bool) -> None:
    """Print the parameters of the measured models, and if wanted the records."""
    from hpc_toolkit.training.scaling.records import parameters_text, read_text, records_in

    text = read_text(path)
    for line in dict.fromkeys(map(parameters_text, records_in(text, str(path)))):
        print(f"  {line}", file=sys.stderr)
    if show_records:
        sys.stdout.write(text)
        sys.stdout.flush()


def _check_cluster(name: str | None) -> None:
    """Raise ConfigError for a wrong cluster before anything is measured, which may take an hour."""
    from hpc_toolkit.slurm.clusters.facts import load_cluster

    if name is not None:
        load_cluster(name)


def _finish(
    directory: Path, table: dict[str, Any], cluster: str | None, *, kept: bool = True
) -> None:
    """Print the table of a run that has ended, and where its measurements are."""
    if kept:
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


def submit_own(
    out: Path, program: list[str], missing: list[tuple[int, int]], given: dict[str, Any]
) -> None:
    """Submit the jobs of a user's training for the missing world sizes and repeats."""
    from hpc_toolkit.training.scaling.launches import own_jobs
    from hpc_toolkit.training.scaling.program import cluster_name

    built_in = {one.name.partition("/")[0] for one in OPTIONS}
    options = only_given({key: value for key, value in given.items() if key not in built_in})
    for name in ("slurm", "resume"):
        options.pop(name, None)
    dry_run, force = options.pop("dry_run", False), options.pop("force", False)
    jobs = own_jobs(out, program, missing, cluster=cluster_name(options.get("cluster")))
    found = submissions(out, jobs, options, dry_run=dry_run)
    if not dry_run:
        submit(out, found, force=force)


def submissions(
    directory: Path, jobs: Sequence[Job], given: dict[str, Any], *, dry_run: bool
) -> list[tuple[int, Submission]]:
    """Return each job with its world size; with ``dry_run`` the scripts are printed."""
    from hpc_toolkit.submit.send import check_directory
    from hpc_toolkit.submit.submission import of_request
    from hpc_toolkit.training.scaling.launches import job_request

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
    return found


def submit(directory: Path, jobs: Sequence[tuple[int, Submission]], *, force: bool) -> None:
    """Send the jobs and print each id; where that breaks off, say what is in the queue."""
    from hpc_toolkit.submit.send import send
    from hpc_toolkit.training.scaling.launches import prepare, refuse_twice

    prepare(directory)
    if not force:
        refuse_twice(directory, [size for size, _ in jobs])
    left = [size for size, _ in jobs]
    try:
        for _, submission in jobs:
            for job in send(submission):
                print(job.job, flush=True)
            left = left[1:]
    except (HpcToolkitError, KeyboardInterrupt):
        if len(left) < len(jobs):
            sizes = ",".join(map(str, dict.fromkeys(left)))
            note(f"'--world-sizes {sizes}' submits the missing ones")
        raise
