"""What a worker takes next, and what it never takes (R3, R5, R6, R15)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.queue.assignment import Assignment, Picker
from hpc_toolkit.queue.claims import claim_name
from hpc_toolkit.queue.leases import Verdict
from hpc_toolkit.queue.pacing import Pacing
from hpc_toolkit.queue.view import RunView
from tests.countedcalls import CountedCalls
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun, ToyWorker

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
    """A picker with its view."""

    def __init__(self, toy: ToyRun, name: str = "taker") -> None:
        self.liveness = FakeLiveness()
        self.clock = ManualClock()
        self.worker = toy.worker(name)
        self.view: RunView = toy.view()
        self.picker = Picker(self.view, self.liveness, self.clock, name)  # type: ignore[arg-type]

    def fresh(self) -> Assignment | None:
        return self.picker.fresh(NOTHING)


def taken(found: Assignment | None) -> tuple[str, int] | None:
    return None if found is None else (found.unit.name, found.generation)


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


def grouped_picker(root: Path) -> Picker:
    """Of a stage with the groups a and b of three items, and of a second one."""
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.run import create_run
    from hpc_toolkit.rundir.layout import Manifest
    from tests.toyrun import spec_of

    stages = (spec_of("first", group_by="g"), spec_of("second"))
    items: dict[str, list[dict[str, Any]]] = {
        "first": [{"id": index, "g": group} for group in "ab" for index in range(3)],
        "second": [{"id": 1}],
    }
    run = create_run(root, Manifest(run="r", stages=stages), items, sealed=True)
    view = RunView(run.paths, run.manifest)
    return Picker(view, FakeLiveness(), ManualClock(), "w")  # type: ignore[arg-type]


def test_fresh_prefers_the_earlier_stage_and_the_loaded_group(fast_dir: Path) -> None:
    picker = grouped_picker(fast_dir / "r")

    found = [picker.fresh(("first", json.dumps("b"))) for _ in range(7)]

    groups = [one.stage.group_of(one.unit) for one in found if one is not None]
    assert groups == ['"b"'] * 3 + ['"a"'] * 3 + [None]
    assert found[-1] is not None
    assert found[-1].name.startswith("second/")


def test_fresh_begins_the_groups_that_take_longest_as_others_of_their_kin_did(
    fast_dir: Path,
) -> None:
    """A checkpoint of the large model has fewer layers here, and takes longer."""
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.run import create_run
    from hpc_toolkit.rundir.layout import Manifest
    from tests.toyrun import ToyWorker, spec_of

    items: list[dict[str, Any]] = [
        {"checkpoint": f"{model}/step{step}", "layer": layer}
        for model, layers in (("small", 3), ("large", 2))
        for step in range(4)
        for layer in range(layers)
    ]
    manifest = Manifest(run="r", stages=(spec_of(group_by="checkpoint"),))
    run = create_run(fast_dir / "r", manifest, {"items": items}, sealed=True)
    view = RunView(run.paths, run.manifest)
    picker = Picker(view, FakeLiveness(), ManualClock(), "w")  # type: ignore[arg-type]
    worker, order = ToyWorker(run.paths, "w"), []
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


def test_fresh_keeps_to_the_loaded_group_where_it_is_told_to(fast_dir: Path) -> None:
    picker = grouped_picker(fast_dir / "r")
    loaded = ("first", json.dumps("b"))
    other = Picker(picker.view, FakeLiveness(), ManualClock(), "other")  # type: ignore[arg-type]
    assert other.fresh(loaded) is not None

    found = [picker.fresh(loaded, elsewhere=False) for _ in range(4)]

    groups = [one and one.stage.group_of(one.unit) for one in found]
    assert groups == ['"b"', '"b"', None, None]
    assert picker.fresh(NOTHING, elsewhere=False) is None
    assert picker.fresh(loaded) is not None


def test_i3_the_unit_of_a_dead_owner_is_free_at_once(toy: ToyRun) -> None:
    dead = toy.worker("dead")
    dead.claim(toy.unit_name(0))
    dead.attempt(0)
    taker = Taker(toy)
    taker.liveness.verdicts["dead"] = DEAD

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
    taker = Taker(toy)
    dead.claim(toy.unit_name(0))
    dead.attempt(0)
    taker.liveness.verdicts["dead"] = DEAD
    monkeypatch.setattr(taker.view, "poll_journals", lambda: None)

    found = taker.picker.takeover()

    assert found is not None
    assert found.stage.state.pending(found.unit.name) == [1, 2, 3]


def test_a_unit_that_its_owner_finished_unseen_is_not_taken(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = toy.worker("gone")
    taker = Taker(toy)
    gone.work(toy.unit_name(0), i0="done", i1="done", i2="done", i3="done")
    taker.liveness.verdicts["gone"] = Verdict(alive=False, finished=True)
    monkeypatch.setattr(taker.view, "poll_journals", lambda: None)

    assert taker.picker.takeover() is None
    assert not (toy.stage_paths.claims / claim_name("000001-0", 2)).is_symlink()


def test_a_death_after_the_release_suspects_no_item(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner gave the unit back and died; only the release was not seen yet."""
    dead = toy.worker("dead")
    taker = Taker(toy)
    dead.work(toy.unit_name(0), i0="failed", i1="done", i2="done", i3="done")
    taker.liveness.verdicts["dead"] = DEAD
    monkeypatch.setattr(taker.view, "poll_journals", lambda: None)

    found = taker.picker.takeover()

    assert taken(found) == ("000001-0", 2)
    assert found is not None
    assert found.died is None


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


def test_only_the_newest_generation_decides_who_owns_a_unit(toy: ToyRun) -> None:
    for generation in (1, 2, 3):
        toy.worker(f"w{generation}").claim(toy.unit_name(0), generation)
    taker = Taker(toy)
    taker.liveness.verdicts |= {"w1": DEAD, "w2": DEAD}

    assert taker.picker.takeover() is None
    taker.liveness.verdicts["w3"] = DEAD
    assert taken(taker.picker.takeover()) == ("000001-0", 4)


def test_a_worker_that_finds_itself_named_works_on_the_unit(toy: ToyRun) -> None:
    """The reply to its claim was lost, and it does not know."""
    taker = Taker(toy)
    (toy.stage_paths.claims / claim_name("000001-0", 1)).symlink_to("taker")

    found = taker.picker.takeover()

    assert taken(found) == ("000001-0", 1)
    assert not (toy.stage_paths.claims / claim_name("000001-0", 2)).is_symlink()


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
    taker = Taker(toy)
    taker.liveness.verdicts["dead"] = DEAD
    toy.worker("quicker").claim(toy.unit_name(0), 2)
    monkeypatch.setattr(taker.view, "poll_claims", lambda: None)

    assert taker.picker.takeover() is None
    assert owner(toy, "000001-0", 2) == "quicker"


def test_again_reads_what_those_who_held_the_unit_before_wrote_meanwhile(toy: ToyRun) -> None:
    """One that was declared dead and woke up may have failed the killer for good."""
    woken = toy.worker("woken")
    assert woken.claim("000001-0")
    taker = Taker(toy)
    taker.liveness.verdicts["woken"] = DEAD
    second = taker.picker.takeover()
    assert second is not None
    taker.worker.begin("000001-0", 2)
    taker.worker.death(0)
    taker.worker.release()
    woken.attempt(0, "permanent")

    third = taker.picker.again(second)

    assert third is not None
    assert third.stage.state.pending("000001-0") == [1, 2, 3]


def after_a_death(toy: ToyRun, taker: Taker, worker: ToyWorker) -> tuple[list[str], str]:
    """What the next claim after a look reads, and the unit that it takes."""
    taker.liveness.verdicts[worker.name] = DEAD
    taker.picker.notice_deaths()
    pacing = Pacing(taker.clock, local=True, workers=1, lease_s=180.0, seed="")
    with CountedCalls() as counted:
        found = taker.picker.next(NOTHING, pacing)
    assert found is not None
    assert found.died is not None
    return [name for name in counted.opened() if name.endswith(".jsonl")], found.unit.name


def test_a_unit_that_a_dead_worker_had_begun_is_taken_without_reading_other_journals(
    fast_dir: Path,
) -> None:
    toy = ToyRun(fast_dir / "r", 10, unit=2)
    workers = [toy.worker(f"w{number}") for number in range(4)]
    taker = Taker(toy)
    for number, worker in enumerate(workers):
        worker.claim(toy.unit_name(2 * number))
        worker.attempt(2 * number)

    read, unit = after_a_death(toy, taker, workers[2])

    assert unit == toy.unit_name(4)
    assert set(read) <= {"w2.jsonl", "000001.jsonl"}


def test_a_unit_of_which_a_dead_worker_wrote_nothing_is_taken_by_a_scan(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 10, unit=2)
    workers = [toy.worker(f"w{number}") for number in range(4)]
    taker = Taker(toy)
    for number, worker in enumerate(workers):
        worker.claim(toy.unit_name(2 * number))

    _, unit = after_a_death(toy, taker, workers[2])

    assert unit == toy.unit_name(4)


def test_takeover_after_a_retry_finds_the_items_that_it_names(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 2, unit=2, max_attempts=1)
    toy.worker("w").work(toy.unit_name(0), i0="failed", i1="done")
    taker = Taker(toy)
    assert taker.picker.takeover() is None
    assert taker.view.complete

    toy.reopen().retry()

    found = taker.picker.takeover()
    assert taken(found) == ("000001-0", 2)
    assert found is not None
    assert found.stage.state.pending(found.unit.name) == [0]


def test_the_group_ahead_is_told_without_a_look_at_the_filesystem(fast_dir: Path) -> None:
    picker = grouped_picker(fast_dir / "r")
    first = picker.fresh(NOTHING)
    assert first is not None

    with CountedCalls() as counted:
        told = picker.next_group(first)

    assert counted.calls == []
    loaded = first.stage.group_of(first.unit)
    assert {told, loaded} == {'"a"', '"b"'}
    while loaded == first.stage.group_of(first.unit):
        found = picker.fresh(("first", loaded))
        assert found is not None
        loaded = found.stage.group_of(found.unit)
    assert loaded == told
