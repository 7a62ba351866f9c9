"""Hosts on which everything fails, beside hosts on which nothing does."""

from __future__ import annotations

import json
import os
import select
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import StageSpec, WorkloadSpec
from hpc_toolkit.worker.starting import Executor
from tests.integration.realrun import (
    Hpctk,
    Started,
    rows_by_id,
    wait_until,
    workers_of,
)

WORKLOAD = "sample_workloads:fail_on_host"


def start(hpctk: Hpctk, host: str, workers: int) -> Started:
    return hpctk.start("work", "run", "--workers", workers, env={"HPCTK_HOST": host})


def started_on(hpctk: Hpctk, host: str) -> list[int]:
    """Items by the order in which they began on a host."""
    return [int(words[1]) for words in hpctk.noted("start") if words[2] == host]


def notices(run: Run) -> list[dict[str, Any]]:
    found = []
    for path in run.paths.control.iterdir():
        with suppress(ValueError):  # a notice that is just being written
            found.append(json.loads(path.read_text()))
    return sorted((one for one in found if one["request"] == "sick"), key=lambda one: one["at"])


@pytest.mark.slow
def test_black_hole_is_stopped_after_8_items_a_worker_and_costs_no_item(hpctk: Hpctk) -> None:
    """It is there before the first result, when to pause would be to believe the sick host."""
    gates = [hpctk.cwd / f"gate-{number}" for number in range(40)]
    items = [{"sick": ["node-a"], "gate": str(gate), "seconds": 0.15} for gate in gates]
    run = hpctk.make(items, WORKLOAD)
    healthy = start(hpctk, "node-b", 2)
    wait_until(lambda: len(started_on(hpctk, "node-b")) == 2, "the healthy host to work")
    last = started_on(hpctk, "node-b")[0]

    sick = start(hpctk, "node-a", 3)
    wait_until(lambda: notices(run), "the sick host to hold")
    assert run.status().stages["items"].done == 0
    for number, gate in enumerate(gates):
        if number != last:
            gate.touch()
    code = sick.ended().code
    gates[last].touch()

    assert code == 75
    hurt = set(started_on(hpctk, "node-a"))
    assert 8 <= len(hurt) <= 8 * 3
    # Others try what failed there before they go on with what nobody tried.
    assert hurt & set(started_on(hpctk, "node-b")[:20])
    notes = [worker["note"] for worker in workers_of(run) if worker["host"] == "node-a"]
    assert any("host node-a is sick: " in note for note in notes)
    assert healthy.ended().code == 0
    rows = rows_by_id(run)
    assert {row["state"] for row in rows.values()} == {"done"}
    assert {row["value"]["host"] for row in rows.values()} == {"node-b"}
    assert max(row["attempts"] for row in rows.values()) <= 3
    (warning,) = run.status().warnings
    assert warning.startswith("host node-a is sick: ")


@pytest.mark.parametrize("options", [{"fail": 1.0}, {}])
def test_executor_ends_its_pass_after_so_many_failures_in_a_row(
    tmp_path: Path, options: dict[str, float]
) -> None:
    """However fast they fail: the worker looks at them before anything else is run."""
    workload = WorkloadSpec(
        function="hpc_toolkit.science.workloads.synthetic:Flaky", options=options, path=()
    )
    executor = Executor({"items": StageSpec(name="items", workload=workload)}, tmp_path / "log")
    request = {"stage": "items", "unit": "000001-0", "generation": 1, "deadline": None}
    positions = list(range(50))
    told = b""

    executor.start(
        {**request, "positions": positions, "expected_s": 0.0, "failures_left": 3}, [b"{}"] * 50
    )
    while b"\ne" not in told:
        select.select([executor.results], [], [], 10)
        more = os.read(executor.results, 1 << 18)
        assert more, "the executor ended"
        told += more
    executor.end()
    executor.close()

    kinds = [line[:1] for line in told.split(b"\n")[:-1] if line[:1] in (b"f", b"d")]
    assert kinds == ([b"f"] * 3 if options else [b"d"] * 50)
    assert told.endswith(b"efailing\n" if options else b"e\n")
