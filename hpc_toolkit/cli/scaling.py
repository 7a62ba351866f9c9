"""``hpctk scaling``: measure a training, and show what scaling costs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from hpc_toolkit.cli import measuring, scriptoptions
from hpc_toolkit.cli.arguments import argument, complete_cluster, value
from hpc_toolkit.cli.help import TRAIN, Commands
from hpc_toolkit.cli.scriptoptions import ScriptCommand
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.render.spec import option
from hpc_toolkit.system.options import Option, Panels, by_name, flag, many, only_given
from hpc_toolkit.system.quantities import parse_counts
from hpc_toolkit.training.scaling.settings import (
    OPTIONS,
    Settings,
    Variation,
    sample_cost_ms,
)

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
_TABLE = (
    flag("json", "Print JSON."),
    Option("samples", "Show time and cost of N samples. [default: 1000]", "N", least=1),
    Option("price_per_gpu_hour", "Price of a GPU.", "NUMBER", least=0),
    Option("min_efficiency", "Exit with 1 if a world size is less efficient.", "NUMBER", least=0),
)
"""Options of the results table, of ``run`` and ``analyze``."""
PANELS: Panels = {
    _TRAINING: (*OPTIONS, many("vary", "Compare values, e.g. loader-workers=1,4,8", "NAME=VALUES")),
    "Table": _TABLE,
    "Where": (
        Option("backend", "Backend. [default: nccl with GPUs, else gloo]", "nccl|gloo"),
        flag("slurm", "Submit a job for each world size, with the options below."),
        Option("ranks_per_node", "Ranks of a node. [default: one per GPU, else 1]", "N", least=1),
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
            hpctk scaling run -o scaling --world-sizes 1,2,4
            hpctk scaling analyze scaling
        """,
    )
    group.add(run, PANELS, cls=ScriptCommand)
    group.add(analyze, {"Options": _ANALYSIS})
    app.add_command(group)


def run(
    *,
    program: Annotated[
        list[str] | None, argument("[-- SCRIPT ARGS...]", "Your own training.")
    ] = None,
    out: Annotated[Path, value("DIR", "Directory for records and logs.", "--out", "-o")],
    world_sizes: Annotated[str, value("N,N", "Numbers of ranks.")] = "1,2,4",
    **given: Any,
) -> None:
    """Measure a training at several world sizes, here or on Slurm, and compare them.

    Prints the table of 'hpctk scaling analyze DIR', or with --slurm the job ids. After -- it
    measures your own training, which records its speed in three lines.

    Examples:
        hpctk scaling run -o scaling --world-sizes 1,2,4 --price-per-gpu-hour 2
        hpctk scaling run -o scaling --world-sizes 1,2 -- train.py --epochs 1
        hpctk scaling run -o scaling --world-sizes 4,8,16 --slurm --gpus-per-node 4
    """
    from hpc_toolkit.training.scaling.launches import Job, ScalingRun, own_jobs
    from hpc_toolkit.training.scaling.program import cluster_name
    from hpc_toolkit.training.scaling.records import read_records

    sizes = tuple(sorted(parse_counts(world_sizes, "--world-sizes", most=999_999)))
    table = {one.name: given.pop(one.name) for one in _TABLE}
    slurm, dry_run, resume = (bool(given.pop(name)) for name in ("slurm", "dry_run", "resume"))
    for name in only_given(table) if slurm else ():
        message = f"{option(name)} is for a table, which jobs have not measured yet"
        hint = "give it to 'hpctk scaling analyze DIR' when they have ended; here leave it out"
        raise ConfigError(message, hint=hint)
    directory = out.absolute()
    built_in = {name: given.pop(name) for name in by_name({"": OPTIONS})}
    records = read_records(directory)
    missing: list[tuple[int, int]] = []
    wanted: ScalingRun | None = None
    if program:
        measuring.refuse_built_in(table, slurm=slurm)
        missing = measuring.unmeasured(directory, program, sizes, built_in["repeats"], records)
    else:
        cost = sample_cost_ms(built_in.pop("sample_cost"))
        wanted = ScalingRun(
            directory=directory,
            world_sizes=sizes,
            settings=Settings(sample_cost_ms=cost, **built_in),
            variations=tuple(map(Variation.parse, given.pop("vary") or ())),
        )
        wanted.check()
    if records and not resume:
        message = f"{directory} already contains measurements"
        hint = "--resume measures what is missing; or name another DIR"
        raise ConfigError(message, hint=hint)
    given = only_given(given)
    if slurm:
        force, cluster = given.pop("force", False), cluster_name(given.get("cluster"))
        jobs = own_jobs(directory, program or (), missing, cluster=cluster)
        if wanted is not None:
            words = tuple(replace(wanted, cluster=cluster).program())
            jobs = [Job(size, str(size), words) for size in sizes]
        measuring.submit(directory, jobs, given, dry_run=dry_run, force=force)
    elif wanted is not None:
        measuring.here(wanted, given, table, dry_run=dry_run)
    else:
        threads = built_in["threads"] or len(os.sched_getaffinity(0)) // max(sizes)
        os.environ["OMP_NUM_THREADS"] = str(max(1, threads))
        measuring.own_here(directory, program or [], missing, given, table, dry_run=dry_run)


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

    Also recommends a world size. If settings vary, such as with --vary
    loader-workers=0,1,2,4, the first table compares them.

    Examples:
        hpctk scaling analyze scaling
        hpctk scaling analyze scaling --cluster killarney > scaling.md
    """
    measuring.show_analysis(source, given, given.pop("cluster"))
