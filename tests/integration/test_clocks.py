"""Hosts whose clocks are a day apart: no decision compares them (invariant I4)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import (
    Hpctk,
    Started,
    journal_lines,
    rows_by_id,
    wait_until,
    workers_of,
)

DAY_S = 86_400.0
LEASE = ("--lease", "4s")

# Before anything is imported that could have taken either of them: this host's clock, and its time
# since it was started, are another's.
ELSEWHERE = """
import time
_time, _monotonic = time.time, time.monotonic
time.time = lambda: _time() + {wall}
time.monotonic = lambda: _monotonic() + {since}
"""


def start_on(hpctk: Hpctk, host: str, *, wall: float, since: float) -> Started:
    first = ELSEWHERE.format(wall=wall, since=since)
    return hpctk.start("work", "run", *LEASE, env={"HPCTK_HOST": host}, first=first)


@pytest.mark.slow
def test_i4_workers_a_day_apart_leave_each_other_alone_and_see_who_died(
    hpctk: Hpctk, tmp_path: Path
) -> None:
    """Of three the one whose clock is ahead dies."""
    held = "echo start {id} >> {trace}; until [ -e go ]; do sleep 0.05; done; sleep 0.2"
    run = hpctk.make([{}] * 24, None, command=held)
    hosts = {"behind": -DAY_S, "ahead": DAY_S, "right": 0.0}
    started = {
        host: start_on(hpctk, host, wall=wall, since=abs(wall)) for host, wall in hosts.items()
    }
    wait_until(lambda: len(hpctk.noted("start")) == 3, "an item of each")
    (victim,) = [one for one in wait_until(lambda: _three(run), "all") if one["host"] == "ahead"]

    started["ahead"].send(signal.SIGKILL)  # first, so that nobody replaces the worker
    os.kill(victim["pid"], signal.SIGKILL)
    (tmp_path / "go").touch()

    assert [started[host].ended().code for host in ("behind", "right")] == [0, 0]
    deaths = journal_lines(run, "death")
    assert {one["worker"] for one in deaths} == {victim["worker"]}
    assert {one["evidence"] for one in deaths} == {"lease"}
    rows = rows_by_id(run)
    assert sorted(rows) == list(range(24))
    assert {(row["state"], row["attempts"]) for row in rows.values()} == {("done", 1)}
    assert all(0.1 < row["seconds"] < DAY_S / 2 for row in rows.values()), (
        "durations are of one clock"
    )
    counts = run.status().stages["items"]
    assert (counts.done, counts.duplicates) == (24, 0)
    assert len(hpctk.noted("start")) <= 24 + 1, "nobody alive was taken for dead"


def _three(run: Run) -> list[dict[str, Any]]:
    found = workers_of(run)
    return found if len(found) == 3 else []
