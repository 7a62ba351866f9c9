"""Workers of an iterated benchmark that are bound to their part of the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.run import Run
from tests.integration.realrun import Hpctk

CODE = """
import os, signal, time
from examples.iterated import Iterations
from hpc_toolkit.system.processes import parent_of
from sample_workloads import first_time


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


def test_workers_are_bound_to_their_part_of_the_machine_replaced_ones_too(hpctk: Hpctk) -> None:
    (hpctk.cwd / "bound.py").write_text(CODE)
    items = [{"seed": 0, "once": str(hpctk.cwd / "once")}, *({"seed": n} for n in range(1, 256))]
    Path("items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    cpus = sorted(os.sched_getaffinity(0))
    workers = min(2, len(cpus))
    hpctk(
        *("init", "run", "--workload", "bound:Bound", "--items", "items.jsonl"),
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
