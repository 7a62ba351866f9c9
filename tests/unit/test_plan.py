"""Forecasts: lengths of items that are left, who does them when, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from simulation.cluster import simulate
from simulation.scenario import Group, Scenario

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.planning.durations import GuessedDurations, LearnedDurations
from hpc_toolkit.planning.forecast import Forecaster, Interval
from hpc_toolkit.planning.work import (
    Batch,
    Guess,
    Seen,
    StageWork,
    Work,
    context,
    typed_work,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def plain(count: int, done: int, seconds: Any, **more: Any) -> StageWork:
    """Items without groups, of which ``done`` have ended."""
    items = tuple({"name": f"n{n}", **more.get("item", lambda _: {})(n)} for n in range(count))
    places = [7919 * n % count for n in range(count)]  # workers sample the list
    seen = tuple(Seen(items[n], "", seconds(n), place=places[n]) for n in range(done))
    batches = tuple(Batch("", n - done, 1, place=places[n]) for n in range(done, count))
    return StageWork(name="items", left=items[done:], batches=batches, seen=seen)


def run_of(stage: StageWork, **workers: str) -> Work:
    return Work(run="run", at=0.0, stages=(stage,), workers=workers)


def means(stage: StageWork, draws: int = 60) -> np.ndarray[Any, Any]:
    """Median over draws of the mean seconds of the items of each batch."""
    model, chance = LearnedDurations(stage), np.random.default_rng(1)
    counts = [batch.count for batch in stage.batches]
    found: np.ndarray[Any, Any] = np.median(
        [model.draw(chance, 1.0).batches / counts for _ in range(draws)], axis=0
    )
    return found


def test_equal_items_take_what_those_took_that_ended() -> None:
    found = Forecaster(run_of(plain(1000, 50, lambda _: 10.0))).forecast(4)

    assert found.time_s.low < 950 * 10 / 4 < found.time_s.high
    assert found.time_s.high < 1.4 * found.time_s.low
    assert found.time_s.median == pytest.approx(2380, rel=0.03)


def test_an_item_that_runs_for_long_takes_longer_than_it_has() -> None:
    stage = plain(40, 20, lambda _: 10.0)
    held = (Batch("", 0, 1, holder="w", age_s=500.0), *stage.batches[1:])

    model, chance = LearnedDurations(replace(stage, batches=held)), np.random.default_rng(1)
    drawn = [model.draw(chance, 1.0).batches for _ in range(50)]

    assert min(float(one[0]) for one in drawn) >= 500.0
    # And others like it are to be expected.
    assert max(float(one[1:].max()) for one in drawn) > 100.0
    assert means(stage)[1:].max() < 11.0


def test_no_length_is_drawn_far_beyond_what_was_seen() -> None:
    stage = plain(3000, 12, lambda n: math.exp(n % 12))

    longest = max(
        LearnedDurations(stage).draw(np.random.default_rng(n), 1.0).longest_s for n in range(40)
    )

    assert longest <= 20.001 * math.exp(11)


def grouped(levels: dict[str, float], seen: dict[str, int], each: int = 10) -> StageWork:
    """Groups of items; of some of them some have ended."""
    left: list[dict[str, Any]] = []
    done, batches = [], []
    for group, level in levels.items():
        key = f'"{group}"'
        items = [{"model": group, "n": n} for n in range(each)]
        ended = seen.get(group, 0)
        done += [Seen(item, key, level * (1.0 + 0.02 * (n % 3))) for n, item in enumerate(items)][
            :ended
        ]
        if ended < each:
            batches.append(Batch(key, len(left), each - ended))
            left += items[ended:]
    return StageWork(
        name="items",
        group_by="model",
        left=tuple(left),
        batches=tuple(batches),
        seen=tuple(done),
        loads_s=(4.0,) * len(seen),
    )


def test_a_group_that_nobody_began_takes_what_its_kin_takes() -> None:
    levels = {
        f"{family}@step{n}": level for family, level in (("a", 2.0), ("b", 20.0)) for n in range(4)
    }
    stage = grouped(levels, {"a@step0": 10, "a@step1": 10, "b@step0": 10, "b@step1": 10})

    found = dict(
        zip([batch.group.strip('"') for batch in stage.batches], means(stage), strict=True)
    )

    assert found["a@step3"] == pytest.approx(2.0, rel=0.25)
    assert found["b@step3"] == pytest.approx(20.0, rel=0.25)


def test_items_of_a_kind_that_has_not_come_are_allowed_for() -> None:
    chance = np.random.default_rng(3)
    seen = np.exp(chance.normal(0.0, 0.3, 35))
    few = run_of(plain(700, 35, lambda n: float(seen[n])))
    many = run_of(plain(7000, 350, lambda n: float(seen[n % 35])))

    time_s = Forecaster(few, draws=80).forecast(1).time_s
    known = Forecaster(many, draws=50).forecast(1).time_s

    # 1 of 50 that takes 8 times as long makes the rest 14 % longer, and half of such lists show
    # none of them among the first 35.
    assert time_s.high > 1.14 * 665 * seen.mean()
    assert known.high / known.low < 1.35
    assert time_s.median == pytest.approx(665 * seen.mean(), rel=0.1)


def test_attempts_that_fail_again_take_time_again() -> None:
    calm = plain(400, 100, lambda _: 10.0)
    flaky = replace(calm, attempts=150, retried=50)

    times = [Forecaster(run_of(stage)).forecast(2).time_s.median for stage in (calm, flaky)]

    assert times[1] / times[0] == pytest.approx(1.5, rel=0.1)


def test_the_first_item_of_a_worker_is_not_typical_of_the_rest() -> None:
    stage = plain(60, 20, lambda n: 30.0 if n < 2 else 1.0)
    seen = tuple(replace(one, worker=f"w{n % 2}") for n, one in enumerate(stage.seen))

    found = Forecaster(run_of(replace(stage, seen=seen))).forecast(1).time_s

    # The first item of the next worker takes 30 s as well, and the 39 others 1 s.
    assert found.median == pytest.approx(69.0, rel=0.1)


FIRST_S = {"story": 20.0, "words": 4.0, "pairs": 1.0}
AGAIN_S = {"story": 2.0, "words": 0.4, "pairs": 1.0}
"""The first evaluation of a task on a checkpoint reads the texts, and later ones reuse them."""


def evaluations(seen: int, repeats: int) -> tuple[StageWork, float]:
    """Tasks on 4 layers of 20 checkpoints; of some checkpoints one layer was evaluated, and of a
    few of these another one. Also the seconds that one worker takes for the rest.
    """
    of = [
        (f"step{step}", layer, task)
        for step in range(20)
        for layer in (1, 2, 3, 4)
        for task in FIRST_S
    ]
    done, left, rest_s, had = [], [], 0.0, set()
    for checkpoint, layer, task in of:
        number = int(checkpoint[4:])
        item = {"checkpoint": checkpoint, "layer": layer, "task": task}
        if number < seen and layer == 1:
            done.append(Seen(item, f'"{checkpoint}"', FIRST_S[task], "w", number))
        elif number < repeats and layer == 2:
            done.append(Seen(item, f'"{checkpoint}"', AGAIN_S[task], "w", number))
        else:
            left.append(item)
            rest_s += AGAIN_S[task] if (checkpoint, task) in had else FIRST_S[task]
            had.add((checkpoint, task))
    batches = tuple(Batch(f'"{item["checkpoint"]}"', n, 1) for n, item in enumerate(left))
    stage = StageWork(
        name="tasks",
        group_by="checkpoint",
        kind_by="task",
        left=tuple(left),
        batches=batches,
        seen=tuple(done),
    )
    return stage, rest_s


def test_repeats_of_a_task_on_a_loaded_checkpoint_are_short() -> None:
    stage, rest_s = evaluations(seen=10, repeats=2)

    found = Forecaster(run_of(stage)).forecast(1).time_s

    assert found.median == pytest.approx(rest_s, rel=0.2)
    assert found.low < rest_s < found.high < 3 * found.low


@pytest.mark.parametrize("age_s", [0.0, 1e-3])
def test_the_first_item_of_a_kind_is_long_once_if_it_runs(age_s: float) -> None:
    stage, _ = evaluations(seen=10, repeats=2)
    item = {"checkpoint": "step10", "layer": 1, "task": "story"}
    held = Batch('"step10"', 0, 1, holder="w", age_s=age_s)
    work = run_of(replace(stage, left=(item,), batches=(held,)), w=context("tasks", held.group))

    for workers in (None, 1):
        found = Forecaster(work).forecast(workers).time_s
        assert found.median == pytest.approx(20.0, rel=0.3)
        assert found.high < 60.0


def along(count: int, seen: Sequence[int], seconds: Callable[[int], float]) -> StageWork:
    """A list without groups, of which the items at some places have ended."""
    items = tuple({"name": f"n{n}"} for n in range(count))
    rest = [place for place in range(count) if place not in seen]
    return StageWork(
        name="items",
        left=tuple(items[place] for place in rest),
        batches=tuple(Batch("", n, 1, place=place) for n, place in enumerate(rest)),
        seen=tuple(Seen(items[place], "", seconds(place), place=place) for place in seen),
    )


COURSES: dict[str, Callable[[float], float]] = {
    "linear": lambda at: 0.2 + 1.8 * at,
    "falling": lambda at: 0.2 * 16.0 ** (1 - at),
    "blocks": lambda at: 0.2 * 4.0 ** int(3 * at),
}


@pytest.mark.parametrize(("course", "begun"), [("linear", 20), ("falling", 240), ("blocks", 20)])
def test_items_between_places_that_were_seen_take_what_those_take(course: str, begun: int) -> None:
    noise = np.exp(np.random.default_rng(4).normal(0.0, 0.3, 800))

    def seconds(place: int) -> float:
        return COURSES[course](place / 800) * float(noise[place])

    seen = [*range(begun), *range(begun + 40, 800, 37)]
    stage = along(800, seen, seconds)
    real_s = sum(seconds(place) for place in range(800) if place not in seen)

    found = Forecaster(run_of(stage)).forecast(1).time_s

    assert found.low < real_s < found.high < 3 * found.low
    assert found.median == pytest.approx(real_s, rel=0.25)


def test_nothing_known_and_no_guess_is_refused() -> None:
    with pytest.raises(ConfigError, match="durations are unknown"):
        Forecaster(typed_work(10))


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


def test_a_guess_for_batches_is_the_sum_of_items() -> None:
    guess = Guess(10.0, factor=1.0, spread=0.5)
    batches = (Batch("", 0, 1), Batch("", 1, 9))
    stage = StageWork(name="items", left=({},) * 10, batches=batches)
    chance = np.random.default_rng(1)
    items = 10.0 * np.exp(0.5 * chance.standard_normal((4000, 10)) - 0.125)

    drawn = [GuessedDurations(stage, guess).draw(chance, 1.0) for _ in range(4000)]

    quarters = (0.05, 0.5, 0.95)
    for found, true in (
        ([one.batches[0] for one in drawn], items[:, 0]),
        ([one.batches[1] for one in drawn], items[:, 1:].sum(axis=1)),
    ):
        assert np.quantile(found, quarters) == pytest.approx(np.quantile(true, quarters), rel=0.1)
    squares = np.sum(items**2, axis=1)
    assert np.mean([one.squares for one in drawn]) == pytest.approx(squares.mean(), rel=0.1)
    assert drawn[0].longest_s == pytest.approx(items.max(axis=1).mean(), rel=0.3)


def test_what_is_done_by_a_limit_adds_up() -> None:
    forecaster = Forecaster(typed_work(300), Guess(10.0, factor=1.01, spread=0.01))

    early, late = (forecaster.forecast(1, within_s=limit) for limit in (1500.0, 6000.0))

    assert early.within == 0.0
    assert early.share is not None
    assert early.share.median == pytest.approx(0.5, abs=0.05)
    assert late.within == 1.0
    assert late.share == Interval(1.0, 1.0, 1.0)


def queue(*batches: Batch, seconds: float = 1.0, load_s: float = 0.0) -> StageWork:
    """A stage with a group ``a`` or ``b`` in each batch, and nearly certain durations."""
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
        seen=(Seen({"group": "a"}, '"a"', seconds),) * 4000,
        loads_s=(load_s,) * 200 if load_s else (),
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
    work = replace(run_of(queue(*batches, load_s=10.0)), workers=living)

    found = Forecaster(work).forecast(None if living else int(str(workers)))

    assert found.time_s.median == pytest.approx(expected, rel=0.2)


def test_living_workers_finish_their_batches_even_if_a_search_keeps_fewer_busy() -> None:
    held = [batch("a", 5, holder=f"w{n}") for n in range(3)]
    work = run_of(replace(queue(*held), most_workers=1), **dict.fromkeys(("w0", "w1", "w2"), A))

    found = Forecaster(work).forecast(None)

    assert found.time_s.median == pytest.approx(5.0, rel=0.2)
    assert found.worker_s.median == pytest.approx(15.0, rel=0.2)


def test_list_scheduling_is_near_the_queues_own_code() -> None:
    guess = Guess(5.0, load_s=8.0, factor=1.0001, spread=0.001)
    scenario = Scenario(groups=(Group((5.0,) * 10, load_s=8.0),) * 12, workers=4)

    listed = Forecaster(typed_work(120, 12), guess).forecast(4).time_s.median

    assert listed == pytest.approx(simulate(scenario).makespan_s, rel=0.05)
