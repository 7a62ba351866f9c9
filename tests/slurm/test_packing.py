"""Several small items on one rank, and items on several nodes, on a real Slurm."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import journal_lines
from tests.slurm.conftest import LabUnderTest
from tests.slurm.rehearsal import MEASURED, Rehearsal, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = """
import os, time
def work(n):
    rank = os.environ["HPCTK_LOCAL_RANK"]
    open(f"begun-{n}-{rank}", "w").close()
    # The first items end when each worker runs one.
    while len({name.rpartition("-")[2] for name in os.listdir() if "begun-" in name}) < 2:
        time.sleep(0.02)
    time.sleep(0.1)
    return {"cpus": sorted(os.sched_getaffinity(0)), "rank": os.environ["SLURM_PROCID"]}
"""


@pytest.fixture
def rehearsal(lab: LabUnderTest, tmp_path: Path) -> Iterator[Rehearsal]:
    (tmp_path / "small.py").write_text(SMALL)
    yield Rehearsal(lab.lab, tmp_path)
    lab.clear()


def make(rehearsal: Rehearsal, items: list[dict[str, Any]], *words: object) -> None:
    (rehearsal.cwd / "items.jsonl").write_text("".join(json.dumps(one) + "\n" for one in items))
    more = ("--items", "items.jsonl", "--items-per-claim", 1)
    rehearsal.hpctk("init", rehearsal.run, *more, *words)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_sixty_four_small_items_run_side_by_side_on_one_rank(rehearsal: Rehearsal) -> None:
    make(rehearsal, [{"n": n} for n in range(64)], "--workload", "small:work", "--needs", "cpus=1")
    script = rehearsal.render(nodes=1, cpus_per_task=2, workers_per_task=2)
    rehearsal.wait_for_end(rehearsal.sbatch(script, rehearsal.run))

    rows, found = rehearsal.rows(), rehearsal.measure()
    assert len(rows) == 64
    assert {row["state"] for row in rows} == {"done"}
    assert {row["value"]["rank"] for row in rows} == {"0"}
    cpus = {row["worker"]: tuple(row["value"]["cpus"]) for row in rows}
    assert [len(one) for one in cpus.values()] == [1, 1]
    assert len(set(cpus.values())) == 2
    lines = journal_lines(Run.open(rehearsal.run), "done")
    spans = sorted((line["at"] - line["seconds"], line["at"]) for line in lines)
    beside = sum(start < before[1] for before, (start, _) in itertools.pairwise(spans))
    MEASURED.append(
        f"one rank: 64 items of 0.1 s on 2 workers in {found.span_s:.1f} s; {beside} began while"
        " another one ran"
    )


# The lab's Slurm also sends the warning to the items themselves.
HELD = "trap '' USR1; touch begun-{n}; until test -e go; do sleep 0.1; done"


@pytest.mark.parametrize("how", ["warned", "cancelled", "killed"])
def test_all_workers_of_a_rank_stop_with_their_step(rehearsal: Rehearsal, how: str) -> None:
    make(rehearsal, [{"n": n} for n in range(100)], "--command", HELD)
    script = rehearsal.render(nodes=1, cpus_per_task=4, workers_per_task=4)
    job = rehearsal.sbatch("--no-requeue", script, rehearsal.run)
    wait_until(lambda: len([*rehearsal.cwd.glob("begun-*")]) == 4, "an item of each worker")
    if how == "warned":
        rehearsal.call("scancel", "--batch", "--signal=USR1", job)
        wait_until(lambda: "waiting for 4 workers" in rehearsal.log(), rehearsal.log)
        (rehearsal.cwd / "go").touch()
    elif how == "cancelled":
        rehearsal.call("scancel", job)
    else:
        rehearsal.call("scancel", "--signal=KILL", f"{job}.1")  # step 0 was the preflight
    rehearsal.wait_for_end(job)

    items, workers = rehearsal.status()["stages"]["items"], rehearsal.measure().workers
    assert items["failed"] == 0
    assert items["done"] in (range(4, 100) if how == "warned" else [0])
    assert len(workers) == 4
    if how != "killed":
        assert {one["state"] for one in workers.values()} == {"finished"}
        assert items["pending"] == 100 - items["done"]
    # The fixture fails if a process of the job is left.


SIZES = """
if test {n} -lt 2; then
    touch large; until test -e small; do sleep 0.1; done
    srun --label hostname > hosts-{n}
else
    touch small; until test -e large; do sleep 0.1; done
fi
"""


def test_items_on_two_nodes_run_beside_items_of_one_node(rehearsal: Rehearsal) -> None:
    items: list[dict[str, Any]] = [{"n": n, "needs": {"nodes": 2}} for n in range(2)]
    make(rehearsal, items + [{"n": n} for n in range(2, 12)], "--command", SIZES)
    large = rehearsal.sbatch(rehearsal.render(nodes=2, one_rank=None), rehearsal.run)
    small = rehearsal.sbatch(rehearsal.render(nodes=2), rehearsal.run)
    rehearsal.wait_for_end(large, small)

    rows, workers = rehearsal.rows(), rehearsal.measure().workers
    assert {row["state"] for row in rows} == {"done"}
    jobs = [workers[row["worker"]]["job"] for row in rows]
    assert jobs[:2] == [large] * 2
    assert small in jobs[2:]
    for n in range(2):
        hosts = (rehearsal.cwd / f"hosts-{n}").read_text().split()
        assert hosts[::2].count("0:") == 1
        assert len(set(hosts[1::2])) == 2
    MEASURED.append(
        f"items on two nodes: 2, beside {jobs.count(small)} items of one node in another job and"
        f" {jobs.count(large) - 2} in the same one"
    )


def test_a_job_of_single_nodes_ends_when_items_on_two_are_left(rehearsal: Rehearsal) -> None:
    make(rehearsal, [{"n": 0}, {"n": 1, "needs": {"nodes": 2}}], "--command", "true {n}")
    words = ("--cluster", "lab", "--nodes", 2, "--time", "5", "--run", rehearsal.run)
    shown = rehearsal.hpctk("submit", "--dry-run", *words)
    rehearsal.wait_for_end(rehearsal.sbatch(rehearsal.render(nodes=2), rehearsal.run))

    assert "--nodes=2" in shown
    assert "not requeued: what is left needs more than its workers have" in rehearsal.log()
    (unmet,) = rehearsal.status()["unmet"]
    assert unmet["text"] == "1 item of items needs 2 nodes; no worker has more than 1"
    assert unmet["submit"].endswith("--nodes 2 --one-rank")
