"""The Slurm jobs of ``hpctk scaling run``: render and submit them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.cli.scriptoptions import requested
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.system.options import only_given
from hpc_toolkit.system.terminal import note
from hpc_toolkit.training.scaling.settings import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.submit.submission import Submission
    from hpc_toolkit.training.scaling.jobs import Job


def submit_own(
    out: Path, program: list[str], missing: list[tuple[int, int]], given: dict[str, Any]
) -> None:
    """Submit the jobs of a user's training for the missing world sizes and repeats."""
    from hpc_toolkit.training.scaling.jobs import own_jobs
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
    from hpc_toolkit.training.scaling.jobs import job_request

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
    from hpc_toolkit.training.scaling.jobs import refuse_twice
    from hpc_toolkit.training.scaling.launches import prepare

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
