"""Several small items on one rank, ranks that share an import, and items on several nodes."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import REPOSITORY, journal_lines
from tests.slurm.reallab import LabUnderTest
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
def rehearsal(lab: LabUnderTest, tmp_path: Path) -> Rehearsal:
    (tmp_path / "small.py").write_text(SMALL)
    return Rehearsal(lab, tmp_path)


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


PACKAGE = """
import os
with open("imports", "a") as file: print(os.getpid(), file=file)
"""
SHARING = """
import heavy
import os, signal, time
def run(item):
    names = "SLURM_PROCID", "SLURM_LOCALID", "CUDA_VISIBLE_DEVICES"
    found = [os.environ.get(name) for name in names]
    open(f"rank-{found[0]}", "w").close()
    while sum(name.startswith("rank-") for name in os.listdir()) < 4: time.sleep(0.02)
    if not os.path.exists(f"died-{item['i']}"):
        open(f"died-{item['i']}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return found
"""


@pytest.mark.parametrize("option", ["--gpus-per-task=1", "--gpus-per-node=4", "--mpi=pmi2"])
def test_ranks_of_a_step_share_one_import_whatever_else_they_are_given(
    lab: LabUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def run(item): pass\n")
    items = [{"i": number} for number in range(8)]
    hpctk = [sys.executable, "-m", "hpc_toolkit"]
    Path("items.jsonl").write_text("".join(f'{{"i": {one["i"]}}}\n' for one in items))
    made = ["run", "--workload", "mine:run", "--items", "items.jsonl", "--items-per-claim", "1"]
    lab.run(*hpctk, "init", *made)
    Path("mine.py").write_text(SHARING)
    Path("site-packages").mkdir()
    Path("site-packages/heavy.py").write_text(PACKAGE)
    found = f"PYTHONPATH={tmp_path}/site-packages:{REPOSITORY}"

    step: list[str | Path] = ["--dir", lab.directory, "srun", "-N1", "-n4", option]
    done = lab.run(*hpctk, "lab", "exec", *step, "env", found, *hpctk, "work", "run", check=False)

    assert done.returncode == 0, done.stderr
    assert "note: " not in done.stderr
    assert len(Path("imports").read_text().split()) == 1
    values = [row["value"] for row in Run.open("run").results()]
    assert {value[0] for value in values} == {"0", "1", "2", "3"}
    assert all(value[0] == value[1] for value in values)
    gpus = {value[2] for value in values}
    assert len(gpus) == (1 if option == "--mpi=pmi2" else 4)
