"""``hpctk work`` with the options that job scripts use; it imports no command line framework.

:mod:`hpc_toolkit.cli.working` defines the command with all of its options, and uses the functions
here.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.quantities import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_toolkit.run import Run
    from hpc_toolkit.system.binding import Shares
    from hpc_toolkit.worker.worker import WorkerOptions

_IDLE_EXIT_IN_SLURM_S = 600.0
_LEAVE_BEFORE_END_S = 30.0


def prepare_work(
    *,
    run: str | None = None,
    workers: int | None = None,
    deadline: str | None = None,
    idle_exit: str | None = None,
    lease: str | None = None,
    grace: str | None = None,
    strict_code: bool = False,
) -> Callable[[], int]:
    """Import all that a worker needs, and open the run; the work itself gives the exit code."""
    from hpc_toolkit.run import Run
    from hpc_toolkit.rundir.layout import find_run
    from hpc_toolkit.system.ranks import RankInfo

    found = Run.open(find_run(run))
    check_code(found, strict=strict_code)
    options = worker_options(deadline, idle_exit, lease, grace)
    importlib.import_module("hpc_toolkit.worker.pool")  # as Run.work would, after the others
    collect_garbage()
    if RankInfo.from_environ().in_step:
        return partial(found.work, None, options)
    return partial(work_here, found, workers, options)


def collect_garbage() -> None:
    """Collect garbage from here on; imported objects are none, and need not be looked at."""
    gc.freeze()
    gc.enable()


def work_here(
    run: Run,
    workers: int | None,
    options: WorkerOptions,
    *,
    shares: Shares | None = None,
    look: Callable[[], None] | None = None,
) -> int:
    """Local workers with a progress bar where there is a terminal; the exit code."""
    from hpc_toolkit.system.binding import Shares
    from hpc_toolkit.system.gpus import visible_gpus

    shares = shares if shares is not None else Shares()
    count = workers if workers is not None else shares.workers_on(len(visible_gpus()))
    if shares:
        show_places(shares, count)
    work = partial(run.work, count, options, shares=shares)
    return with_progress(run, lambda on_tick: work(on_tick=on_tick), look)


def show_places(shares: Shares, workers: int) -> None:
    """Say what each worker gets, where something was asked for."""
    from hpc_toolkit.system.binding import place_workers
    from hpc_toolkit.system.machine import read_machine

    if shares:
        for worker, place in enumerate(place_workers(read_machine(), shares, workers)):
            print(f"worker {worker}: {place}", file=sys.stderr)


def with_progress(
    run: Run,
    work_on: Callable[[Callable[[], None] | None], int],
    look: Callable[[], None] | None = None,
) -> int:
    """Work with what is to be called meanwhile: a progress bar on a terminal, and ``look``."""
    if not sys.stderr.isatty():
        return work_on(look)
    from hpc_toolkit.cli.progress import RunProgress

    with RunProgress(run) as progress:

        def on_tick() -> None:
            progress.tick()
            if look is not None:
                look()

        return work_on(on_tick)


def check_code(run: Run, *, strict: bool) -> None:
    """Warn, or refuse, when a workload's file is not the one that the run was made with.

    Raises:
        ConfigError: it changed, and ``strict`` is set.
    """
    from hpc_toolkit.worker.loading import code_hash

    for stage in run.manifest.stages:
        before = run.manifest.provenance.get("code", {}).get(stage.name)
        now = code_hash(stage.workload)
        if before is None or now == before or (now is None and not strict):
            continue
        what = "changed since init" if now is not None else "is in no file that can be found"
        message = f"the code of stage {stage.name!r}, {stage.workload.function}, {what}"
        if strict:
            raise ConfigError(message, hint="make a new run, or leave out --strict-code")
        print(f"warning: {message}", file=sys.stderr)


def worker_options(
    deadline: str | None, idle_exit: str | None, lease: str | None, grace: str | None
) -> WorkerOptions:
    """A worker's settings from the texts of the options; None is an option that was not given."""
    from hpc_toolkit.worker.worker import WorkerOptions

    defaults = WorkerOptions()
    in_slurm = "SLURM_JOB_ID" in os.environ
    idle_exit_s = parse_duration(idle_exit, where="--idle-exit") if idle_exit is not None else None
    if idle_exit is None and in_slurm:
        idle_exit_s = _IDLE_EXIT_IN_SLURM_S
    return WorkerOptions(
        lease_s=parse_duration(lease, where="--lease") if lease is not None else defaults.lease_s,
        deadline=_deadline(deadline),
        idle_exit_s=idle_exit_s,
        grace_s=(
            parse_duration(grace, where="--grace", zero=True)
            if grace is not None
            else defaults.grace_s
        ),
    )


def _deadline(given: str | None) -> float | None:
    """Epoch seconds by which to be gone."""
    if given is not None and not given.startswith("@"):
        return time.time() + parse_duration(given, where="--deadline")
    # Slurm 23 sets the first anew in each job; the rendered scripts set the second for older ones,
    # and a job that was submitted inside another may have inherited the other's.
    job_end = os.environ.get("SLURM_JOB_END_TIME") or os.environ.get("HPCTK_DEADLINE")
    text, margin = (given[1:], 0.0) if given is not None else (job_end, _LEAVE_BEFORE_END_S)
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if math.isfinite(found):
        return found - margin
    message = f"deadline {text!r} is not a number of seconds since the epoch"
    raise ConfigError(message, hint="such as --deadline 2h or --deadline @1790000000")
