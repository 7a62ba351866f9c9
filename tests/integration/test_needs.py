"""Workers with different shares take the stages that they can hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit import Run
from hpc_toolkit.worker.memory import kernel_kills
from tests.integration.realrun import Hpctk, journal_lines, wait_until, workers_of, write_items

PIPELINE = """
[stages.prepare]
command = "sleep .02"
grid = { n = "0:11" }
needs = { gpus = 0 }
[stages.train]
command = "sleep .02"
after = "prepare"
needs = { gpus = 1 }
[stages.report]
command = "sleep .02"
grid = { n = "0:3" }
needs = { licence = 1, features = ["a100"] }
priority = 5
"""
CPU, GPU = {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0"}


def created(hpctk: Hpctk, *words: object) -> Run:
    ended = hpctk("init", "run", *words)
    assert ended.code == 0, ended.err
    return Run.open("run")


def made(hpctk: Hpctk, text: str = PIPELINE) -> Run:
    Path("pipeline.toml").write_text(text)
    return created(hpctk, "--config", "pipeline.toml")


def test_each_worker_takes_the_stages_that_it_can_hold(hpctk: Hpctk) -> None:
    run = made(hpctk)
    first = hpctk("work", "run", env=CPU)

    # It ends by itself, with a line that says what is left and why, and status says the same.
    assert first.code == 75
    assert (
        "what is left needs more than this worker has: train (1 GPU), "
        "report (1 licence), report (the feature a100)" in first.err
    )
    assert {line["unit"].partition("/")[0] for line in journal_lines(run, "done")} == {"prepare"}
    now = run.status()
    assert [one["text"] for one in now.unmet] == [
        "12 items of train need 1 GPU; no worker has more than 0",
        "4 items of report need 1 licence; no worker has more than 0",
    ]
    assert "12 items of train need 1 GPU" in hpctk("status", "run").out
    assert hpctk("status", "run", "--json").json["unmet"][0]["needs"] == {"gpus": 1}
    plan = hpctk("plan", "run", "--nodes", "1", "--item-time", "1s", "--gpus-per-node", "0")
    assert "warning: stage train: its items need 1 GPU; no worker of this job has" in plan.err

    second = hpctk("work", "run", env={**GPU, "HPCTK_HAS": "licence=1 a100"})
    assert second.code == 0, second.err
    assert run.status().complete
    assert run.status().unmet == []
    order = defaultdict(list)
    for line in journal_lines(run, "done"):
        order[line["unit"].partition("/")[0]].append(line["at"])
    assert max(order["report"]) <= min(order["train"]), "the priority is larger"


LATE = """
import os
from hpc_toolkit.queue.view import RunView

known, every, complete = RunView.poll_journal, RunView.poll, []

def poll(self):
    complete.append(True)
    every(self)
    complete.pop()

def poll_journal(self, worker):
    if complete or f"-{os.getpid()}-" in worker:
        return known(self, worker)

RunView.poll, RunView.poll_journal = poll, poll_journal
"""


@pytest.mark.parametrize("first", ["", LATE], ids=["", "reads others late"])
def test_a_worker_waits_for_items_that_it_can_hold(hpctk: Hpctk, first: str) -> None:
    text = PIPELINE.replace("gpus = 0", "gpus = 1").replace(
        'after = "prepare"\nneeds = { gpus = 1 }',
        'after = "prepare"\nneeds = { cpus = 1, gpus = 0, cpu_only = 1 }',
    )
    run = made(hpctk, text.partition("[stages.report]")[0])
    waits = hpctk.start("work", "run", "--has", "cpu_only=1", env=CPU, first=first)
    wait_until(lambda: workers_of(run), "worker", of=waits)
    assert "what is left needs more than any of them has" in hpctk("status", "run").out
    assert hpctk("work", "run", env=GPU).code == 75

    assert waits.ended().code == 0
    by = defaultdict(set)
    for line in journal_lines(run, "done"):
        by[line["unit"].partition("/")[0]].add(line["by"])
    assert len(by["prepare"]) == len(by["train"]) == 1
    assert by["prepare"] != by["train"]


FOLLOWED = """
[stages.first]
command = "true {n}"
grid = { n = "0:1" }
needs = { gpus = 4 }
[stages.second]
command = "true {n}"
after = "first"
"""
AT_ONCE = "from hpc_toolkit.worker import worker; worker._STARTS_S = 0.5"


@pytest.mark.parametrize("kind", ["stages", "graph"])
def test_a_worker_leaves_if_nobody_can_hold_what_its_items_follow(hpctk: Hpctk, kind: str) -> None:
    if kind == "stages":
        made(hpctk, FOLLOWED)
    else:
        first: dict[str, Any] = {"id": "a", "after": [], "needs": {"gpus": 4}}
        write_items([first, {"id": "b", "after": ["a"]}])
        created(hpctk, "--items", "items.jsonl", "--command", "true {id}")
    ended = hpctk("work", "run", first=AT_ONCE, limit_s=60)
    assert ended.code == 75
    assert "what is left needs more than this worker has: " in ended.err
    assert "(4 GPUs)" in ended.err


def test_shares_of_a_pool_and_the_time_left_decide(hpctk: Hpctk) -> None:
    plain = hpctk("init", "few", "--count", 2, "--command", "true {index}", "--needs", "gpus=1")
    assert plain.code == 0, plain.err
    half = hpctk("work", "few", "--workers", 2, "--gpus-per-worker", 0.5, env=GPU)
    assert half.code == 75
    assert "no worker has more than 0.5" in hpctk("status", "few").out
    assert hpctk("work", "few", env=GPU).code == 0

    hpctk("init", "long", "--count", 1, "--command", "true {index}", "--needs", "time=2h")
    short = hpctk("work", "long", "--deadline", "1h")
    assert (short.code, "items (2 h 00 min of time)" in short.err) == (75, True)
    assert hpctk("work", "long", "--deadline", "3h").code == 0


def test_units_of_a_dead_worker_are_left_to_workers_that_can_hold_them(hpctk: Hpctk) -> None:
    hpctk("init", "run", "--count", 2, "--command", "sleep 60; true {index}", "--needs", "gpus=1")
    run = Run.open("run")
    claims = run.paths.stage("items").claims
    first = hpctk.start("work", "run", env=GPU)
    wait_until(lambda: list(claims.iterdir()), "claim", of=first)
    first.kill()

    assert hpctk("work", "run", env=CPU).code == 75
    assert not list(claims.glob("*.2.lock"))


MIXED: list[dict[str, Any]] = [
    *({"n": n} for n in range(20)),
    *({"n": n, "needs": {"gpus": 4}} for n in range(20, 32)),
    *({"n": n, "needs": {"gpus": 1}, "priority": 5} for n in range(32, 36)),
    {"n": 36, "needs": {"licence": 1}, "priority": -1},
]


def test_each_worker_takes_the_items_of_a_list_that_it_can_hold(hpctk: Hpctk) -> None:
    write_items(MIXED)
    run = created(hpctk, "--items", "items.jsonl", "--command", "sleep .02; true {n}")

    first = hpctk("work", "run", env=GPU)
    assert first.code == 75
    assert "more than this worker has: items (4 GPUs), items (1 licence)" in first.err
    assert [sorted(part) for part in halves(run, 4)] == [[*range(32, 36)], [*range(20)]]
    assert [one["text"] for one in run.status().unmet] == [
        "12 items of items need 4 GPUs; no worker has more than 1",
        "1 item of items needs 1 licence; no worker has more than 0",
    ]
    plan = hpctk("plan", "run", "--nodes", "1", "--item-time", "1s", "--gpus-per-node", "2")
    assert "stage items: some of its items need 4 GPUs; no worker of this job has" in plan.err
    assert "1 item of items needs 1 licence" in hpctk("status", "run").out

    four = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert hpctk("work", "run", "--gpus-per-worker", 4, "--has", "licence=1", env=four).code == 0
    assert [sorted(part) for part in halves(run, 36)][1] == [36]
    assert [row["item"] for row in run.results()] == [{"n": n} for n in range(37)]
    life = hpctk("explain", "run", "--item", "20")
    assert "with 4 GPUs" in life.out


def halves(run: Run, first: int) -> tuple[list[int], list[int]]:
    """The items that were done first, and the others, by their numbers in the list."""
    run.view.poll_logs()
    log = run.view.stages["items"].log
    lines = sorted(journal_lines(run, "done"), key=lambda line: line["at"])
    entries = [int(line["unit"].rpartition("/")[2].partition("-")[0]) for line in lines]
    pairs = zip(entries, lines, strict=True)
    done = [log.segments[entry].number(line["item"]) for entry, line in pairs]
    return done[:first], done[first:]


def test_items_of_a_graph_are_left_to_workers_that_hold_them_through_kills(hpctk: Hpctk) -> None:
    items: list[dict[str, Any]] = [{"id": "first", "needs": {"gpus": 0}}]
    for n in range(20):
        items.append({"id": f"a{n}", "after": ["first"], "needs": {"gpus": 1}})
        items.append({"id": f"b{n}", "after": [f"a{n}"], "needs": {"cpu_only": 1}, "priority": n})
    items.append({"id": "last", "after": [f"b{n}" for n in range(20)]})
    write_items(items)
    run = created(hpctk, "--items", "items.jsonl", "--command", "sleep .05; true {id}")
    no_gpu: dict[str, Any] = {"env": CPU, "first": ""}
    killed = hpctk.start("work", "run", env=GPU)
    wait_until(lambda: len(journal_lines(run, "done")) > 4, "results", of=killed)
    killed.kill()
    # What it can hold comes later, of items that no worker has the GPU for yet: it waits.
    waits = hpctk.start("work", "run", "--has", "cpu_only=1", **no_gpu)
    wait_until(lambda: len(workers_of(run)) > 1, "worker", of=waits)
    helps = hpctk.start("work", "run", env=GPU)
    assert waits.ended(limit_s=60).code == 0
    assert helps.ended(limit_s=60).code == 0

    rows = run.results()
    assert [(row["item"]["id"], row["state"]) for row in rows] == [(i["id"], "done") for i in items]
    by = {row["item"]["id"][0]: set[str]() for row in rows}
    for row in rows:
        by[row["item"]["id"][0]].add(row["worker"])
    assert not by["a"] & by["b"]
    assert len(by["b"]) == 1


def test_the_needs_of_an_item_grow_from_its_own(hpctk: Hpctk) -> None:
    Path("hungry.py").write_text(HUNGRY)
    write_items([{"units": 1}, {"units": 8}, {"units": 9, "needs": {"memory": "256M"}}])
    run = created(
        hpctk,
        *("--items", "items.jsonl", "--workload", "hungry:fill"),
        *("--needs", "memory=64M", "--retry", "on=oom,memory=x2,up_to=512M", "--max-attempts", 1),
    )

    assert hpctk("work", "run", "--workers", 1, "--memory-per-worker", "64M").code == 75
    assert [one["needs"]["memory"] >> 20 for one in run.status().unmet] == [128, 256]
    ended = [
        hpctk("work", "run", "--workers", 1, "--memory-per-worker", f"{size}M").code
        for size in (128, 256, 512)
    ]
    assert ended == [75, 75, 0]
    assert [row["attempts"] for row in run.results()] == [1, 1, 1]
    # The third item began with 256 MiB, and both ended with twice that.
    attempts = [json.loads(hpctk("explain", "run", "--item", n, "--json").out) for n in (1, 2)]
    sizes = [[one["needs"]["memory"] >> 20 for one in life["attempts"]] for life in attempts]
    assert sizes == [[64, 128, 256, 512], [256, 512]]
    shown = [(one["needs"]["memory"] >> 20, one["done"]) for one in run.status().grown]
    assert sorted(shown) == [(512, 1), (512, 1)]


HUNGRY = """
import sys
import time

def fill(units, seconds=0):
    block = bytearray(units * 34 << 20)
    block[::4096] = b"x" * len(block[::4096])
    time.sleep(seconds)
    return {"bytes": len(block)}
"""
"""An item of N units gets N * 64 MiB at the attempt at which it fits."""


def test_an_item_that_takes_too_long_waits_for_a_worker_with_more_time(hpctk: Hpctk) -> None:
    text = """
[stages.items]
command = "sleep {seconds}"
grid = { seconds = [0, 3] }
timeout = "1s"
retry = { on = "timeout", time = "x4", up_to = "1h" }
max_attempts = 1
"""
    run = made(hpctk, text)

    assert hpctk("work", "run", "--deadline", "3s", "--grace", "1s").code == 75
    (unmet,) = run.status().unmet
    assert "1 item of items needs 4.0 s of time; no worker has more than" in unmet["text"]
    assert unmet["submit"] == "hpctk submit --run run --time 6"
    assert hpctk("work", "run").code == 0

    assert [row["state"] for row in run.results()] == ["done", "done"]
    (failed,) = journal_lines(run, "failed")
    assert (failed["timeout"], failed["error"]) == (True, "took longer than the timeout of 1.0 s")


# A stand-in for a GPU, which is not here: the class is named like torch's (unit/test_memory.py has
# that one), and the size of the GPU, which only nvidia-smi knows, is given to each worker.
TRAIN = """
import os

class OutOfMemoryError(RuntimeError):
    pass

def train(gib):
    if gib > int(os.environ["GPU_GIB"]):
        raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {gib} GiB.")
    return {"gib": gib}
"""
PRINTED = "echo 'torch.OutOfMemoryError: CUDA out of memory.' >&2; exit 1"
COMMAND = f'if [ {{gib}} -gt "$GPU_GIB" ]; then {PRINTED}; fi'


@pytest.mark.parametrize("code", [("workload", "train:train"), ("command", COMMAND)])
def test_items_that_ran_out_of_gpu_memory_wait_for_a_larger_gpu(
    hpctk: Hpctk, code: tuple[str, str]
) -> None:
    Path("train.py").write_text(TRAIN)
    run = created(
        hpctk,
        *("--grid", "gib=10,30,70,90", f"--{code[0]}", code[1]),
        *("--needs", "gpus=1,gpu_memory=16G", "--max-attempts", 1),
        *("--retry", "on=gpu_oom,gpu_memory=x2,up_to=80G"),
    )

    def work(gib: int) -> int:
        env = {**GPU, "GPU_GIB": str(gib)}
        return hpctk("work", "run", "--has", f"gpu_memory={gib}G", env=env).code

    assert work(40) == 75
    (unmet,) = run.status().unmet
    assert unmet["text"] == (
        "2 items of items need 64.0 GiB of GPU memory; no worker has more than "
        "40.0 GiB of GPU memory"
    )
    line = "hpctk submit --run run --gpus-per-node 1 --ntasks-per-node 1 --gpu-type TYPE"
    assert unmet["submit"] == line
    assert line in hpctk("status", "run").out
    assert work(80) == 0

    assert [row["state"] for row in run.results()] == ["done", "done", "done", "failed"]
    assert all(line["gpu_oom"] and not line["oom"] for line in journal_lines(run, "failed"))
    tried = [json.loads(hpctk("explain", "run", "--item", n, "--json").out) for n in (2, 3)]
    asked = [[one["needs"]["gpu_memory"] >> 30 for one in life["attempts"]] for life in tried]
    assert asked == [[16, 32, 64], [16, 32, 64, 80]]
    most = "items with 1 GPU, 80.0 GiB of GPU memory, the most that its retry allows: 1 failed"
    assert most in hpctk("status", "run").out


GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(
    os.geteuid() != 0 or not (GROUPS / "memory.limit_in_bytes").exists(),
    reason="needs root and control groups of version 1",
)
@pytest.mark.parametrize("kind", ["function", "command"])
def test_what_the_kernel_kills_for_its_memory_runs_again_with_more(hpctk: Hpctk, kind: str) -> None:
    Path("hungry.py").write_text(
        f"{HUNGRY}\nif __name__ == '__main__':\n    fill(int(sys.argv[1]))"
    )
    command = f"{sys.executable} hungry.py {{units}}"
    code = {"workload": "hungry:fill"} if kind == "function" else {"command": command}
    retry = {"on": "oom", "memory": "x8", "up_to": "512M"}
    more = {"needs": {"memory": "64M"}, "retry": retry, "max_attempts": 1}
    run = Run.create("run", [{"units": 1}, {"units": 8}], **code, **more)  # type: ignore[arg-type]
    group = GROUPS / f"hpctk-test-{os.getpid()}"
    group.mkdir()
    before = kernel_kills()
    try:
        (group / "memory.limit_in_bytes").write_text(str(150 << 20))
        here = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -m hpc_toolkit"
        first = subprocess.run(
            ["bash", "-c", f"{here} work run --has memory=64M"],
            capture_output=True,
            check=False,
            text=True,
            env=hpctk.environment(),
            timeout=120,
        )
    finally:
        group.rmdir()

    assert first.returncode == 75, first.stderr
    assert kernel_kills() > before
    (failed,) = journal_lines(run, "failed")
    assert (failed["oom"], failed["item"]) == (True, 1)
    assert not journal_lines(run, "death")
    assert hpctk("work", "run", "--has", "memory=512M").code == 0
    assert [row["attempts"] for row in run.results()] == [1, 1]


def step(rank: int, ranks: int, *, nodes: int = 1) -> dict[str, str]:
    """The environment of a task of a step on the first node of a job."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURMD_NODENAME": "n1",
        "SLURM_PROCID": f"{rank}",
        "SLURM_LOCALID": f"{rank}",
        "SLURM_NODEID": "0",
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), f"{ranks}"),
        "SLURM_JOB_NUM_NODES": f"{nodes}",
        "SLURM_NNODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": f"{ranks}",
        "SLURM_CPUS_PER_TASK": "1",
    }


PAIRS = """
import os, time
def work(n):
    # Both workers must run an item at the same time.
    open(f"begun-{n}-{os.environ['HPCTK_LOCAL_RANK']}", "w").close()
    while len({name.rpartition("-")[2] for name in os.listdir() if "begun-" in name}) < 2:
        time.sleep(0.01)
    names = "HPCTK_LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
    return [sorted(os.sched_getaffinity(0)), *map(os.environ.get, names)]
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_workers_of_one_rank_run_items_side_by_side_on_their_own_cpus(hpctk: Hpctk) -> None:
    Path("pairs.py").write_text(PAIRS)
    items = [{"n": n, "needs": {"cpus": 1 if n else 2}} for n in range(9)]
    write_items(items)
    words = ("--items", "items.jsonl", "--workload", "pairs:work", "--items-per-claim", 1)
    assert hpctk("init", "run", *words).code == 0
    two = "import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])"
    # Job scripts set OMP_NUM_THREADS to the CPUs of the task.
    env = {**step(0, 1), "CUDA_VISIBLE_DEVICES": "7", "SLURM_CPUS_PER_TASK": "2"}
    env["OMP_NUM_THREADS"] = "2"

    ended = hpctk.start("work", "run", "--workers", 2, env=env, first=two).ended()

    assert ended.code == 75, ended.err
    assert ended.err.count("what is left needs more than this worker has: items (2 CPUs)") == 2
    assert "2 workers in each task; of this one the first has CPUs" in ended.err
    run = Run.open("run")
    values = [row["value"] for row in run.results(partial=True) if row["state"] == "done"]
    assert len(values) == 8
    assert {value[1]: (value[2], value[3]) for value in values} == {"0": ("7", "1"), "1": ("", "1")}
    cpus = {value[1]: value[0] for value in values}
    assert [len(one) for one in cpus.values()] == [1, 1]
    assert cpus["0"] != cpus["1"]
    assert sorted(one["rank"] for one in workers_of(run)) == [0, 1]
    assert [one["text"] for one in run.status().unmet] == [
        "1 item of items needs 2 CPUs; no worker has more than 1"
    ]
    # A rank that is one worker has both.
    assert hpctk.start("work", "run", env=env, first=two).ended().code == 0


def test_workers_of_a_rank_with_fewer_cpus_share_them(hpctk: Hpctk) -> None:
    run = made(hpctk, '[stages.a]\ncommand = "true {n}"\ngrid = { n = "0:9" }\n')
    one = "import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])"

    ended = hpctk.start("work", "run", "--workers", 3, env=step(1, 2), first=one).ended()

    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert sorted(one["rank"] for one in workers_of(run)) == [3, 4, 5]
    again = hpctk.start("work", "run", "--workers", 3, env=step(0, 2), first=one).ended()
    assert "the 3 workers of each task share its 1 CPU" in again.err
    none = hpctk("work", "run", "--workers", 0, env=step(0, 2))
    assert (none.code, "workers must be 1 to 1024, got 0" in none.err) == (1, True)


def test_the_only_rank_of_a_job_has_all_its_nodes_and_lets_srun_use_them(hpctk: Hpctk) -> None:
    items = [{"n": 0}, {"n": 1, "needs": {"nodes": 2}}, {"n": 2, "needs": {"nodes": 3}}]
    write_items(items)
    seen = "env | grep ^S > seen-{n}"
    assert hpctk("init", "run", "--items", "items.jsonl", "--command", seen).code == 0
    set_by_srun = {"SLURM_NTASKS_PER_NODE": "1", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1"}
    set_by_srun |= {"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_DISTRIBUTION": "cyclic"}
    set_by_srun |= {"SLURM_MPI_TYPE": "none"}

    several = hpctk("work", "run", env=step(0, 2, nodes=2) | set_by_srun)

    assert several.code == 75
    assert "this worker has: items (2 nodes), items (3 nodes)" in several.err
    assert "SLURM_NTASKS=2" in Path("seen-0").read_text().split()
    plan = hpctk("plan", "run", "--nodes", "2", "--item-time", "1s")
    assert "its items need 2 nodes; no worker of this job has more than 1" in plan.err

    alone = hpctk("work", "run", env=step(0, 1, nodes=2) | set_by_srun)

    assert "this worker has: items (3 nodes)" in alone.err
    variables = Path("seen-1").read_text().split()
    assert {"SLURM_NNODES=2", "SLURM_TASKS_PER_NODE=1(x2)", "SLURM_OVERLAP=1"} <= set(variables)
    left = {"SLURM_NTASKS", "SLURM_NPROCS", *set_by_srun}
    assert left.isdisjoint(one.partition("=")[0] for one in variables)
    status = hpctk("status", "run")
    assert "1 item of items needs 3 nodes; no worker has more than 2" in status.out
    assert "hpctk submit --run run --nodes 3 --one-rank" in status.out
    # Local workers have one node each, whatever the number of workers.
    assert "items (3 nodes)" in hpctk("work", "run", "--workers", 2).err
