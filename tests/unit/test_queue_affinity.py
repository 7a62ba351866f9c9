"""Which unit next: groups, what an interruption left, and how long items take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.queue.affinity import FreshUnits
from hpc_toolkit.queue.assignment import Assignment, Picker
from hpc_toolkit.queue.leases import Liveness
from hpc_toolkit.queue.pacing import Pacing
from hpc_toolkit.queue.units import Unit
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.run import Run
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun

GROUPS = ["a", "b", "c"]


def units_in(*groups: int, count: int = 1) -> list[Unit]:
    return [Unit(1, index * count, count, group) for index, group in enumerate(groups)]


def by_group(unit: Unit) -> str | None:
    return json.dumps(GROUPS[unit.group]) if unit.group >= 0 else None


def seconds(**known: float) -> Callable[[str], float]:
    return lambda key: known.get(json.loads(key), 1.0)


@given(st.lists(st.integers(-1, 2), max_size=60), st.text(max_size=3))
def test_every_unit_is_chosen_once(groups: list[int], seed: str) -> None:
    fresh = FreshUnits(seed)
    units = units_in(*groups)
    fresh.add(units, by_group)

    chosen = []
    while (unit := fresh.choose(None, seconds())) is not None:
        chosen.append(unit)

    assert sorted(unit.first for unit in chosen) == list(range(len(units)))


def test_the_longest_group_that_nobody_began_comes_next() -> None:
    fresh = FreshUnits("seed")
    fresh.add(units_in(0, 0, 0, 1, 2, 2), by_group)

    unit = fresh.choose('"gone"', seconds(a=1.0, b=100.0, c=2.0))

    assert unit is not None
    assert unit.group == 1


def test_the_group_with_most_left_is_helped_when_all_are_begun() -> None:
    fresh = FreshUnits("seed")
    units = units_in(0, 0, 1, 1, 1, 1)
    fresh.add(units, by_group)
    claimed = {units[0], units[2]}
    fresh.prune(lambda unit: unit in claimed)

    unit = fresh.choose(None, seconds())

    assert unit is not None
    assert unit.group == 1


@pytest.mark.parametrize("ranks", [True, False])
def test_the_first_units_without_groups_are_from_the_whole_list(*, ranks: bool) -> None:
    """Forecasts need to know how long the items at the end of a sorted list take."""
    units = units_in(*[-1] * 400)
    fresh = [FreshUnits(f"w{r}", r if ranks else 0, 4 if ranks else 1) for r in range(4)]
    for one in fresh:
        one.add(units, by_group)

    chosen = [
        unit.first for _ in range(5) for one in fresh if (unit := one.choose(None, seconds()))
    ]

    assert {place // 100 for place in chosen} == {0, 1, 2, 3}
    assert min(chosen) < 16
    assert fresh[0].choose(None, seconds()) is not None


def test_workers_of_one_job_begin_with_different_units_and_help_each_other_then() -> None:
    units = [Unit(1, first, 1, -1) for first in range(20)]

    for rank in range(4):
        fresh = FreshUnits(f"w{rank}", rank, 4)
        fresh.add(units, lambda _unit: None)
        chosen = []
        while (unit := fresh.choose(None, lambda _: 1.0)) is not None:
            chosen.append(unit)

        assert chosen[:5] == units[rank::4]
        assert set(chosen) == set(units)


def all_own(count: int) -> tuple[list[Unit], Callable[[Unit], str | None]]:
    """Units of so many groups, two each."""
    units = [Unit(1, first, 1, first // 2) for first in range(2 * count)]
    return units, lambda unit: f'"g{unit.group}"'


@given(st.lists(st.integers(1, 3), min_size=1, max_size=8), st.text(max_size=3))
def test_the_group_ahead_is_the_one_that_is_begun_next(weights: list[int], seed: str) -> None:
    units, key_of = all_own(len(weights))
    fresh = FreshUnits(seed)
    fresh.add(units, key_of)
    by_key = {f'"g{group}"': float(weight) for group, weight in enumerate(weights)}
    loaded: str | None = None
    told: str | None = None

    while (unit := fresh.choose(loaded, by_key.__getitem__)) is not None:
        if key_of(unit) != loaded:
            assert loaded is None or told == key_of(unit)
            loaded = key_of(unit)
        told = fresh.next_group(loaded, by_key.__getitem__)
        assert told != loaded

    assert told is None


def test_workers_of_one_job_begin_with_groups_of_their_own_and_have_others_ahead() -> None:
    units, key_of = all_own(8)
    begun, ahead = [], []

    for rank in range(4):
        fresh = FreshUnits(f"w{rank}", rank, 4)
        fresh.add(units, key_of)
        unit = fresh.choose(None, lambda _: 1.0)
        assert unit is not None
        begun.append(key_of(unit))
        ahead.append(fresh.next_group(begun[-1], lambda _: 1.0))

    assert len({*begun, *ahead}) == 8


def test_ranks_begin_with_shares_of_equal_work_though_lengths_and_models_alternate() -> None:
    """One of the long groups and one of each model for each rank, in whatever order they come."""
    names = [f"{model}-{step}" for step in range(4) for model in ("a", "b")]
    counts = [6 if name.startswith("a") else 2 for name in names]
    units = [Unit(1, 10 * n, count, n) for n, count in enumerate(counts)]

    def key_of(unit: Unit) -> str:
        return json.dumps(names[unit.group])

    begun = []
    for rank in range(4):
        fresh = FreshUnits(f"w{rank}", rank, 4)
        fresh.add(units, key_of)
        chosen = [fresh.choose(None, lambda _: 1.0) for _ in range(2)]
        begun.append([names[unit.group] for unit in chosen if unit is not None])

    assert sorted(first for first, _ in begun) == ["a-0", "a-1", "a-2", "a-3"]
    assert sorted(second for _, second in begun) == ["b-0", "b-1", "b-2", "b-3"]


NOTHING = ("", None)


class Choosing:
    """A worker of a job, on a shared filesystem."""

    def __init__(self, toy: ToyRun, *, restart: int, workers: int = 4) -> None:
        clock = ManualClock()
        self.pacing = Pacing(clock, local=False, workers=workers, lease_s=60.0, seed="me")
        liveness = Liveness(
            toy.paths, clock, host="h", boot="b", lease_s=60.0, job="7", restart=restart
        )
        self.worker = toy.worker("me", job="7", restart=restart)
        view = RunView(toy.paths, toy.run.manifest)
        self.picker = Picker(view, liveness, clock, "me", shared=True, restarted=restart > 0)
        self._view = view

    def next(self) -> tuple[str, int] | None:
        """Take a unit and finish it."""
        found: Assignment | None = self.picker.next(NOTHING, self.pacing)
        if found is None:
            return None
        self.worker.begin(found.unit.name, found.generation)
        for item in found.stage.state.pending(found.unit.name):
            self.worker.attempt(item)
        self.worker.release()
        self._view.poll_journal("me")
        return found.unit.name, found.generation


@pytest.fixture
def interrupted(fast_dir: Path) -> ToyRun:
    """Of 40 units ten were begun by a job of ten workers that was preempted."""
    toy = ToyRun(fast_dir / "r", 80, unit=2)
    for number in range(10):
        worker = toy.worker(f"w{number}", job="7")
        worker.claim(toy.unit_name(2 * number))
        worker.attempt(2 * number)
        worker.release()
        worker.finish()
    return toy


def test_a_worker_takes_what_needs_more_nodes_or_cpus_first(fast_dir: Path) -> None:
    needs = [{"cpus": 1}, {"cpus": 8}, {"nodes": 2, "cpus": 1}, {"gpus": 1}]
    items = [{"n": number, "needs": one} for number, one in enumerate(needs)]
    view = Run.create(fast_dir / "r", items, command="true").view
    clock = ManualClock()
    liveness = Liveness(view.paths, clock, host="h", boot="b", lease_s=60.0)
    picker = Picker(view, liveness, clock, "me", shared=True)
    pacing = Pacing(clock, local=True, workers=1, lease_s=60.0, seed="me")

    found = [picker.next(NOTHING, pacing) for _ in items]

    names = [one.unit.name if one is not None else "" for one in found]
    assert [view.stages["items"].state.pending(name)[0] for name in names] == [2, 3, 1, 0]


def begun(toy: ToyRun) -> set[tuple[str, int]]:
    return {(toy.unit_name(2 * number), 2) for number in range(10)}


def test_a_worker_of_a_job_that_started_again_goes_on_with_what_was_begun(
    interrupted: ToyRun,
) -> None:
    one = Choosing(interrupted, restart=1)

    found = {one.next() for _ in range(10)}

    assert found == begun(interrupted)
    after = one.next()
    assert after is not None
    assert after[1] == 1


def test_a_worker_of_a_job_that_started_once_takes_what_nobody_began(interrupted: ToyRun) -> None:
    found = Choosing(interrupted, restart=0).next()

    assert found is not None
    assert found[1] == 1


def test_a_death_nearby_is_cared_for_before_a_group_is_begun(interrupted: ToyRun) -> None:
    one = Choosing(interrupted, restart=0)
    assert one.next() not in begun(interrupted)
    one.picker.help_first = True

    found = {one.next() for _ in range(10)}

    assert found == begun(interrupted)
