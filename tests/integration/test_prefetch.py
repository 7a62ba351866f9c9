"""Prefetch of the group to come, by real workers and executors."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.queue.presence import DRAINING, read_presence
from hpc_toolkit.run import Run
from tests.integration.realrun import Hpctk, journal_lines, wait_until
from tests.toyrun import units_of


def worked(hpctk: Hpctk, **how: Any) -> Run:
    """A run of which one worker did all items."""
    run = make(hpctk, **how)
    assert hpctk("work", "run", "--workers", 1).code == 0
    return run


def make(hpctk: Hpctk, groups: int = 4, gate: Path | None = None, **options: Any) -> Run:
    """Three items for each group."""
    more = {} if gate is None else {"gate": str(gate)}
    return hpctk.make(
        [{"g": f"g{number // 3}", **more} for number in range(3 * groups)],
        "sample_workloads:Prefetching",
        options={"trace": str(hpctk.trace), "groups": groups, **options},
        group_by="g",
    )


def test_each_group_but_the_first_is_prefetched_once_before_it_is_loaded(hpctk: Hpctk) -> None:
    run = worked(hpctk, groups=6)

    assert {row["state"] for row in run.results()} == {"done"}
    noted, loads = hpctk.noted(), [group for _, group in hpctk.noted("load")]
    assert sorted(loads) == [f"g{number}" for number in range(6)]
    assert noted[0] == ["load", loads[0]]
    assert [group for _, group in hpctk.noted("prefetch")] == loads[1:]
    for group in loads[1:]:
        assert noted.index(["prefetch", group]) < noted.index(["load", group])


def test_no_two_workers_prefetch_the_same_group(hpctk: Hpctk) -> None:
    run = make(hpctk, groups=10, waits=False)

    assert hpctk("work", "run", "--workers", 3).code == 0

    groups = [words[1] for words in hpctk.noted("prefetch")]
    assert {row["state"] for row in run.results()} == {"done"}
    assert len(groups) == len(set(groups))


def test_a_prefetch_that_fails_is_a_line_in_the_log_and_no_failure(hpctk: Hpctk) -> None:
    run = worked(hpctk, how="fail")

    assert {(row["state"], row["attempts"]) for row in run.results()} == {("done", 1)}
    (log,) = [path.read_text() for path in run.paths.logs.iterdir()]
    groups = [words[1] for words in hpctk.noted("prefetch")]
    assert log.splitlines() == [
        f"hpctk: '{group}' is not prefetched: ConnectionError: no network for {group}"
        for group in groups
    ]


@pytest.mark.parametrize("unit", [3, 12])
def test_a_prefetch_that_ends_its_process_does_so_once_and_no_item_fails_for_it(
    hpctk: Hpctk, unit: int
) -> None:
    with units_of(unit):
        run = worked(hpctk, how="kill", waits=False)

    groups = [group for _, group in hpctk.noted("prefetch")]
    assert {row["state"] for row in run.results()} == {"done"}
    assert len(groups) == 1
    assert len(journal_lines(run, "death")) == 1


def test_a_prefetch_that_never_ends_holds_up_neither_results_nor_the_end(hpctk: Hpctk) -> None:
    run = worked(hpctk, how="hang")

    assert {row["state"] for row in run.results()} == {"done"}
    assert len(hpctk.noted("prefetch")) == 1, "two at once"


def test_a_worker_that_is_asked_to_leave_does_not_wait_for_a_prefetch(
    hpctk: Hpctk, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    run = make(hpctk, how="hang", gate=gate)
    work = hpctk.start("work", "run", "--workers", 1)
    # An item that has not begun when the worker is asked would not begin at all.
    wait_until(
        lambda: hpctk.noted("prefetch") and hpctk.noted("held"), "the prefetch, beside an item"
    )

    work.send(signal.SIGTERM)
    (worker,) = run.paths.workers.glob("*.json")
    wait_until(
        lambda: (said := read_presence(worker)) and said.state == DRAINING, "the worker's answer"
    )
    gate.touch()

    assert work.ended().code == 75
    assert len(journal_lines(run, "done")) == 1
