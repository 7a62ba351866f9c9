"""Forecasts: lengths of items that are left, who does them when, and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.planning.forecast import Forecaster, Guess
from hpc_toolkit.planning.plan import typed_work
from hpc_toolkit.planning.work import Batch, LearnedDurations, Seen, StageWork, Work, context


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
