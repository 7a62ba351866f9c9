"""An iterated benchmark: flaky, with one that hangs and one that kills its worker; snapshots of it,
runs that begin from them, and workers that are bound to their part of the machine."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.results.snapshots import read_snapshot
from hpc_toolkit.run import Run
from tests.integration.realrun import Hpctk, wait_until

COUNT, FLAKY = 100, 20
HANGS, KILLS, WAITS = 33, 66, 99
CODE = """
import glob, os, signal, time
from examples.iterated import Iterations
from hpc_toolkit.system.processes import parent_of
from sample_workloads import first_time, note


class Troubled(Iterations):
    def measure(self, item, batch):
        note(item, "start", item["seed"], os.getpid())
        while item.get("how") == "wait" and not glob.glob(item["once"] + "/s-*.json"):
            time.sleep(0.05)
        if item.get("how", "wait") != "wait" and first_time(item):
            if item["how"] == "hang":
                time.sleep(3600)
            if item["how"] == "kill":
                os.kill(parent_of(os.getppid())[0], signal.SIGKILL)
                time.sleep(3600)
            raise ConnectionError("flaky")
        return super().measure(item, batch)


class Bound(Iterations):
    def measure(self, item, batch):
        if "once" in item and first_time(item):
            os.kill(parent_of(os.getppid())[0], signal.SIGKILL)
            time.sleep(3600)
        return {
            **super().measure(item, batch),
            "cpus": sorted(os.sched_getaffinity(0)),
            "threads": os.environ["OMP_NUM_THREADS"],
            "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
        }

    def on_oom(self, context, items):
        self._mib = 0
        return super().on_oom(context, items)
"""


def troubled_items(root: Path) -> list[dict[str, Any]]:
    """One of 20 fails at its first attempt; one hangs there, and one kills its worker.

    One waits for the snapshot, which is one of a part of the run therefore.
    """
    items: list[dict[str, Any]] = []
    for seed in range(COUNT):
        item: dict[str, Any] = {"seed": seed, "trace": str(root / "trace")}
        how = {HANGS: "hang", KILLS: "kill"}.get(seed, "fail" if seed % FLAKY == 0 else "")
        if seed == WAITS:
            item |= {"how": "wait", "once": str(root)}
        elif how:
            item |= {"how": how, "once": str(root / f"once-{seed}")}
        items.append(item)
    return items


def write_lines(path: Path, items: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


def values(run: str) -> dict[int, tuple[float, float]]:
    """The numbers of each seed; the size of its batch depends on what else was left."""
    return {
        row["item"]["seed"]: (row["value"]["mean"], row["value"]["spread"])
        for row in Run.open(run).results()
    }


@pytest.mark.slow
def test_500_iterations_in_small_are_complete_and_resume_from_any_snapshot(hpctk: Hpctk) -> None:
    (hpctk.cwd / "troubled.py").write_text(CODE)
    write_lines(hpctk.cwd / "items.jsonl", troubled_items(hpctk.cwd))
    made = hpctk(
        *("init", "run", "--workload", "troubled:Troubled", "--items", "items.jsonl"),
        *("--option", "batch=10", "--items-per-claim", 10, "--max-attempts", 3, "--timeout", "5s"),
    )
    assert made.code == 0, made.err

    working = hpctk.start("work", "run", "--workers", 10, "--monitor")
    status = Run.open(hpctk.cwd / "run").status
    wait_until(lambda: status().stages["items"].done >= 10, "ten are done", of=working)
    taken = hpctk("snapshot", "run", "-o", "s-part.json")
    ended = working.ended()

    assert (taken.code, ended.code) == (0, 0), ended.err
    checks = ("--range", "mean=-0.2:0.2", "--unique", "seed", "--unique", "mean")
    verified = hpctk("gather", "run", "--check", *checks, "--json")
    assert verified.code == 0, verified.out
    found = verified.json
    assert (found["complete"], found["rows"], found["items"]) == (True, 100, 100)
    status = hpctk("status", "run", "--json").json
    assert status["deaths"] == 1
    assert status["stages"]["items"]["retried"] >= COUNT // FLAKY + 1
    (log,) = (hpctk.cwd / "run" / "logs").glob("monitor-*.jsonl")
    assert json.loads(log.read_text().splitlines()[-1])["processes"] >= 1
    check_snapshots(hpctk)


def check_snapshots(hpctk: Hpctk) -> None:
    """Each is a prefix of the truth, and the earliest leads to the same results."""
    truth = values("run")
    assert hpctk("snapshot", "run").json["counts"]["done"] == COUNT
    taken = {path: read_snapshot(path) for path in hpctk.cwd.glob("s-*.json")}
    assert min(one.counts["done"] for one in taken.values()) < COUNT
    for one in taken.values():
        for row in one.rows:
            seed, value = row["item"]["seed"], row["value"]
            assert (value["mean"], value["spread"]) == truth[seed]
    first = min(taken, key=lambda path: taken[path].counts["done"])
    done = {row["item"]["seed"] for row in taken[first].rows}
    (hpctk.cwd / "trace").write_text("")

    made = hpctk("init", "again", "--from", first.name, "--timeout", "30s")

    assert made.code == 0, made.err
    assert made.out == "again\n"
    assert f"{len(done)} of {COUNT} items are done already\n" in made.err
    assert hpctk("work", "again", "--workers", 4).code == 0
    assert values("again") == truth
    assert {int(words[1]) for words in hpctk.noted("start")} == set(truth) - done
    assert Run.open("again").manifest.stages[0].timeout_s == 30.0


def test_workers_are_bound_to_their_part_of_the_machine_replaced_ones_too(hpctk: Hpctk) -> None:
    (hpctk.cwd / "troubled.py").write_text(CODE)
    items: list[dict[str, Any]] = [{"seed": seed} for seed in range(256)]
    items[0]["once"] = str(hpctk.cwd / "once")
    write_lines(hpctk.cwd / "items.jsonl", items)
    cpus = sorted(os.sched_getaffinity(0))
    workers = min(2, len(cpus))
    hpctk(
        *("init", "run", "--workload", "troubled:Bound", "--items", "items.jsonl"),
        *("--option", "draws=10", "--option", "mib=60", "--items-per-claim", 4),
    )

    ended = hpctk(
        *("work", "run", "--workers", workers, "--cpus-per-worker", 1, "--gpus-per-worker", 0),
        *("--memory-per-worker", "200M"),
        env={"OMP_NUM_THREADS": ""},
        first="import os; del os.environ['OMP_NUM_THREADS']",
    )

    assert ended.code == 0, ended.err
    assert f"worker 0: CPUs {cpus[0]} (NUMA node " in ended.err
    rows = Run.open("run").results()
    assert {row["state"] for row in rows} == {"done"}
    found = [row["value"] for row in rows]
    assert {tuple(value["cpus"]) for value in found} <= {(cpu,) for cpu in cpus[:workers]}
    assert {(value["threads"], value["gpus"]) for value in found} == {("1", "")}
    by_worker = {(row["worker"], *row["value"]["cpus"]) for row in rows}
    assert len(by_worker) == len({row["worker"] for row in rows})  # none of them moved
    told = {path.stem: read_presence(path) for path in (hpctk.cwd / "run/workers").glob("*.json")}
    for worker, cpu in by_worker:
        presence = told[worker]
        assert presence is not None
        assert presence.place == {"cpus": str(cpu), "gpus": [], "memory_bytes": 200 * 2**20}
    assert hpctk("status", "run", "--json").json["deaths"] == 1
    # 4 x 60 MiB do not fit: MemoryError, and on_oom halves the batch without an attempt.
    assert {row["attempts"] for row in rows} == {1}
    assert max(row["value"]["batch"] for row in rows) == 2

    refused = hpctk("work", "run", "--workers", len(cpus) + 1, "--cpus-per-worker", 1)
    assert refused.code == 1
    assert f"but this process can use only {len(cpus)}" in refused.err


def test_the_first_rank_of_a_node_samples_it_when_the_environment_says_so(hpctk: Hpctk) -> None:
    hpctk.make_sleeping(1, 0)
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "HPCTK_MONITOR": "1"}
    ranks = [
        hpctk.start("work", "run", env={**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        for rank in ("1", "0")
    ]

    assert [rank.ended().code for rank in ranks] == [0, 0]
    (path,) = (hpctk.cwd / "run" / "logs").glob("monitor-*.jsonl")
    header, *samples = map(json.loads, path.read_text().splitlines())
    assert header["pid"] == ranks[1].pid
    assert samples


def test_verify_lists_what_is_wrong_with_a_file(hpctk: Hpctk) -> None:
    write_lines(hpctk.cwd / "items.jsonl", [{"seed": seed} for seed in range(4)])
    common = {"attempts": 1, "seconds": 0.1, "worker": "w"}
    done = {**common, "state": "done", "error": None}
    rows: list[dict[str, Any]] = [
        {**done, "item": {"seed": seed}, "value": {"mean": mean}}
        for seed, mean in ((0, 0.5), (1, math.nan), (1, 7))
    ]
    rows.append({**common, "item": {"seed": 3}, "state": "failed", "value": None, "error": "ill"})
    write_lines(hpctk.cwd / "rows.jsonl", rows)

    ended = hpctk(
        "gather", "rows.jsonl", "--check", "--items", "items.jsonl", "--range", "mean=-1:1"
    )

    assert ended.code == 1
    assert ended.err == ""
    counts = "1 missing, 1 duplicate, 1 failed, 2 out of range, 1 not finite"
    assert ended.out.splitlines() == [
        f"4 rows of 4 items: {counts}",
        '  missing       {"seed": 2}',
        '  duplicate     {"seed": 1}: 2 rows',
        '  failed        {"seed": 3}: ill',
        '  out of range  {"seed": 1}: mean is nan, not in -1:1',
        '  out of range  {"seed": 1}: mean is 7, not in -1:1',
        '  not finite    {"seed": 1}: value.mean is nan',
    ]
