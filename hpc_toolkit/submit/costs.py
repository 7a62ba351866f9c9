"""The cost of a run so far and to come, where 'hpctk submit' recorded the price of its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.submit.jobs import read_jobs
from hpc_toolkit.system.quantities import HOUR_S
from hpc_toolkit.system.record import Record, asdict

if TYPE_CHECKING:
    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.results.status import Status
    from hpc_toolkit.run import Run
    from hpc_toolkit.submit.jobs import RunJob


class Cost(Record):
    """The price of the lives of a run's workers."""

    spent: float
    """Up to now, without workers of unknown price, and without nodes that had no worker."""
    currency: str
    low: float | None
    """To come, if the living workers go on: the interval of the time left; None: not known."""
    high: float | None
    unpriced: int = 0
    """Workers whose price is not known."""


def worker_price(run: Run) -> tuple[float, str] | None:
    """Return the price of a worker for an hour, and its currency; None if jobs differ in it."""
    jobs = read_jobs(run.paths)
    prices = {(job.worker_price, job.currency) for job in jobs if job.worker_price is not None}
    return next(((price or 0.0, currency) for price, currency in prices if len(prices) == 1), None)


def add_cost(now: Status, run: Run, seen: dict[str, Presence | None] | None = None) -> None:
    """Add the cost of a run to its status; ``seen`` are the workers' presences, None: read them."""
    cost = cost_of(run, now, seen)
    now.cost = None if cost is None else asdict(cost)


def cost_of(run: Run, now: Status, seen: dict[str, Presence | None] | None = None) -> Cost | None:
    """Return the cost of a run; None if no price was recorded, or prices of several currencies."""
    jobs = {job.job: job for job in read_jobs(run.paths) if job.worker_price is not None}
    if len({job.currency for job in jobs.values()}) != 1:
        return None
    spent, unpriced, per_hour = 0.0, 0, 0.0
    for name, presence in (seen or run.view.presences()).items():
        job = _job_of(presence.job, jobs) if presence is not None else None
        if presence is None or job is None or job.worker_price is None:
            unpriced += 1
            continue
        spent += max(0.0, presence.at - presence.started) / HOUR_S * job.worker_price
        per_hour += job.worker_price if name in now.alive else 0.0
    ends = (now.eta_low_s, now.eta_high_s)
    low, high = (None if end is None else end / HOUR_S * per_hour for end in ends)
    return Cost(spent, next(iter(jobs.values())).currency, low, high, unpriced)


def _job_of(job: str | None, jobs: dict[str, RunJob]) -> RunJob | None:
    """Return the recorded job of a worker.

    An element of an array has an id of its own, so with one price every job has that price.
    """
    if job is None or job in jobs:
        return jobs.get(job or "")
    prices = {(one.worker_price, one.currency) for one in jobs.values()}
    return next(iter(jobs.values())) if len(prices) == 1 else None
