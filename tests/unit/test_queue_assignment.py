"""Which unit next: free ones, groups, those of the dead; and how long items take."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.queue.affinity import FreshUnits
from hpc_toolkit.queue.assignment import Assignment, Picker
from hpc_toolkit.queue.leases import Liveness, Verdict
from hpc_toolkit.queue.left import Rest
from hpc_toolkit.queue.pacing import Pacing
from hpc_toolkit.queue.units import Unit, claim_name
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.run import Run, create_run
from hpc_toolkit.rundir.layout import Manifest
from tests.manualclock import ManualClock
from tests.replacedcalls import CountedCalls
from tests.toyrun import ToyRun, ToyWorker, spec_of

DEAD = Verdict(alive=False, evidence="lease", host="there")
NOTHING = ("", None)


class FakeLiveness:
    """Verdicts as the test says; whoever is not named lives."""

    def __init__(self) -> None:
        self.verdicts: dict[str, Verdict] = {}

    def names(self) -> list[str]:
        return sorted(self.verdicts)

    def verdict(self, worker: str) -> Verdict:
        return self.verdicts.get(worker, Verdict(alive=True))

    def lease_left_s(self, _worker: str) -> float:
        return float("inf")

    def is_behind(self, _worker: str, _size: int) -> bool:
        return False


class Taker:
    """A picker with its view; ``dead``: a worker that it holds for dead."""

    def __init__(self, toy: ToyRun, name: str = "taker", dead: str = "") -> None:
        self.liveness = FakeLiveness()
        if dead:
            self.liveness.verdicts[dead] = DEAD
        self.clock = ManualClock()
        self.worker = toy.worker(name)
        self.view: RunView = toy.view()
        self.picker = Picker(self.view, self.liveness, self.clock, name)  # type: ignore[arg-type]

    def fresh(self) -> Assignment | None:
        return self.picker.fresh(NOTHING)


def taken(found: Assignment | None) -> tuple[str, int] | None:
    return None if found is None else (found.unit.name, found.generation)


def test_items_that_the_worker_itself_added_are_taken_before_the_next_poll(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 1, unit=1, sealed=False)
    taker = Taker(toy)
    assert taken(taker.fresh()) == (toy.unit_name(0), 1)
    toy.add([{"id": 1}])
    assert taker.picker.fresh(NOTHING, news=False) is None
    taker.view.poll_logs()  # as after it published what follows its result
    found = taker.picker.fresh(NOTHING, news=False)
    assert found is not None
    assert taker.picker.polled == 0


def test_a_worker_lists_the_claims_only_after_a_lost_race(fast_dir: Path) -> None:
    """The list of a run of thousands has tens of thousands, and all workers start at once."""
    toy = ToyRun(fast_dir / "r", 1, unit=1)
    takers = [Taker(toy, name) for name in "ab"]

    listed = []
    for one in takers:
        with CountedCalls() as counted:
            assert (one.fresh() is None) == (one is takers[1])
        listed.append(sum(name == "claims" for call, name in counted.calls if call == "listdir"))

    assert listed == [0, 1]


def owner(toy: ToyRun, unit: str, generation: int) -> str:
    return os.readlink(toy.stage_paths.claims / claim_name(unit, generation))


def test_the_log_of_a_complete_stage_is_not_read_before_each_claim(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 2, unit=2)
    taker = Taker(toy)
    toy.worker("w").work(toy.unit_name(0), i0="done", i1="done")
    assert taker.fresh() is None
    assert taker.picker.polled == 1
    taker.view.poll()

    assert taker.fresh() is None
    assert taker.picker.polled == 0


def test_i6_two_workers_with_the_same_view_share_the_units(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 12, unit=2)
    first, second = Taker(toy, "first"), Taker(toy, "second")

    found: list[tuple[str, int] | None] = []
    while len(found) < 6:
        found += [taken(one) for one in (first.fresh(), second.fresh()) if one is not None]

    assert len(set(found)) == 6
    assert first.fresh() is None
    assert second.fresh() is None


def by_checkpoint(root: Path, items: list[dict[str, Any]]) -> RunView:
    manifest = Manifest(run="r", stages=(spec_of(group_by="checkpoint"),))
    return create_run(root / "r", manifest, {"items": items}, sealed=True).view


def test_fresh_begins_the_groups_that_take_longest_as_others_of_their_kin_did(
    fast_dir: Path,
) -> None:
    """A checkpoint of the large model has fewer layers here, and takes longer."""
    items: list[dict[str, Any]] = [
        {"checkpoint": f"{model}/step{step}", "layer": layer}
        for model, layers in (("small", 3), ("large", 2))
        for step in range(4)
        for layer in range(layers)
    ]
    view = by_checkpoint(fast_dir, items)
    picker = Picker(view, FakeLiveness(), ManualClock(), "w")  # type: ignore[arg-type]
    worker, order = ToyWorker(view.paths, "w"), []
    loaded: tuple[str, str | None] = NOTHING
    while (found := picker.fresh(loaded)) is not None:
        loaded = ("items", found.stage.group_of(found.unit))
        order.append(str(loaded[1]).partition("/")[0].strip('"'))
        worker.begin(found.unit.name, 1)
        for item in found.unit.items:
            worker.attempt(item)
        worker.release(seconds=found.unit.count * (1.0 if order[-1] == "small" else 10.0))
        view.poll_journal("w")

    # While nothing is known by the number of items, and then each model once.
    assert order == ["small"] * 3 + ["large"] * 2 * 4 + ["small"] * 3 * 3


def test_groups_that_others_claimed_are_weighed_once_for_all(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a worker among thousands chooses for seconds after it listed the claims."""
    view = by_checkpoint(fast_dir, [{"checkpoint": f"step{step}"} for step in range(40)])
    picker = Picker(view, FakeLiveness(), ManualClock(), "w")  # type: ignore[arg-type]
    assert picker.fresh(NOTHING) is not None
    stage, other = view.stages["items"], ToyWorker(view.paths, "other")
    weighed: list[str | None] = []
    for unit in stage.state.units:
        other.claim(unit)
    view.poll_claims()

    def precedence(group: str | None) -> float:
        weighed.append(group)
        return 1.0

    monkeypatch.setattr(stage.durations, "precedence", precedence)

    assert picker.fresh(NOTHING) is None
    assert len(weighed) < 40


def test_i3_the_unit_of_a_dead_owner_is_free_at_once(toy: ToyRun) -> None:
    dead = toy.worker("dead")
    dead.claim(toy.unit_name(0))
    dead.attempt(0)
    taker = Taker(toy, dead="dead")

    found = taker.picker.takeover()

    assert taken(found) == ("000001-0", 2)
    assert found is not None
    assert found.died == ("dead", DEAD)
    assert found.stage.state.pending(found.unit.name) == [1, 2, 3]


def test_i3_a_journal_that_no_listing_shows_yet_is_read_before_its_unit_is_taken(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing may be a minute old; the claim names the journal."""
    dead = toy.worker("dead")
    taker = Taker(toy, dead="dead")
    dead.claim(toy.unit_name(0))
    dead.attempt(0)
    monkeypatch.setattr(taker.view, "poll_journals", lambda: None)

    found = taker.picker.takeover()

    assert found is not None
    assert found.stage.state.pending(found.unit.name) == [1, 2, 3]


def test_i5_a_late_release_of_an_older_generation_frees_nothing(toy: ToyRun) -> None:
    frozen, owner_now = toy.worker("frozen"), toy.worker("owner")
    frozen.claim(toy.unit_name(0), 1)
    owner_now.claim(toy.unit_name(0), 2)
    frozen.attempt(0, "failed")
    frozen.release()

    assert Taker(toy).picker.takeover() is None


def test_i5_a_unit_that_was_taken_over_is_not_taken_by_its_old_owner(toy: ToyRun) -> None:
    """The owner was declared dead; it wakes up with an old view."""
    taker = Taker(toy, "old")
    assert taken(taker.fresh()) == ("000001-0", 1)
    toy.worker("new").claim(toy.unit_name(0), 2)

    assert taker.picker.takeover() is None
    assert taker.view.stages["items"].claims.overtaken("000001-0", 1)


def test_a_claim_that_cannot_be_read_is_timed_like_a_silent_owner(toy: ToyRun) -> None:
    (toy.stage_paths.claims / claim_name("000001-0", 1)).write_bytes(b"")
    taker = Taker(toy)

    assert taker.picker.takeover() is None
    taker.liveness.verdicts["unreadable-items-000001-0.1"] = DEAD

    found = taker.picker.takeover()
    assert taken(found) == ("000001-0", 2)


def test_i6_a_stale_view_loses_the_race_and_takes_nothing(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.worker("dead").claim(toy.unit_name(0), 1)
    taker = Taker(toy, dead="dead")
    toy.worker("quicker").claim(toy.unit_name(0), 2)
    monkeypatch.setattr(taker.view, "poll_claims", lambda: None)

    assert taker.picker.takeover() is None
    assert owner(toy, "000001-0", 2) == "quicker"


GROWS: dict[str, Any] = {"needs": {"memory": 1}, "retry": {"on": "oom", "memory": "x2", "up_to": 4}}


def rest_of(taker: Taker) -> Rest:
    return Rest(taker.picker, 20.0)


def small_taker(toy: ToyRun) -> Taker:
    """It has no more than the first needs."""
    taker = Taker(toy, "small")
    taker.picker.holds = lambda _stage, growth: growth < 1
    return taker


def test_a_unit_whose_pending_items_all_need_more_is_left_to_other_workers(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 4, unit=2, **GROWS)
    worker = toy.worker("w")
    worker.work(toy.unit_name(0), i0="short", i1="failed")
    worker.work(toy.unit_name(2), i2="short", i3="done")
    small, large = small_taker(toy), Taker(toy, "large")

    # Item 1 failed for another reason, so its unit is for both; item 2 is for the large one.
    assert not rest_of(small).is_for_others
    assert taken(small.picker.takeover()) == (toy.unit_name(0), 2)
    assert taken(large.picker.takeover()) == (toy.unit_name(2), 2)
    small.worker.begin(toy.unit_name(0), 2)
    small.worker.attempt(1)
    small.worker.release()
    for taker in (small, large):
        taker.view.poll()
    assert small.picker.takeover() is None
    assert [rest_of(one).is_for_others for one in (small, large)] == [True, False]


def test_a_small_worker_waits_while_items_may_be_added(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 1, sealed=False, **GROWS)
    worker = toy.worker("w")
    worker.work(toy.unit_name(0), i0="short")
    small = small_taker(toy)

    assert not rest_of(small).is_for_others
    toy.log().seal()
    small.view.poll()
    assert rest_of(small).is_for_others


def test_a_small_worker_waits_only_while_others_can_hold_what_its_items_follow(
    fast_dir: Path,
) -> None:
    stages = (spec_of("first", needs={"gpus": 4}), spec_of("second", after=("first",)))
    manifest = Manifest(run="r", stages=stages)
    run = create_run(fast_dir / "r", manifest, {"first": [{"id": 1}]}, sealed=True)
    clock, liveness, view = ManualClock(), FakeLiveness(), RunView(run.paths, manifest)
    view.poll()
    picker = Picker(view, liveness, clock, "small")  # type: ignore[arg-type]
    picker.holds = lambda spec, _growth: not spec.needs
    rest = Rest(picker, 20.0)

    def looks(*, after: float) -> bool:
        clock.advance(after)
        return rest.is_for_others

    for name, gpus in (("small", 0), ("alike", 0), ("large", 4)):
        ToyWorker(run.paths, name, place={"has": {"gpus": gpus}})
        liveness.verdicts[name] = Verdict(alive=name != "large")
    # A worker that has the GPUs may be about to start, and its unit is not claimed at once.
    assert not looks(after=0)
    assert not looks(after=19)
    liveness.verdicts["large"] = Verdict(alive=True)
    for _ in range(3):
        assert not looks(after=20)
    liveness.verdicts["large"] = Verdict(alive=False, finished=True)
    assert [looks(after=19), looks(after=1), looks(after=19), looks(after=1)] == [False] * 3 + [
        True
    ]
    # What it sees after an hour of work is a first look again.
    assert not looks(after=3600)
    assert looks(after=20)


GROUPS = ["a", "b", "c"]


def units_in(*groups: int) -> list[Unit]:
    return [Unit(1, first, 1, group) for first, group in enumerate(groups)]


def by_group(unit: Unit) -> str | None:
    return json.dumps(GROUPS[unit.group]) if unit.group >= 0 else None


@given(st.lists(st.integers(-1, 2), max_size=60), st.text(max_size=3))
def test_every_unit_is_chosen_once(groups: list[int], seed: str) -> None:
    fresh = FreshUnits(seed)
    units = units_in(*groups)
    fresh.add(units, by_group)

    chosen = []
    while (unit := fresh.choose(None, lambda _: 1.0)) is not None:
        chosen.append(unit)

    assert sorted(unit.first for unit in chosen) == list(range(len(units)))


def test_the_group_with_most_left_is_helped_when_all_are_begun() -> None:
    fresh = FreshUnits("seed")
    units = units_in(0, 0, 1, 1, 1, 1)
    fresh.add(units, by_group)
    claimed = {units[0], units[2]}
    fresh.prune(lambda unit: unit in claimed)

    unit = fresh.choose(None, lambda _: 1.0)

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
        unit.first for _ in range(5) for one in fresh if (unit := one.choose(None, lambda _: 1.0))
    ]

    assert {place // 100 for place in chosen} == {0, 1, 2, 3}
    assert min(chosen) < 16
    assert fresh[0].choose(None, lambda _: 1.0) is not None


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
        worker.work(toy.unit_name(2 * number), 1, **{f"i{2 * number}": "done"})
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


def test_a_death_nearby_is_cared_for_before_a_group_is_begun(interrupted: ToyRun) -> None:
    one = Choosing(interrupted, restart=0)
    assert one.next() not in begun(interrupted)
    one.picker.help_first = True

    found = {one.next() for _ in range(10)}

    assert found == begun(interrupted)
