"""What a plan reads of a run, what nodes and partitions make of it, and how it is told."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.planning.forecast import Forecaster, Guess
from hpc_toolkit.planning.nodes import Worker, node_of
from hpc_toolkit.planning.plan import choose, typed_work
from hpc_toolkit.planning.reading import read_work
from hpc_toolkit.planning.work import Work
from hpc_toolkit.slurm.clusters.facts import parse_cluster
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun
from tests.unit import jobcommands

if TYPE_CHECKING:
    from pathlib import Path

SITE = parse_cluster(
    """
    gpus_per_node = 4
    cpus_per_node = 64
    mem_per_node = "480G"
    price_per_gpu_hour = 0.5
    price_per_node_hour = 1
    currency = "USD"
    """,
    file="site.toml",
    name="site",
)
NODE = node_of(SITE, Worker())
SURE = Guess(100.0, factor=1.01, spread=0.01)


def forecaster(items: int = 14_400, guess: Guess = SURE) -> Forecaster:
    return Forecaster(typed_work(items), guess, draws=20)


class Toy:
    """A run of 8 items in units of 2, which a living worker is at."""

    def __init__(self, root: Path) -> None:
        self.run = ToyRun(root / "run", 8, unit=2)
        self.clock = ManualClock(1_000.0)
        place = {"host": "far", "boot": "other", "started": 900.0, "at": 995.0}
        self.worker = self.run.worker("w1", **place)
        self.worker.claim(self.run.unit_name(0))
        self.worker.attempt(0, at=950.0, seconds=10.0)
        self.worker.attempt(1, at=960.0, seconds=20.0)
        self.worker.release(at=960.0, seconds=37.0)
        self.worker.claim(self.run.unit_name(2))
        self.worker.attempt(2, at=975.0, seconds=15.0)
        self.worker.journal.sync()

    def work(self) -> Work:
        return read_work(self.run.view(), self.clock, given="run")


def test_a_run_is_read_as_items_left_seen_and_held(tmp_path: Path) -> None:
    work = Toy(tmp_path).work()

    (stage,) = work.stages
    assert (work.left, work.done, work.sealed) == (5, 3, True)
    assert [one.seconds for one in stage.seen] == [10.0, 20.0, 15.0]
    assert [(one.worker, one.load) for one in stage.seen] == [("w1", 1)] * 3
    assert [one.place for one in stage.seen] == [0, 1, 2]
    assert [batch.place for batch in stage.batches] == [3, 4, 6]
    assert stage.loads_s == [7.0]
    assert work.workers == {"w1": "items/"}
    assert [(b.first, b.count, b.holder) for b in stage.batches] == [
        (0, 1, "w1"),
        (1, 2, ""),
        (3, 2, ""),
    ]


@pytest.mark.parametrize(
    ("worker", "gpus", "workers", "why"),
    [
        (Worker(), None, 4, "one for each of 4 GPUs"),
        (Worker(), 0, 64, "1 of 64 CPUs each"),
        (Worker(cores=32), None, 2, "32 of 64 CPUs each"),
        (Worker(mem_mib=200 * 1024), None, 2, "200G of 480G each"),
        (Worker(cores=8, mem_mib=240 * 1024), 0, 2, "240G of 480G each"),
        (Worker(per_node=8), None, 8, "as requested"),
    ],
)
def test_workers_of_a_node_are_as_many_as_fit(
    worker: Worker, gpus: int | None, workers: int, why: str
) -> None:
    node = node_of(SITE, worker, gpus=gpus)

    assert (node.workers, node.why) == (workers, why)


@pytest.mark.parametrize(
    ("worker", "gpus", "said"),
    [
        (Worker(), 5, "--gpus-per-node: 5 is more than site has"),
        (Worker(mem_mib=2**20), None, "not one worker fits"),
        (Worker(cores=16, per_node=5), 0, "5 do not fit on a node"),
    ],
)
def test_what_a_node_does_not_have_is_refused(worker: Worker, gpus: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        node_of(SITE, worker, gpus=gpus)


def test_the_cost_is_that_of_the_node_with_its_gpus() -> None:
    assert NODE.price_per_hour == 3.0

    found = choose(forecaster(), NODE, 10)

    # 14,400 items of 100 s are 100 node-hours of 4 workers.
    assert found.node_hours.median == pytest.approx(100.0, rel=0.05)
    assert found.gpu_hours is not None
    assert found.gpu_hours.median == pytest.approx(4 * found.node_hours.median)
    assert found.cost is not None
    assert found.cost.median == pytest.approx(3 * found.node_hours.median)


call = partial(jobcommands.call, "plan")


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"

    found = call("--items", "50", "--item-time", "3s", "--nodes", "2,1", "--json", "-o", str(file))

    assert found.exit_code == 0, found.output
    plan = json.loads(found.stdout)
    assert [choice["nodes"] for choice in plan["choices"]] == [1, 2]
    assert json.loads(file.read_text()) == plan


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--items", "5"], "--items needs --item-time"),
        (["--items", "0", "--item-time", "1s"], "not 1 to"),
        (["--items", "5", "--groups", "6", "--item-time", "1s"], "--groups 6"),
        (["run", "--items", "5", "--item-time", "1s"], "plans a new run"),
        (["--items", "5", "--item-time", "soon"], "--item-time: 'soon'"),
        (["--items", "5", "--item-time", "1s", "--nodes", "1,x"], "--nodes: '1,x'"),
        (["--items", "5", "--item-time", "1s", "--nodes", "0"], "--nodes: '0'"),
        (["--items", "5", "--item-time", "1s", "--price-per-gpu-hour", "3"], "no GPUs are known"),
        (["run", "--groups", "2"], "--groups needs --items"),
        (["run", "--load-time", "2s"], "--load-time needs --item-time"),
        (["--items", "5", "-o", "x.pdf"], "unknown format '.pdf'"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str) -> None:
    assert said in jobcommands.refused("plan", *arguments).message
