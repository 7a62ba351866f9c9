"""The state of items: known answers, and a second opinion on any journals (R7, R8, R11, R15)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.queue.control import SILENT_NODE
from hpc_toolkit.queue.left import pending_needs
from hpc_toolkit.queue.state import MAX_DEATHS, Death, is_killer
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.status import read_status
from hpc_toolkit.rundir import files, journal
from hpc_toolkit.system.needs import needs_after
from tests.manualclock import ManualClock
from tests.oracle import Told, expect, growth_of
from tests.toyrun import ToyRun

WORKERS = ["wa", "wb", "wc"]
ITEMS, UNIT = 5, 3
KINDS = ["done", "done", "done", "failed", "failed", "short", "short", "permanent"]
STEPS = 2
RETRY: dict[str, Any] = {
    "needs": {"memory": 1},
    "retry": {"on": "oom", "memory": "x2", "up_to": 4},
    "sealed": False,
}


@dataclass(frozen=True)
class PassPlan:
    """What one worker writes under one generation."""

    worker: str
    unit: int
    """First item of the unit."""
    generation: int
    attempts: tuple[tuple[int, str], ...]
    released: bool
    death: int | None


@st.composite
def plans(draw: st.DrawFn) -> list[PassPlan]:
    """Passes in the order in which they are written; a generation has one owner."""
    found = []
    for first in range(0, ITEMS, UNIT):
        items = range(first, min(first + UNIT, ITEMS))
        for generation in range(1, draw(st.integers(0, 5)) + 1):
            kinds = st.sampled_from(KINDS)
            order = draw(st.permutations(list(items)))
            tried = draw(st.integers(0, len(order)) | st.just(len(order)))
            attempts = tuple((item, draw(kinds)) for item in order[:tried])
            death = draw(st.none() | st.none() | st.sampled_from(list(items)))
            worker = draw(st.sampled_from(WORKERS))
            released = draw(st.booleans())
            found.append(PassPlan(worker, first, generation, attempts, released, death))
    return draw(st.permutations(found))


def write(toy: ToyRun, passes: list[PassPlan]) -> dict[int, list[Told]]:
    """Write the journals; the attempt lines by item."""
    workers = {name: toy.worker(name) for name in WORKERS}
    told: dict[int, list[Told]] = {item: [] for item in range(ITEMS)}
    for number, plan in enumerate(passes):
        worker = workers[plan.worker]
        worker.begin(toy.unit_name(plan.unit), plan.generation)
        for item, kind in plan.attempts:
            value = {"n": number, "item": item}
            worker.attempt(item, kind, **({"value": value} if kind == "done" else {}))
            told[item].append(Told(plan.generation, plan.worker, number, kind, value))
        if plan.death is not None:
            worker.death(plan.death)
        if plan.released:
            worker.release()
    return told


def everything(view: RunView) -> dict[str, Any]:
    """All that is derived from a view."""
    view.poll_claims()
    view.poll()
    stage = view.stages["items"]
    return {
        "rows": gather(view, "items", partial=True).rows,
        "states": {
            name: [(item, str(state)) for item, state in stage.states(unit)]
            for name, unit in stage.state.units.items()
        },
        "open": set(stage.state.open),
        "released": {name: set(unit.released) for name, unit in stage.state.units.items()},
        "deaths": {name: unit.deaths for name, unit in stage.state.units.items()},
        "growth": {
            name: [stage.state.growth(unit, item) for item in unit.unit.items]
            for name, unit in stage.state.units.items()
        },
        "suspects": {name: stage.state.suspects(name) for name in stage.state.units},
        "counts": read_status(view, ManualClock(), given="r").stages["items"],
        "seconds": stage.durations.seconds_of(None),
    }


@settings(max_examples=80)
@given(passes=plans(), floors=st.dictionaries(st.integers(0, ITEMS - 1), st.integers(1, 5)))
def test_i2_rows_are_what_the_rules_say_of_arbitrary_journals(
    fast_dir: Path, passes: list[PassPlan], floors: dict[int, int]
) -> None:
    toy = ToyRun(fast_dir / os.urandom(6).hex(), ITEMS, unit=UNIT, **RETRY)
    told = write(toy, passes)
    if floors:
        toy.log().add_retry([(1, item, floor) for item, floor in floors.items()])

    rows = {row["item"]["id"]: row for row in toy.rows()}
    counts = toy.reopen().status().stages["items"]

    expected = {
        item: expect(told[item], floor=floors.get(item, 0), steps=STEPS) for item in range(ITEMS)
    }
    for item, wanted in expected.items():
        if wanted.state == "pending":
            assert item not in rows
            continue
        row = rows[item]
        assert (row["state"], row["attempts"], row["value"]) == (
            wanted.state,
            wanted.attempts,
            wanted.value,
        )
        assert row["worker"] == wanted.worker or wanted.state == "failed"
    states = [wanted.state for wanted in expected.values()]
    assert (counts.done, counts.failed) == (states.count("done"), states.count("failed"))
    assert counts.left == states.count("pending")
    assert counts.duplicates == sum(wanted.duplicates for wanted in expected.values())
    assert counts.total == ITEMS


@settings(max_examples=60)
@given(passes=plans(), order=st.permutations(WORKERS), data=st.data())
def test_i2_the_order_of_reading_changes_nothing(
    fast_dir: Path, passes: list[PassPlan], order: list[str], data: st.DataObject
) -> None:
    """Journals are read in any order, in pieces, and before the segment they speak of."""
    toy = ToyRun(fast_dir / os.urandom(6).hex(), ITEMS, unit=UNIT, **RETRY)
    write(toy, passes)
    wanted = everything(toy.view())
    content = {name: toy.paths.journal(name).read_bytes() for name in WORKERS}
    view = RunView(toy.paths, toy.run.manifest)
    for name in WORKERS:
        toy.paths.journal(name).write_bytes(b"")
    if data.draw(st.booleans(), label="log first"):
        view.poll_logs()

    for name in order:
        cut = data.draw(st.integers(0, len(content[name])), label="cut")
        toy.paths.journal(name).write_bytes(content[name][:cut])
        view.poll_journals()
    for name in order:
        toy.paths.journal(name).write_bytes(content[name])
        view.poll_journal(name)

    found = everything(view)
    # What items took is learned from known units alone: a preference, not a state.
    assert {**found, "seconds": 0.0} == {**wanted, "seconds": 0.0}


@settings(max_examples=80)
@given(passes=plans(), damage=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=2))
def test_i8_passes_and_lines_give_one_state_also_after_damage(
    fast_dir: Path, passes: list[PassPlan], damage: list[tuple[float, int]]
) -> None:
    """What the sum of a pass proves is what its lines say, and damage is never hidden by a sum."""
    toy = ToyRun(fast_dir / os.urandom(6).hex(), ITEMS, unit=UNIT, **RETRY)
    write(toy, passes)
    for name, (share, byte) in zip(WORKERS, damage, strict=False):
        path = toy.paths.journal(name)
        content = bytearray(path.read_bytes())
        if content:
            content[int(share * (len(content) - 1))] = byte
            path.write_bytes(content)
    by_pass = everything(toy.view())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "_releases", lambda *_: [])
        by_line = everything(toy.view())

    assert by_pass == by_line


@pytest.mark.parametrize("order", [["wa", "wb"], ["wb", "wa"]])
def test_i5_a_second_clean_pass_is_a_duplicate_whoever_is_read_first(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, order: list[str]
) -> None:
    for generation, name in ((1, "wb"), (2, "wa")):
        toy.worker(name).work(
            toy.unit_name(0), generation, i0="done", i1="done", i2="done", i3="done"
        )
    real = files.list_names
    listed = [f"{name}.jsonl" for name in order]
    monkeypatch.setattr(
        files, "list_names", lambda path: listed if path.name == "journals" else real(path)
    )

    assert [row["worker"] for row in toy.rows()] == ["wb"] * 4
    assert toy.reopen().status().stages["items"].duplicates == 4


def test_i2_equal_generations_fall_to_the_lowest_name_then_the_first_line(toy: ToyRun) -> None:
    """Two owners of one generation, which only a power loss can make: still one answer."""
    for name in ("wb", "wa"):
        worker = toy.worker(name)
        worker.begin(toy.unit_name(0), 1)
        worker.attempt(0, value={"n": 1, "by": name})
        worker.attempt(0, value={"n": 2, "by": name})

    (row,) = toy.rows()

    assert row["value"] == {"n": 1, "by": "wa"}


def test_i3_deaths_and_claims_cost_no_attempt(toy: ToyRun) -> None:
    for generation in (1, 2, 3, 4):
        worker = toy.worker(f"w{generation}")
        worker.claim(toy.unit_name(0), generation)
        worker.death(0)
        worker.release()
    last = toy.worker("last")
    last.work(toy.unit_name(0), 5, i0="failed", i1="done")
    last.work(toy.unit_name(0), 6, i0="done")

    rows = {row["item"]["id"]: row for row in toy.rows()}

    assert rows[0]["attempts"] == 2
    assert rows[1]["attempts"] == 1
    assert toy.states()[1, 2] == "pending"
    assert toy.reopen().status().deaths == 4


def test_i9_one_permanent_line_fails_an_item_for_good(toy: ToyRun) -> None:
    worker = toy.worker("w")
    worker.work(toy.unit_name(0), i0="permanent", i1="failed", i2="done", i3="done")

    assert toy.states() == {(1, 0): "failed", (1, 1): "pending", (1, 2): "done", (1, 3): "done"}
    (row, *_) = toy.rows()
    assert (row["state"], row["error"], row["attempts"]) == ("failed", "permanent of test", 1)


def test_i5_a_late_failure_cannot_void_a_result(toy: ToyRun) -> None:
    frozen, other = toy.worker("frozen"), toy.worker("other")
    frozen.claim(toy.unit_name(0), 1)
    other.work(toy.unit_name(0), 2, i0="done", i1="done", i2="done", i3="done")

    frozen.attempt(0, "permanent")
    frozen.attempt(1, "failed")

    assert set(toy.states().values()) == {"done"}


def test_i1_a_done_line_of_any_generation_counts_for_ever(toy: ToyRun) -> None:
    first, second = toy.worker("first"), toy.worker("second")
    first.claim(toy.unit_name(0), 1)
    first.attempt(0)
    second.work(toy.unit_name(0), 2, i1="failed", i2="failed")
    second.work(toy.unit_name(0), 3, i1="permanent")

    states = toy.states()

    assert states[1, 0] == "done"
    assert toy.rows()[0]["worker"] == "first"


def test_i9_the_error_of_a_failed_row_is_the_permanent_one_else_the_last(toy: ToyRun) -> None:
    worker = toy.worker("w")
    worker.claim(toy.unit_name(0), 1)
    worker.attempt(0, "permanent", error="no weights")
    worker.attempt(1, "failed", error="first")
    worker.release()
    for generation, error in ((2, "second"), (3, "third")):
        worker.claim(toy.unit_name(0), generation)
        worker.attempt(0, "failed", error="late")
        worker.attempt(1, "failed", error=error)
        worker.release()

    assert [row["error"] for row in toy.rows()] == ["no weights", "third"]


LINES = st.lists(
    st.tuples(st.sampled_from(WORKERS), st.integers(1, 6), st.sampled_from(KINDS[3:])), max_size=8
)


@settings(max_examples=60)
@given(lines=LINES, order=st.permutations(WORKERS), floor=st.integers(0, 3), data=st.data())
def test_i2_every_reader_finds_the_same_needs_and_they_never_unfail_an_item(
    fast_dir: Path,
    lines: list[tuple[str, int, str]],
    order: list[str],
    floor: int,
    data: st.DataObject,
) -> None:
    """Lines of one generation may even differ, after a power loss."""
    toy = ToyRun(fast_dir / os.urandom(6).hex(), 1, unit=1, **RETRY)
    workers = {name: toy.worker(name) for name in WORKERS}
    told = []
    for place, (name, generation, kind) in enumerate(lines):
        workers[name].begin(toy.unit_name(0), generation)
        workers[name].attempt(0, kind)
        told.append(Told(generation, name, place, kind))
    if floor:
        toy.log().add_retry([(1, 0, floor)])
    contents = {name: toy.paths.journal(name).read_bytes() for name in WORKERS}
    view = RunView(toy.paths, toy.run.manifest)
    view.poll_logs()
    state = view.stages["items"].state
    (unit,) = state.units.values()
    seen = ["pending"]
    for name in WORKERS:
        toy.paths.journal(name).write_bytes(b"")

    for name in order:
        cut = data.draw(st.integers(0, len(contents[name])), label="cut")
        for content in (contents[name][:cut], contents[name]):
            toy.paths.journal(name).write_bytes(content)
            view.poll_journal(name)
            seen.append(str(state.item_state(unit, 0)))

    grown = growth_of(told, floor=floor, steps=STEPS)
    wanted = expect(told, floor=floor, steps=STEPS)
    assert state.growth(unit, 0) == grown
    assert seen[-1] == wanted.state
    assert seen == sorted(seen, key=["pending", "failed"].index)
    if wanted.state == "pending":
        assert state.growths(unit.unit.name) == {grown}
        wanted_now = needs_after(view.stages["items"].spec, grown)
        assert pending_needs(view.stages["items"]) == [(wanted_now, 1, 1)]
    if wanted.attempts:
        assert unit.histories[0].attempts(floor) == wanted.attempts


def test_i9_at_the_limit_of_its_retry_an_item_fails_like_others(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 1, unit=1, max_attempts=2, **RETRY)
    worker, found = toy.worker("w"), []
    for generation in range(1, 5):
        worker.claim(toy.unit_name(0), generation)
        worker.attempt(0, "short", error="MemoryError")
        worker.release()
        stage = toy.stage()
        (unit,) = stage.state.units.values()
        growth = stage.state.growth(unit, 0)
        found.append((needs_after(stage.spec, growth)["memory"], toy.states()[1, 0]))

    assert found == [(2, "pending"), (4, "pending"), (4, "pending"), (4, "failed")]
    (row,) = toy.rows()
    assert (row["state"], row["attempts"], row["error"]) == ("failed", 2, "MemoryError")
    # A retry starts again with the first needs.
    assert toy.reopen().retry() == 1
    assert pending_needs(toy.stage()) == [(RETRY["needs"], 1, 1)]


def test_i3_a_failure_for_lack_of_memory_does_not_count_against_its_host(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 3, unit=3, **RETRY)
    worker = toy.worker("w")
    for generation, kinds in enumerate(["ssf", "ss", "s"], 1):
        worker.claim(toy.unit_name(0), generation)
        for item, kind in enumerate(kinds):
            worker.attempt(item, "short" if kind == "s" else "failed")
        worker.release()

    # Item 0 failed a third time at the limit, and item 2 for another reason.
    failed = toy.stage().state.consecutive_failures["w"].failed
    assert {item for _, item in failed} == {0, 2}


def death(host: str = "h1", *, alone: bool = False, explained: str = "") -> Death:
    return Death(item=0, explained=explained, host=host, alone=alone, worker="w", evidence="lock")


def test_a_killer_has_five_deaths_on_two_hosts_or_three_alone() -> None:
    assert MAX_DEATHS == 5
    assert not is_killer([death("h1"), *[death("h2")] * 3])
    assert is_killer([death("h1"), *[death("h2")] * 4])
    assert not is_killer([death()] * 20)
    assert not is_killer([death(alone=True)] * 2 + [death()] * 3)
    assert is_killer([death(alone=True)] * 3 + [death()] * 2)


def test_i3_silent_nodes_suspect_an_item_that_ran_on_several_of_them(toy: ToyRun) -> None:
    suspected = []
    for generation, host in enumerate(["n1", "n1", "n2", "n1", "n1"], 1):
        taker = toy.worker(f"{host}-{generation}")
        taker.begin(toy.unit_name(0), generation + 1)
        facts = {"worker": "w", "host": host, "explained": SILENT_NODE, "evidence": "lease"}
        taker.death(1, generation=generation, **facts)
        suspected.append(toy.stage().state.suspects(toy.unit_name(0)).get(1, []))

    assert [*map(len, suspected)] == [0, 0, 3, 4, 5]
    assert is_killer(suspected[-1])


def test_i9_an_item_that_only_one_node_can_run_does_not_silence_it_for_ever(toy: ToyRun) -> None:
    taker, suspected = toy.worker("n2-1"), []
    for generation in range(1, 6):
        taker.begin(toy.unit_name(0), generation + 1)
        facts = {"worker": "w", "host": "n1", "explained": SILENT_NODE, "evidence": "lease"}
        taker.death(1, generation=generation, alone=True, **facts)
        suspected.append(toy.stage().state.suspects(toy.unit_name(0)).get(1, []))

    assert [*map(len, suspected)] == [0, 0, 0, 0, 5]
    assert is_killer(suspected[-1])


def test_i3_a_silent_node_suspects_nothing_beside_other_deaths(toy: ToyRun) -> None:
    taker = toy.worker("n3-1")
    for generation, (host, explained) in enumerate([("n1", ""), ("n2", SILENT_NODE)], 1):
        taker.begin(toy.unit_name(0), generation + 1)
        taker.death(1, generation=generation, worker="w", host=host, explained=explained)

    (deaths,) = toy.stage().state.suspects(toy.unit_name(0)).values()
    assert [one.host for one in deaths] == ["n1"]


def test_i5_a_late_line_never_changes_a_table(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 2, unit=2, max_attempts=1)
    frozen, worker = toy.worker("frozen"), toy.worker("worker")
    frozen.claim(toy.unit_name(0), 1)
    worker.work(toy.unit_name(0), 2, i0="failed", i1="done")
    published = toy.reopen().table().rows

    frozen.attempt(0, "done", value={"late": 1})
    frozen.attempt(1, "done", value={"late": 1})

    assert toy.reopen().table().rows == published
    assert toy.rows() == published
    assert toy.states() == {(1, 0): "failed", (1, 1): "done"}
    assert toy.reopen().status().stages["items"].failed == 1


def test_a_unit_done_in_one_pass_is_kept_as_that_pass(toy: ToyRun) -> None:
    toy.worker("w").work(toy.unit_name(0), i0="done", i1="done", i2="done", i3="done")

    (unit,) = toy.stage().state.units.values()

    assert unit.clean is not None
    assert unit.histories == {}
    assert set(toy.states().values()) == {"done"}
