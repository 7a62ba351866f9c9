"""``hpctk scaling``: measure a training here or by Slurm jobs, and show what scaling costs."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from hpc_toolkit.cli import scriptoptions
from hpc_toolkit.cli.arguments import argument, complete_cluster, refuse_given, value
from hpc_toolkit.cli.help import TRAIN, Commands
from hpc_toolkit.cli.scriptoptions import ScriptCommand, requested
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.slurm.render.spec import option
from hpc_toolkit.system.options import Option, Panels, flag, only_given
from hpc_toolkit.system.quantities import format_duration, parse_counts
from hpc_toolkit.system.terminal import note, printable_lines

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
_TABLE = (
    flag("json", "Print JSON."),
    Option("samples", "Show time and cost of N samples. [default: 1000]", "N", least=1),
    Option("price_per_gpu_hour", "Price of a GPU.", "NUMBER", least=0),
    Option("min_efficiency", "Exit with 1 if a world size is less efficient.", "NUMBER", least=0),
)
"""Options of the results table, of ``run`` and ``analyze``."""
PANELS: Panels = {
    "Table": _TABLE,
    "Where": (
        Option("repeats", "Measurements of each world size.", "N", default=3, least=1),
        Option("backend", "Backend. [default: nccl with GPUs, else gloo]", "nccl|gloo"),
        flag("slurm", "Submit a job for each world size, with the options below."),
        Option("ranks_per_node", "Ranks of a node. [default: one per GPU, else 1]", "N", least=1),
        flag("resume", "Measure only what is missing in DIR."),
        flag("force", "Submit even if DIR has jobs already, with --slurm.", hidden=True),
        flag("dry_run", "Show what would be measured."),
    ),
} | {
    ("Ranks of a job" if panel == "Training" else panel): tuple(
        one._replace(hidden=one.name not in _COMMON) for one in group if one.name not in _LEFT_OUT
    )
    for panel, group in scriptoptions.PANELS.items()
}
"""The table, the ranks, and the jobs of ``--slurm``."""
_ANALYSIS = (
    Option("cluster", "For its prices. [default: measured]", "NAME", complete=complete_cluster),
    *_TABLE,
)


def register(app: Commands) -> None:
    group = Commands(
        "scaling",
        panel=TRAIN,
        help="""Measure how well training scales, and what it costs.

        Examples:
            hpctk scaling run -o scaling --world-sizes 1,2,4 -- train.py
            hpctk scaling analyze scaling
        """,
    )
    group.add(run, PANELS, cls=ScriptCommand)
    group.add(analyze, {"Options": _ANALYSIS})
    app.add_command(group)


def run(
    *,
    program: Annotated[list[str], argument("-- SCRIPT [ARGS]...", "Your training.")],
    out: Annotated[Path, value("DIR", "Directory for records and logs.", "--out", "-o")],
    world_sizes: Annotated[str, value("N,N", "Numbers of ranks.")] = "1,2,4",
    **given: Any,
) -> None:
    """Measure your training at several world sizes, here or on Slurm, and compare them.

    The training records its speed in three lines (hpc_toolkit.training.scaling.recorder). Prints
    the table of 'hpctk scaling analyze DIR', or with --slurm the job ids.

    Examples:
        hpctk scaling run -o scaling --world-sizes 1,2 -- train.py --epochs 1
        hpctk scaling run -o scaling --slurm --gpus-per-node 4 -- train.py
    """
    from hpc_toolkit.training.scaling.records import read_records

    sizes = tuple(sorted(parse_counts(world_sizes, "--world-sizes", most=999_999)))
    table = {one.name: given.pop(one.name) for one in _TABLE}
    slurm, dry_run, resume = (bool(given.pop(name)) for name in ("slurm", "dry_run", "resume"))
    repeats = given.pop("repeats")
    for name in only_given(table) if slurm else ():
        message = f"{option(name)} is for a table, which jobs have not measured yet"
        hint = "give it to 'hpctk scaling analyze DIR' when they have ended; here leave it out"
        raise ConfigError(message, hint=hint)
    if not slurm:
        here = {"program", "out", "world_sizes", "repeats", "backend", "cluster", *table}
        refuse_given({*here, "resume", "dry_run"}, "is for jobs: add --slurm, or")
    directory = out.absolute()
    records = read_records(directory)
    missing = _unmeasured(directory, program, sizes, repeats, records)
    if records and not resume:
        message = f"{directory} already contains measurements"
        hint = "--resume measures what is missing; or name another DIR"
        raise ConfigError(message, hint=hint)
    given = only_given(given)
    if slurm:
        _submit(directory, program, missing, given, dry_run=dry_run)
        return
    if dry_run:
        for size, repeat in missing:
            print(f"world size {size}, repeat {repeat}: {shlex.join(program)}")
        return
    # Otherwise one rank would compute with all CPUs of this machine and two with half of them
    # each, which does not measure scaling.
    threads = max(1, len(os.sched_getaffinity(0)) // max(sizes))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    _measure(directory, program, missing, given, table)


def _unmeasured(
    out: Path,
    program: list[str],
    world_sizes: tuple[int, ...],
    repeats: int,
    records: list[dict[str, Any]],
) -> list[tuple[int, int]]:
    """Return the world sizes and repeats that have no record yet."""
    words = shlex.join(program[2:] if program[0] == "-m" else program[1:])
    if any(one["settings"].get("arguments") != words for one in records):
        message = f"{out} has measurements of another command"
        raise ConfigError(message, hint="give the same arguments, or name another DIR")
    known = {(one["world_size"], one["repeat"]) for one in records}
    # One repeat of all sizes after the other spreads the disturbance by other programs.
    pairs = ((size, repeat) for repeat in range(repeats) for size in world_sizes)
    return [pair for pair in pairs if pair not in known]


def _measure(
    out: Path,
    program: list[str],
    missing: list[tuple[int, int]],
    given: dict[str, Any],
    table: dict[str, Any],
) -> None:
    """Measure on this machine, and print the table."""
    from hpc_toolkit.slurm.clusters.facts import load_cluster
    from hpc_toolkit.training.scaling.launches import measure_own, prepare

    cluster = given.get("cluster")
    if cluster is not None:
        load_cluster(cluster)  # a wrong one is refused before an hour of measurements
    prepare(out)
    for size, repeat in missing:
        began = time.monotonic()
        measure_own(out, program, size, repeat, backend=given.get("backend"))
        spent = format_duration(time.monotonic() - began)
        print(f"world size {size}, repeat {repeat}: {spent}", file=sys.stderr)
    note(f"'hpctk scaling analyze {shlex.quote(os.path.relpath(out))}' prints this table again")
    _show([out], table, cluster)


def _submit(
    directory: Path,
    program: list[str],
    missing: list[tuple[int, int]],
    given: dict[str, Any],
    *,
    dry_run: bool,
) -> None:
    """Send the jobs and print their ids; with ``dry_run`` print their scripts.

    If sending fails between two jobs, a note names the missing ones.
    """
    from hpc_toolkit.submit.send import check_directory, send
    from hpc_toolkit.submit.submission import of_request
    from hpc_toolkit.training.scaling import launches

    force, cluster = given.pop("force", False), launches.cluster_name(given.get("cluster"))
    gpus, name = str(given.get("gpus_per_node") or ""), given.pop("job_name", None) or "scaling"
    count = gpus.rpartition(":")[2]
    per_node = given.pop("ranks_per_node", None)
    per_node = per_node or (int(count) if count.isdecimal() and int(count) else 1)
    found = []
    for job in launches.own_jobs(directory, missing, cluster=cluster):
        launch = given.get("launch") or None
        size = job.world_size
        template, asked = launches.job_request(directory, size, per_node, gpus=gpus, launch=launch)
        env = (*given.get("env", ()), *job.env)
        own = {"command": tuple(program), "env": env, "job_name": f"{name}-{job.name}"}
        spec, site, script = requested(template, {**given, **asked, **own})
        check_directory(site, Path.cwd())
        found.append((size, of_request(spec, site, template, run=None, cwd=Path.cwd())))
        if dry_run:
            sys.stdout.write(script)
    if dry_run:
        return
    launches.prepare(directory)
    left = [size for size, _ in found]
    if not force:
        launches.refuse_twice(directory, left)
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


def analyze(
    *,
    source: Annotated[
        list[Path],
        argument(
            "SOURCE...",
            "Directory of 'scaling run' or of logs, or a .jsonl or .log file; - is stdin.",
        ),
    ],
    **given: Any,
) -> None:
    """Compare world sizes by speed, efficiency and cost.

    Also recommends a world size. If there are several trainings, the first table compares them.

    Examples:
        hpctk scaling analyze scaling
        hpctk scaling analyze scaling --cluster killarney > scaling.md
    """
    _show(source, given, given.pop("cluster"))


def _show(sources: Sequence[Path], table: dict[str, Any], cluster: str | None) -> None:
    """Print the table of the sources; exit with 1 if an efficiency is below the wanted one."""
    from hpc_toolkit.training.scaling.analysis import analyze

    wanted = {name: value for name, value in table.items() if name != "json"}
    found = analyze(sources, cluster=cluster, **wanted)
    sys.stdout.write(found.as_json() if table["json"] else printable_lines(found.as_markdown()))
    sys.stdout.flush()
    if table["min_efficiency"] is not None and any(verdict.below for _, verdict in found.judged):
        sys.exit(1)
