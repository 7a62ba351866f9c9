"""The cost of a run, from the prices that were recorded with its jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.submit.jobs import Cost, RunJob, cost_of, record_job, worker_price

if TYPE_CHECKING:
    from hpc_toolkit.results.status import Ends
    from tests.toyrun import ToyRun

JOB = RunJob(job="7", submitted=1.0, worker_price=3.0, currency="EUR")


def cost(toy: ToyRun, *jobs: RunJob, ends: Ends = (None, None)) -> Cost | None:
    for job in jobs:
        record_job(toy.paths, job)
    toy.worker("a", job="7", started=1000.0, at=4600.0)
    toy.worker("b", job="7", started=1000.0, at=8200.0)
    toy.worker("c", job="8", started=1000.0, at=4600.0)
    return cost_of(toy.paths, toy.run.view.presences(), {"b"}, ends)


def test_workers_cost_their_lives_and_the_living_the_time_left(toy: ToyRun) -> None:
    other = replace(JOB, job="8", worker_price=1.0)

    found = cost(toy, JOB, other, ends=(1800.0, 3600.0))

    assert found == Cost(spent=10.0, currency="EUR", low=1.5, high=3.0)


def test_an_element_of_an_array_has_the_price_of_its_array(toy: ToyRun) -> None:
    assert cost(toy, JOB) == Cost(spent=12.0, currency="EUR", low=None, high=None)


@pytest.mark.parametrize(
    "jobs", [(), (replace(JOB, worker_price=None),), (JOB, replace(JOB, job="8", currency="USD"))]
)
def test_there_is_no_cost_without_one_currency(toy: ToyRun, jobs: tuple[RunJob, ...]) -> None:
    assert cost(toy, *jobs) is None


def test_workers_of_unknown_price_are_counted(toy: ToyRun) -> None:
    jobs = (JOB, replace(JOB, job="9", worker_price=1.0))

    found = cost(toy, *jobs)

    assert found is not None
    assert (found.spent, found.unpriced) == (9.0, 1)


def test_the_price_of_a_worker_is_known_if_all_priced_jobs_agree(toy: ToyRun) -> None:
    assert worker_price(toy.run) is None
    for job in (JOB, replace(JOB, job="8"), replace(JOB, job="9", worker_price=None)):
        record_job(toy.paths, job)
    assert worker_price(toy.run) == (3.0, "EUR")
    record_job(toy.paths, replace(JOB, job="10", worker_price=1.0))
    assert worker_price(toy.run) is None
