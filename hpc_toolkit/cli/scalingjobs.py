"""Measured trainings as jobs: one for each world size, rendered like any training, and sent."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.cli.scriptoptions import requested
from hpc_toolkit.errors import ConfigError, HpcToolkitError

if TYPE_CHECKING:
    from hpc_toolkit.submit.submission import Submission
    from hpc_toolkit.training.scaling.launches import ScalingRun

DECIDED = {
    "nodes": "--world-sizes",
    "ntasks": "--world-sizes",
    "ntasks_per_node": "--ranks-per-node",
    # Its jobs would measure the same at the same time, into the same files.
    "array": "--world-sizes",
    "nproc_per_node": "--ranks-per-node",
    "run_dir": "-o DIR",
}
"""Options of a script that another one decides here."""

USELESS = {
    "rank_restarts": "a rank that fails would only disturb the others once more",
    "stage": "samples are made, and no data are read",
    "stage_dir": "samples are made, and no data are read",
}
"""Options of trainings that a measurement has no use for."""


def submissions(
    run: ScalingRun, given: dict[str, Any], ranks_per_node: int | None, *, dry_run: bool
) -> dict[int, Submission]:
    """A job for each world size; with ``dry_run`` their scripts are printed."""
    from hpc_toolkit.slurm.render.rules import option
    from hpc_toolkit.submit.send import check_directory
    from hpc_toolkit.submit.submission import of_request
    from hpc_toolkit.training.scaling.jobs import job_name, job_request

    for name, instead in DECIDED.items():
        if given.get(name):
            message = f"{option(name)}: {instead} decides that here"
            raise ConfigError(message, hint=f"leave it out, and give {instead}")
    for name, why in USELESS.items():
        if given.get(name) not in (None, (), []):
            message = f"{option(name)}: {why}"
            raise ConfigError(message, hint="leave it out")
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
    from hpc_toolkit.submit.send import send
    from hpc_toolkit.training.scaling.jobs import note_job, refuse_twice
    from hpc_toolkit.training.scaling.place import prepare

    prepare(run.directory)
    if not force:
        refuse_twice(run.directory, run.world_sizes)
    left = list(jobs)
    try:
        for size, submission in jobs.items():
            for job in send(submission):
                note_job(run.directory, job)
                print(job.job, flush=True)
            left.remove(size)
    except (HpcToolkitError, KeyboardInterrupt):
        if len(left) < len(jobs):
            sizes = ",".join(map(str, left))
            print(f"note: '--world-sizes {sizes}' sends what is missing", file=sys.stderr)
        raise
