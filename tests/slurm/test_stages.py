"""Stages and needs on a real Slurm: what follows what, and who takes what, through disturbances."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import journal_lines
from tests.integration.test_stages import check_order
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import MEASURED, Rehearsal, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PIPELINE = """
[stages.train]
workload = "lab_items:train"
grid = {{ lr = "0:{last}", seed = "0:9", seconds = [{seconds}] }}
[stages.evaluate]
after = "train"
workload = "lab_items:evaluate"
[stages.rank]
after = "evaluate"
by = ["lr"]
workload = "lab_items:rank"
[stages.summary]
after = ["rank", "train"]
by = []
workload = "lab_items:summary"
"""


@pytest.fixture
def rehearsal(lab: LabUnderTest, tmp_path: Path) -> Rehearsal:
    shutil.copy(Path(__file__).with_name("lab_items.py"), tmp_path)
    return Rehearsal(lab, tmp_path)


@pytest.mark.parametrize(
    ("last", "seconds", "lost"),
    [
        pytest.param(5, 0.3, "", id="small"),
        pytest.param(99, 0.5, "n3", id="full", marks=pytest.mark.soak),
    ],
)
def test_a_pipeline_is_run_once_through_a_requeue_and_a_lost_node(
    rehearsal: Rehearsal, last: int, seconds: float, lost: str
) -> None:
    groups, total = last + 1, 21 * (last + 1) + 1
    (rehearsal.cwd / "pipeline.toml").write_text(PIPELINE.format(last=last, seconds=seconds))
    rehearsal.hpctk("init", rehearsal.run, "--config", "pipeline.toml")
    began = time.monotonic()
    job = rehearsal.sbatch(rehearsal.render(nodes=8, gpus_per_node=1), rehearsal.run)
    rehearsal.wait_for_done(total // 5)
    rehearsal.call("scontrol", "requeue", job)
    wait_until(lambda: len(rehearsal.measure().workers) == 16, "workers of the job's second start")
    if lost:
        rehearsal.wait_for_done(total // 2)
        rehearsal.lab.lab.crash(lost)
        wait_until(lambda: rehearsal.lab.state(job) != "RUNNING", "the end of the script")
    else:
        rehearsal.wait_for_end(job)

    status, found = rehearsal.status(), rehearsal.measure()
    run = Run.open(rehearsal.run)
    assert {name: one["done"] for name, one in status["stages"].items()} == {
        "train": 10 * groups,
        "evaluate": 10 * groups,
        "rank": groups,
        "summary": 1,
    }
    run.view.poll()
    check_order(run)
    assert set(found.done_lines.values()) == {1}
    assert run.results()[0]["value"] == {"ranks": groups, "trained": 10 * groups}
    evidence = {" ".join(key).strip(): number for key, number in found.evidence.items()}
    MEASURED.append(
        f"pipeline: {total} items in {time.monotonic() - began:.0f} s, first claim to last result"
        f" {found.span_s:.1f} s, {len(found.workers)} workers, deaths {evidence or 0}"
    )


def mixed(chains: int, others: int) -> list[dict[str, Any]]:
    """Items that need a GPU, each after one that does not, and further items without needs."""
    items: list[dict[str, Any]] = []
    for n in range(chains):
        items.append({"id": f"prepare{n}", "after": [], "seconds": 0.2})
        train = {"id": f"train{n}", "after": [f"prepare{n}"], "seconds": 0.6}
        items.append(train | {"needs": {"gpus": 1}})
    return items + [{"id": f"other{n}", "after": [], "seconds": 0.4} for n in range(others)]


@pytest.mark.parametrize(
    ("chains", "others"),
    [
        pytest.param(24, 48, id="small"),
        pytest.param(400, 800, id="full", marks=pytest.mark.soak),
    ],
)
def test_no_gpu_waits_while_an_item_that_needs_one_is_ready(
    rehearsal: Rehearsal, chains: int, others: int
) -> None:
    items = mixed(chains, others)
    (rehearsal.cwd / "items.jsonl").write_text("".join(json.dumps(one) + "\n" for one in items))
    # A worker finishes its unit first, so a unit of several items without needs takes longer.
    more = ("--command", "sleep {seconds}; true {id}", "--items-per-claim", 1)
    rehearsal.hpctk("init", rehearsal.run, "--items", "items.jsonl", *more)
    work = f"{' '.join(rehearsal.program)} work {rehearsal.run}"
    job = ("--time=20", "--mem=1G", "--output=job.out", "--ntasks-per-node=2", "--nodes=2")
    gpu = rehearsal.sbatch(*job, "--gres=gpu:2", f"--wrap=srun --gres=gpu:1 {work}")
    cpu = rehearsal.sbatch(*job, f"--wrap=srun {work}")
    rehearsal.wait_for_end(gpu, cpu)

    rows, found, run = rehearsal.rows(), rehearsal.measure(), Run.open(rehearsal.run)
    assert {row["state"] for row in rows} == {"done"}
    assert len(rows) == len(items)
    run.view.poll()
    log, spans = run.view.stages["items"].log, {}
    for line in journal_lines(run, "done"):
        entry = int(line["unit"].rpartition("/")[2].partition("-")[0])
        name = items[log.segments[entry].number(line["item"])]["id"]
        assert name not in spans
        spans[name] = line["at"] - line["seconds"], line["at"], line["by"]
    with_gpu = found.workers_of(job=gpu)
    trains = [f"train{n}" for n in range(chains)]
    assert {spans[name][2] for name in trains} == with_gpu
    slack_s, missed = 1.0, []
    for name in (one for one in spans if not one.startswith("train")):
        begun, _, worker = spans[name]
        ready = [
            one
            for n, one in enumerate(trains)
            if spans[f"prepare{n}"][1] + slack_s < begun < spans[one][0] - slack_s
        ]
        missed += [name] if worker in with_gpu and ready else []
    assert missed == []
    busy = defaultdict[tuple[bool, bool], float](float)
    for name, (start, end, worker) in spans.items():
        busy[worker in with_gpu, name.startswith("train")] += end - start
    span_s = max(end for _, end, _ in spans.values()) - min(start for start, *_ in spans.values())
    bound_s = max(busy[True, True] / len(with_gpu), sum(busy.values()) / len(found.workers))
    last = max(spans[name][1] for name in trains) - min(spans[name][0] for name in trains)
    MEASURED.append(
        f"mixed needs: {len(items)} items, {len(with_gpu)} workers with a GPU of"
        f" {len(found.workers)}: {span_s:.1f} s, {bound_s / span_s:.0%} of the bound; GPUs trained"
        f" for {busy[True, True] / len(with_gpu) / last:.0%} of the time from first to last"
    )


HUNGRY = """
def fill(units):
    block = bytearray(units << 27)
    block[::4096] = b"x" * len(block[::4096])
    return len(block)
"""
GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(
    os.geteuid() != 0 or not (GROUPS / "memory.limit_in_bytes").exists(),
    reason="needs root and control groups of version 1",
)
def test_jobs_with_twice_the_memory_do_what_the_kernel_killed(rehearsal: Rehearsal) -> None:
    (rehearsal.cwd / "hungry.py").write_text(HUNGRY)
    words = ("--grid", "units=1,2,4,8", "--workload", "hungry:fill", "--max-attempts", 1)
    retry = "on=oom,memory=x2,up_to=8G"
    rehearsal.hpctk("init", rehearsal.run, *words, "--needs", "memory=1G", "--retry", retry)
    group = GROUPS / f"hpctk-lab-{os.getpid()}"
    group.mkdir()
    try:
        for size in (1, 2, 4, 8):
            # Each unit is 128 MiB and stands for 1 GB; the processes take about 30 MiB.
            (group / "memory.limit_in_bytes").write_text(str((192 * size + 30) << 20))
            work = f"{sys.executable} -m hpc_toolkit work {rehearsal.run} --has memory={size}G"
            here = f"echo $$ > {group}/cgroup.procs && exec {work}"
            job = rehearsal.sbatch("--time=5", "--mem=1G", "--output=job.out", f"--wrap={here}")
            rehearsal.wait_for_end(job)
    finally:
        group.rmdir()

    rows, run = rehearsal.rows(), Run.open(rehearsal.run)
    assert [(row["state"], row["attempts"]) for row in rows] == [("done", 1)] * 4
    failed = Counter(line["item"] for line in journal_lines(run, "failed"))
    kills = [failed[item] for item in range(4)]
    assert kills == [0, 1, 2, 3]
    assert all(line["oom"] for line in journal_lines(run, "failed"))
    assert not journal_lines(run, "death")
    MEASURED.append(f"memory doubled: items of 1, 2, 4, 8 units after {kills} kills")
