"""Forecasts, what nodes make of them, and what 'hpctk submit' says of a job and the items left."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.planning.forecast import Forecaster, Guess
from hpc_toolkit.planning.nodes import Ask, ask_of, asked_line, lacks, node_of
from hpc_toolkit.planning.plan import Plan, as_lines, choose, make_plan, typed_work
from hpc_toolkit.planning.reading import read_work
from hpc_toolkit.planning.work import Batch, LearnedDurations, Seen, StageWork, Work, context
from hpc_toolkit.run import Run
from hpc_toolkit.slurm.clusters.facts import Cluster, load_cluster, parse_cluster
from hpc_toolkit.slurm.render.spec import ScriptSpec
from hpc_toolkit.submit import keeping
from hpc_toolkit.submit.keeping import jobs_with_work
from hpc_toolkit.submit.submission import left_lines
from tests.manualclock import ManualClock
from tests.replacedcalls import CountedCalls
from tests.toyrun import ToyRun
from tests.unit import jobcommands
from tests.unit.playedcampaign import Play, toy


def plain(count: int, done: int) -> StageWork:
    """Items without groups, of which ``done`` have ended after 10 s each."""
    items = tuple({"name": f"n{n}"} for n in range(count))
    places = [7919 * n % count for n in range(count)]  # workers sample the list
    seen = tuple(Seen(items[n], "", 10.0, place=places[n]) for n in range(done))
    batches = tuple(Batch("", n - done, 1, place=places[n]) for n in range(done, count))
    return StageWork(name="items", left=items[done:], batches=batches, seen=seen)


def test_equal_items_take_what_those_took_that_ended() -> None:
    found = Forecaster(Work(run="run", at=0.0, stages=(plain(1000, 50),))).forecast(4)

    assert found.time_s.low < 950 * 10 / 4 < found.time_s.high
    assert found.time_s.high < 1.4 * found.time_s.low
    assert found.time_s.median == pytest.approx(2380, rel=0.03)


def test_an_item_that_runs_for_long_takes_longer_than_it_has() -> None:
    stage, chance = plain(40, 20), np.random.default_rng(1)
    held = (Batch("", 0, 1, holder="w", age_s=500.0), *stage.batches[1:])

    models = [LearnedDurations(one) for one in (replace(stage, batches=held), stage)]
    drawn, usual = ([one.draw(chance, 1.0).batches for _ in range(50)] for one in models)

    assert min(float(one[0]) for one in drawn) >= 500.0
    # And others like it are to be expected.
    assert max(float(one[1:].max()) for one in drawn) > 100.0
    assert np.median(usual, axis=0)[1:].max() < 11.0


def test_a_guess_is_right_within_its_factor_in_9_of_10_cases() -> None:
    found = Forecaster(typed_work(2000), Guess(10.0, factor=2.0), draws=800).forecast(1).time_s

    assert found.low == pytest.approx(10_000, rel=0.15)
    assert found.median == pytest.approx(20_000, rel=0.1)
    assert found.high == pytest.approx(40_000, rel=0.15)


def test_a_million_items_are_forecast_by_their_units() -> None:
    forecaster = Forecaster(typed_work(1_000_000), Guess(30.0, factor=1.0, spread=0.1))

    found = forecaster.forecast(1, limit_s=600.0)

    assert forecaster.item_s.median == pytest.approx(30.0, rel=0.02)
    assert found.jobs is not None
    # Each end loses the 2 minutes of a start and half an item.
    assert found.jobs.median == pytest.approx(30.0e6 / (600 - 120 - 15), rel=0.02)
    assert found.time_s.median == pytest.approx(found.jobs.median * 600, rel=0.01)
    # A unit has 256 items.
    assert forecaster.largest_s == pytest.approx(256 * 30.0, rel=0.05)


def queue(*batches: Batch) -> StageWork:
    """A stage with a group ``a`` or ``b`` in each batch, and nearly certain durations: 1 s an
    item, 10 s a load."""
    count = sum(batch.count for batch in batches)
    items = tuple(
        {"group": batch.group.strip('"')} for batch in batches for _ in range(batch.count)
    )
    firsts = [sum(batch.count for batch in batches[:n]) for n in range(len(batches))]
    return StageWork(
        name="items",
        group_by="group",
        left=items,
        batches=tuple(replace(b, first=n) for b, n in zip(batches, firsts, strict=True)),
        seen=(Seen({"group": "a"}, '"a"', 1.0),) * 4000,
        loads_s=(10.0,) * 200,
        attempts=count,
    )


def batch(group: str, count: int = 1, **more: Any) -> Batch:
    return Batch(f'"{group}"', 0, count, **more)


A = context("items", '"a"')


@pytest.mark.parametrize(
    ("batches", "workers", "expected"),
    [
        # One worker keeps to the group that it has loaded: two loads.
        ([batch("a"), batch("b"), batch("a")], 1, 23.0),
        # The longest group is begun first; the worker of the short one loads it to help.
        ([batch("b"), *[batch("a")] * 9], 2, 22.0),
        # A living worker goes on with its batch and need not load again.
        ([batch("a", 5, holder="w1"), batch("a")], {"w1": A}, 6.0),
        ([batch("a", 5, holder="w1", age_s=0.5), batch("a")], {"w1": A}, 5.5),
        # The age of a batch that is loading is a part of its load.
        ([batch("a", 5, holder="w1", age_s=4.0, loading=True)], {"w1": ""}, 11.0),
        # The batches of a dead worker are waiting.
        ([batch("a", 5, holder="dead")], {"w1": A}, 5.0),
    ],
)
def test_units_are_scheduled_as_the_queue_hands_them_out(
    batches: list[Batch], workers: int | dict[str, str], expected: float
) -> None:
    living = workers if isinstance(workers, dict) else {}
    work = Work(run="run", at=0.0, stages=(queue(*batches),), workers=living)

    found = Forecaster(work).forecast(None if living else int(str(workers)))

    assert found.time_s.median == pytest.approx(expected, rel=0.2)


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
NODE = node_of(SITE)


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


def test_a_list_is_opened_once_for_all_of_its_units(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    view = toy.run.view()
    (segment,) = view.stages["items"].log.segments.values()

    with CountedCalls() as counted:
        read_work(view, toy.clock, given="run")

    assert counted.opened().count(segment.path.name) == 1


@pytest.mark.parametrize(
    ("given", "workers", "why"),
    [
        ({}, 4, "one for each of 4 GPUs"),
        ({"gpus": 0}, 64, "one for each of 64 CPUs"),
        ({"workers": 8}, 8, "as requested"),
    ],
)
def test_a_node_has_a_worker_for_each_gpu_else_cpu(
    given: dict[str, int], workers: int, why: str
) -> None:
    node = node_of(SITE, **given)

    assert (node.workers, node.why) == (workers, why)


def test_the_cost_is_that_of_the_node_with_its_gpus() -> None:
    assert NODE.price_per_hour == 3.0

    sure = Guess(100.0, factor=1.01, spread=0.01)
    found = choose(Forecaster(typed_work(14_400), sure, draws=20), NODE, 10)

    # 14,400 items of 100 s are 100 node-hours of 4 workers.
    assert found.node_hours.median == pytest.approx(100.0, rel=0.05)
    assert found.gpu_hours is not None
    assert found.gpu_hours.median == pytest.approx(4 * found.node_hours.median)
    assert found.cost is not None
    assert found.cost.median == pytest.approx(3 * found.node_hours.median)


call = partial(jobcommands.call, "plan")


def test_the_command_prints_its_choices_as_json() -> None:
    found = call("--items", "50", "--item-time", "3s", "--nodes", "2,1", "--json")

    assert found.exit_code == 0, found.output
    plan = json.loads(found.stdout)
    assert [choice["nodes"] for choice in plan["choices"]] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--items", "5"], "--items needs --item-time"),
        (["run", "--items", "5", "--item-time", "1s"], "plans a new run"),
        (["--items", "5", "--item-time", "soon"], "--item-time: 'soon'"),
        (["--items", "5", "--item-time", "1s", "--nodes", "1,x"], "--nodes: '1,x'"),
        (["--items", "5", "--item-time", "1s", "--nodes", "0"], "--nodes: '0'"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str) -> None:
    assert said in jobcommands.refused("plan", *arguments).message


GENERIC = load_cluster("generic")
SIXTEEN = node_of(GENERIC, workers=16)
SEARCH = {"policy": "random", "budget": 8, "pending": 2}


def played(play: Play, search: dict[str, Any], waits: int, *value: Any) -> Work:
    """A campaign of 20 arms and 3 tasks whose coordinator was killed after ``waits`` waits."""
    campaign = play(toy(search), *value)
    assert campaign.killed(waits)
    run = Run.open(campaign.root)
    return read_work(run.view, ManualClock(9e9), given="r", campaign=run.manifest.campaign)


def plan_of(work: Work, guess: Guess | None = None) -> Plan:
    return make_plan(work, guess, [1], GENERIC, SIXTEEN, draws=4)


def asked(work: Work) -> int:
    """Items of the tasks that are left, those to come aside."""
    return sum(len(s.left) - s.coming for s in work.stages if s.name == "tasks")


@pytest.mark.parametrize(
    ("search", "evaluations"),
    [
        (SEARCH, 24),
        ({**SEARCH, "evaluations": 15}, 15),
        ({**SEARCH, "evaluations": 1000}, 24),
        ({**SEARCH, "exhaustive": True}, 60),
    ],
)
def test_the_budget_of_a_campaign_is_counted(
    play: Play, search: dict[str, Any], evaluations: int
) -> None:
    work = played(play, search, 2)

    (tasks,) = work.stages
    done = len(tasks.seen)
    assert done > 0
    assert done + asked(work) + work.coming == evaluations
    items = [*tasks.left, *(one.item for one in tasks.seen)]
    assert len({(i["checkpoint"], i["layer"], i["task"]) for i in items}) == len(items)
    assert any(f"{work.coming} of those left" in line for line in as_lines(plan_of(work)))


def test_workers_beyond_what_is_asked_at_once_do_not_help(play: Play) -> None:
    work = played(play, SEARCH, 2)

    plan = plan_of(work)
    few = make_plan(work, None, [1], GENERIC, node_of(GENERIC, workers=6), draws=4)

    assert work.most_workers == 6
    many, six = (one.choices[0].forecast.time_s.median for one in (plan, few))
    assert many == pytest.approx(six)
    assert any("work for 6 workers at once" in line for line in as_lines(plan))


def test_tasks_of_which_nothing_is_known_are_left_out_and_named(play: Play) -> None:
    work = played(play, SEARCH, 0, lambda _: None)

    assert (work.coming, asked(work)) == (24, 0)
    with pytest.raises(ConfigError, match="durations are unknown"):
        plan_of(work)
    assert plan_of(work, Guess(10.0)).items == 44


def test_a_round_waits_for_the_round_before(play: Play) -> None:
    (tasks,) = played(play, SEARCH, 2).stages

    rounds = [batch.round for batch in tasks.batches if batch.round]
    count = len(set(rounds))
    assert [rounds.count(number) for number in sorted(set(rounds))] == [6] * count
    together = [replace(batch, round=1) for batch in tasks.batches if batch.round]
    coming = replace(tasks, batches=together, left=tasks.left, most_workers=None)
    apart = replace(coming, batches=[batch for batch in tasks.batches if batch.round])
    times = [
        Forecaster(Work(run="r", at=0.0, stages=(one,)), draws=40).forecast(100).time_s.median
        for one in (coming, apart)
    ]
    assert times[1] > 1.5 * times[0]


PRICED = Cluster(
    name="site",
    file="site.toml",
    nodes=64,
    gpus_per_node=4,
    price_per_gpu_hour=2.0,
    currency="USD",
    max_walltime_s=24 * 3600,
)


def ask(
    nodes: int, *, hours: float = 4, site: Cluster = PRICED, jobs: int = 1, dependency: Any = None
) -> Ask:
    spec = ScriptSpec(
        python="/usr/bin/python3",
        nodes=nodes,
        gpus_per_node=site.gpus_per_node or 0,
        ntasks_per_node=4,
        time=int(hours * 3600),
        dependency=dependency,
    )
    return ask_of(spec, site, jobs=jobs)


def measured(
    root: Path, *, items: int = 136, done: int = 100, sealed: bool = True, seconds: float = 3600.0
) -> Run:
    """A run whose first items took this long each, by a worker that has left."""
    toy = ToyRun(root / "run", items, unit=1, sealed=sealed)
    worker = toy.worker("w1")
    for item in range(done):
        worker.claim(toy.unit_name(item))
        worker.attempt(item, seconds=seconds)
        worker.release(seconds=seconds)
    worker.finish()
    return toy.reopen()


def test_the_request_is_shown_with_the_cost_of_all_of_its_time() -> None:
    plain = Cluster(name="plain", file="plain.toml")

    assert asked_line(ask(8)) == (
        "requests 8 nodes with 4 GPUs for 04:00:00: up to 128 GPU-hours, 256 USD"
    )
    assert asked_line(ask(1, hours=0.5, site=plain, jobs=3)) == (
        "each of 3 jobs requests 1 node for 00:30:00: up to 0.50 node-hours;"
        " together 1.50 node-hours"
    )


_LONG = "its items need 5 h 00 min of time"


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"gpus": 4}, ["its items need 4 GPUs; no worker of this job has more than 1"]),
        ({"time": "5h"}, [f"{_LONG}; no worker of this job has more than 4 h 00 min of time"]),
        ({"gpus": 1, "time": "2h", "licence": 1, "cpus": 1}, []),
        ({"cpus": 64}, ["its items need 64 CPUs; no worker of this job has more than 1"]),
    ],
)
def test_a_stage_that_no_worker_of_the_job_could_hold_is_named(
    needs: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", [{"n": n} for n in range(9)], command="true", needs=needs)

    assert left_lines(run, ask(1))[1] == [f"stage items: {one}" for one in said]


def test_a_time_limit_that_is_too_short_is_named_with_one_that_is_enough(tmp_path: Path) -> None:
    run = measured(tmp_path)

    (short,) = left_lines(run, ask(3, hours=2))[1]
    (longest,) = left_lines(run, ask(3, hours=0.5))[1]
    chain = left_lines(run, ask(3, hours=2, jobs=9, dependency="singleton"))[1]
    chained = left_lines(run, ask(3, hours=0.5, jobs=99, dependency="singleton"))[1]

    assert short.startswith("02:00:00 is too short for all items; --time 0")
    assert longest.startswith("00:30:00 is probably too short for the longest item")
    assert chain == []
    assert chained == [longest]


@pytest.mark.parametrize(
    ("done", "seconds", "hours", "jobs"),
    [
        *((0, 60.0, 4, 10), (16, 60.0, 4, 2), (16, 3600.0, 4, 6), (32, 60.0, 4, 1)),
        *((38, 1.0, 4, 1), (40, 60.0, 4, 0)),
        # Short jobs are worth half of their time limit.
        *((16, 60.0, 1 / 60, 6), (16, 60.0, 1 / 6, 2)),
    ],
)
def test_no_more_jobs_are_kept_than_have_work(
    tmp_path: Path, done: int, seconds: float, hours: float, jobs: int
) -> None:
    run = measured(tmp_path, items=40, done=done, seconds=seconds)

    assert jobs_with_work(run, ask(1, hours=hours)) == jobs


WITHOUT_GPUS = replace(PRICED, gpus_per_node=0)


def test_a_shape_waits_without_a_job_for_what_others_must_do_first(tmp_path: Path) -> None:
    large = {"command": "true", "items": [{"n": 1}], "needs": {"memory": "1T", "gpus": 0}}
    after = {"command": "true", "after": "large", "needs": {"gpus": 1}}
    run = Run.create(tmp_path / "run", stages={"large": large, "after": after})
    site = replace(PRICED, mem_per_node_mib=1000)

    assert jobs_with_work(run, ask(1, site=site)) == 0
    large["needs"] = {"gpus": 0}
    run = Run.create(tmp_path / "more", stages={"large": large, "after": after})
    assert jobs_with_work(run, ask(1, site=site)) == 1


@pytest.mark.parametrize(
    ("alone", "site", "jobs"), [(True, PRICED, 1), (False, PRICED, 0), (True, WITHOUT_GPUS, 0)]
)
def test_one_job_adds_the_items_that_follow_unless_another_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool, site: Cluster, jobs: int
) -> None:
    monkeypatch.setattr(keeping, "pending_needs", lambda _: [])
    first = {"command": "true", "items": [{"n": 1}], "needs": {"gpus": 0}}
    after = {"command": "true", "after": "first", "needs": {"gpus": 1}}
    run = Run.create(tmp_path / "run", stages={"first": first, "after": after})

    assert jobs_with_work(run, ask(1, site=site), alone=alone) == jobs


@pytest.mark.parametrize(
    ("given", "workers", "held", "refused"),
    [
        ({"ntasks_per_node": 4}, 8, {"cpus": 16, "gpus": 1}, {"cpus": 17}),
        # Of each task the first worker has 8 CPUs, a GPU and half of the memory.
        ({"ntasks_per_node": 4, "workers_per_task": 9}, 72, {"cpus": 8, "gpus": 1}, {"cpus": 9}),
        ({"workers_per_task": 9, "mem": 64 << 10}, 18, {"memory": 32 << 30}, {"memory": 33 << 30}),
        ({"workers_per_task": 2}, 4, {"cpus": 8}, {"nodes": 2}),
        ({"one_rank": True}, 1, {"nodes": 2, "cpus": 16}, {"nodes": 3}),
    ],
)
def test_workers_of_a_job_hold_what_its_script_gives_them(
    given: dict[str, Any], workers: int, held: dict[str, Any], refused: dict[str, Any]
) -> None:
    fields = {"ntasks_per_node": 1, "python": "/usr/bin/python3", "cpus_per_task": 16, **given}

    found = ask_of(ScriptSpec(nodes=2, gpus_per_node=4, **fields), PRICED)

    assert found.workers == workers
    assert lacks(found.node, None, held) == ""
    assert "no worker of this job has more than" in lacks(found.node, None, refused)
