"""The processes of a rank, cut one at a time: a pool's worker and a worker's executor.

Nobody starts anything again: the pool replaces its worker, the worker its executor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hpc_toolkit.run import Run
from hpc_toolkit.worker import attempts, executor, forkserver, pool, starting
from tests.faults import loud
from tests.faults.cut import WAYS, Cut
from tests.faults.test_faults import (
    EVERY,
    ITEMS,
    Place,
    at_every,
    check_end,
    check_parts,
    check_rows,
    make_holding,
    make_new,
)

LEASE = ("--lease", "300ms")
POOL_WAYS = tuple(way for way in WAYS if "power" not in way)
DEATHS = ("kill before", "kill after", "half and kill")


def begin_pool(cut: Cut) -> None:
    """Count what the pool's first worker does; the pool itself changes nothing."""
    cut.leave_out()
    real = pool.local_environment

    def environment(slot: int, workers: int) -> dict[str, str]:
        if slot == 0:
            cut.follow()
        return real(slot, workers)

    setattr(pool, "local_environment", environment)  # noqa: B010 - a module's function
    del os.environ["SLURM_STEP_ID"]


def begin_executor(cut: Cut) -> None:
    """Count what the first executor writes: its log, values, and messages to the worker."""
    cut.leave_out()
    real = executor._guard_forks

    def guard_forks(*pipes: int) -> None:
        cut.follow()
        cut.wrap(attempts._LogFile, "write")
        cut.wrap(os, "write")
        real(*pipes)

    setattr(executor, "_guard_forks", guard_forks)  # noqa: B010 - a module's function


def begin_fork_server(cut: Cut) -> None:
    """Count the changes of the process from which executors are forked."""
    cut.leave_out()
    real = executor.prepare

    def prepare() -> None:
        cut.follow()
        cut.wrap(attempts._LogFile, "write")
        cut.wrap(os, "fork")
        real()

    setattr(forkserver, "prepare", prepare)  # noqa: B010 - a module's function
    setattr(starting, "packages_of", lambda _: ["json.tool"])  # noqa: B010


@at_every(2 * EVERY + 1)
def test_a_pool_whose_worker_is_cut_ends_whole(fast_dir: Path, every: int) -> None:
    place = Place(fast_dir, make_new, "work", "run", "--workers", 2, *LEASE, begin=begin_pool)
    for struck, way, where in place.points(every, ways=POOL_WAYS, name="work --workers 2"):
        if "kill" in way:
            assert (struck.code, "Traceback" in struck.err) == (0, False), where
        else:
            check_end(struck, way, where)
            assert place.again(where).err == "", where
        check_rows(Run.open(place.run).results(), ITEMS, where)


def check_deaths(home: Path, begin: Callable[[Cut], None], name: str, every: int) -> None:
    place = Place(home, make_holding, "work", "run", *LEASE, begin=begin)
    for struck, _, where in place.points(every, ways=DEATHS, name=name):
        assert (struck.code, struck.err) == (0, ""), where
        rows = check_rows(Run.open(place.run).results(), ITEMS, where)
        assert [row["value"] for row in rows] == [loud.hold({"id": n}) for n in range(ITEMS)], where
        check_parts(place.run, Run.open(place.run).table(), where)
        assert Run.open(place.run).status().deaths <= 1, where
        said = place.call("logs", "run", "--item", "3", root=place.run)
        assert said.code == 0, f"{where}\nthen: {said}"


@at_every(7)
def test_an_executor_that_dies_costs_no_result_and_no_attempt(fast_dir: Path, every: int) -> None:
    check_deaths(fast_dir, begin_executor, "an executor", every)


@at_every(1)
def test_a_fork_server_that_dies_anywhere_costs_no_result_and_no_attempt(
    fast_dir: Path, every: int
) -> None:
    check_deaths(fast_dir, begin_fork_server, "a fork server", every)
