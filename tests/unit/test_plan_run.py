"""What a plan reads of a run, what nodes and partitions make of it, and how it is told."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from hpc_toolkit.cli import load_commands
from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.planning.forecast import Forecaster, Interval
from hpc_toolkit.planning.nodes import Worker, choose, node_of
from hpc_toolkit.planning.plan import make_plan
from hpc_toolkit.planning.reading import read_work
from hpc_toolkit.planning.timeleft import Kept, compare, read_plan
from hpc_toolkit.planning.work import Guess, Work, typed_work
from hpc_toolkit.slurm.clusters.facts import parse_cluster
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


SITE = parse_cluster(
    """
    gpus_per_node = 4
    cpus_per_node = 64
    mem_per_node = "480G"
    price_per_gpu_hour = 0.5
    price_per_node_hour = 1
    currency = "USD"
    watts_per_gpu = 300
    watts_per_node = 800
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
    assert stage.loads_s == (7.0,)
    assert work.workers == {"w1": "items/"}
    assert [(b.first, b.count, b.holder) for b in stage.batches] == [
        (0, 1, "w1"),
        (1, 2, ""),
        (3, 2, ""),
    ]


def test_how_long_an_item_has_run_is_told_by_its_workers_own_clock(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.clock.advance(20.0)

    (stage,) = toy.work().stages

    # Its last heartbeat was 20 s after its last line, whatever our clock says.
    assert stage.batches[0].age_s == 20.0
    assert not stage.batches[0].loading


def test_what_failed_and_is_tried_again_is_counted(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.worker.attempt(3, "failed", at=980.0)
    toy.worker.release(at=981.0)

    (stage,) = toy.work().stages

    assert (stage.attempts, stage.retried) == (4, 1)
    assert len(stage.left) == 5


def test_a_dead_workers_unit_waits_for_anybody(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.clock.advance(10_000.0)

    work = toy.work()

    assert work.workers == {}
    assert not any(batch.holder for batch in work.stages[0].batches)


def test_a_run_without_items_left_is_refused(tmp_path: Path) -> None:
    work = replace(Toy(tmp_path).work(), stages=())

    with pytest.raises(RunError, match="every item has a result"):
        make_plan(work, None, [1], SITE, NODE, draws=8)


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


def test_cost_and_energy_are_those_of_the_node_with_its_gpus() -> None:
    assert (NODE.price_per_hour, NODE.watts) == (3.0, 2000.0)

    found = choose(forecaster(), NODE, 10)

    # 14,400 items of 100 s are 100 node-hours of 4 workers.
    assert found.node_hours.median == pytest.approx(100.0, rel=0.05)
    assert found.gpu_hours is not None
    assert found.gpu_hours.median == pytest.approx(4 * found.node_hours.median)
    assert found.cost is not None
    assert found.cost.median == pytest.approx(3 * found.node_hours.median)
    assert found.energy_kwh is not None
    assert found.energy_kwh.median == pytest.approx(2 * found.node_hours.median)


def test_a_limit_cuts_the_work_into_jobs_that_follow_each_other() -> None:
    alone = choose(forecaster(), NODE, 10)
    assert alone.ask_s >= alone.forecast.time_s.high
    assert (alone.ask_s % 900, alone.in_a_row) == (0, 1)

    found = choose(forecaster(), NODE, 10, limit_s=2 * 3600)

    assert found.ask_s == 2 * 3600
    # 10 hours of work, and 2 hours less what each end costs.
    assert found.in_a_row == 6


def test_a_plan_is_compared_with_what_came(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    record = make_plan(toy.work(), None, [1], SITE, NODE, draws=8).to_json()
    (tmp_path / "plan.json").write_text(json.dumps(record))
    plan = read_plan(tmp_path / "plan.json")
    so_far = compare(toy.run.view(), ManualClock(1_001.0), plan)
    late = compare(toy.run.view(), ManualClock(1e6), plan)
    toy.worker.attempt(3, at=1_020.0)
    toy.worker.release(at=1_020.0)
    for number, first in enumerate((4, 6)):
        toy.worker.claim(toy.run.unit_name(first))
        toy.worker.attempt(first, at=1_040.0 + 40 * number)
        toy.worker.attempt(first + 1, at=1_060.0 + 40 * number)
        toy.worker.release(at=1_060.0 + 40 * number)

    found = compare(toy.run.view(), ManualClock(9e9), plan)

    assert so_far.items() >= {"complete": False, "left": 5, "inside": None, "error": None}.items()
    assert late["inside"] is False
    assert found.items() >= {"complete": True, "workers": 1, "real_s": 100.0}.items()
    assert found["error"] == pytest.approx(found["predicted_s"] / 100.0 - 1.0)
    assert found["inside"] == (found["low_s"] <= 100.0 <= found["high_s"])


@pytest.mark.parametrize("off", [86_400.0, -86_400.0], ids=["ahead", "behind"])
def test_a_comparison_is_corrected_for_the_clocks_of_hosts(tmp_path: Path, off: float) -> None:
    toy, now = ToyRun(tmp_path / "run", 4, unit=2), time.time()
    plan = Kept("run", now, ((2, Interval(90.0, 100.0, 110.0)),), working=True)
    for number, late in enumerate((0.0, off)):
        place = {"host": f"n{number}", "boot": "b", "started": now + late}
        worker = toy.worker(f"w{number}", **place, at=now + 50 + late)
        worker.claim(toy.unit_name(2 * number))
        for item in (2 * number, 2 * number + 1):
            worker.attempt(item, at=now + 50 * (number + 1) + late)
        worker.release(at=now + 50 * (number + 1) + late)

    found = compare(toy.view(), ManualClock(now + 200), plan)

    assert found["workers"] == 2
    assert found["real_s"] == pytest.approx(100.0, abs=60.0)


FORECAST: dict[str, Any] = {"workers": 1, "time_s": {"low": 1, "median": 1.5, "high": 2}}
KEPT: dict[str, Any] = {"format": 1, "run": "r", "at": 0.0, "choices": [{"forecast": FORECAST}]}
DAMAGED: list[dict[str, Any]] = [
    {"at": "now"},
    {"choices": [{}]},
    {"now": {**FORECAST, "time_s": {"low": 1, "median": 2, "high": "late"}}},
]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"format": 2, "choices": []}', "{}"),
        *(json.dumps({**KEPT, **change}) for change in DAMAGED),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)

    with pytest.raises(ConfigError, match=r"plan\.json: not a plan of format 1"):
        read_plan(tmp_path / "plan.json")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(load_commands("plan"), ["plan", *arguments])


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("plan.md", "plan.svg", "plan.json")]
    outs = [word for file in files for word in ("-o", str(file))]

    found = call("--items", "50", "--item-time", "3s", "--nodes", "2,1", "--json", *outs)

    assert found.exit_code == 0, found.output
    plan = json.loads(found.stdout)
    assert [choice["nodes"] for choice in plan["choices"]] == [1, 2]
    assert json.loads(files[2].read_text()) == plan
    assert files[0].read_text().startswith("# Plan of a run to come")
    assert files[1].read_text().startswith("<svg")


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
        (["--check", "plan.json", "--nodes", "3"], "--nodes cannot be combined with --check"),
        (["--check", "plan.json", "-o", "x.svg"], "--out cannot be combined with --check"),
        (["--items", "5", "-o", "x.pdf"], "unknown format '.pdf'"),
        (["--check", "nowhere.json"], "nowhere.json: No such file"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str) -> None:
    found = call(*arguments)

    assert isinstance(found.exception, ConfigError)
    assert said in found.exception.message
