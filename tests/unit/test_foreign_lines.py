"""Lines whose checksum is right although they are not about an item of the run (R7, R8).

User code that wrote to the pipes of a worker left such lines in journals.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.cli.gathering import read_facts
from hpc_toolkit.cli.reading import _log_parts, life_lines
from hpc_toolkit.doctor.runfiles import check_run
from hpc_toolkit.doctor.sides import Verdict
from hpc_toolkit.planning.reading import read_work
from hpc_toolkit.queue.left import what_is_left
from hpc_toolkit.results.activity import Trace, read_activity
from hpc_toolkit.results.explain import explain, find_item
from hpc_toolkit.results.gather import NotCompleteError
from hpc_toolkit.results.history import History
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.journal import encode_line
from tests.manualclock import ManualClock
from tests.oracle import Told, expect
from tests.toyrun import ToyRun

ITEMS, UNIT = 8, 4
KINDS = ("done", "failed", "permanent")
VALUES = [True, -1, 0, 1.0, 1.5, 99, 10**30, 10**400, "3", "", None, [], {}, [1], float("1e308")]
PLACE = {
    "unit": st.sampled_from(["items/000001-0", "items/000001-4"]),
    "generation": st.integers(1, 4),
    "item": st.integers(0, ITEMS + 4),
    "at": st.floats(0, 2e9),
    "seconds": st.floats(0, 1e9),
}
OTHERS = {
    **{kind: {} for kind in KINDS},
    "death": {"alone": False, "worker": "w1", "host": "h", "evidence": "lock", "explained": ""},
    "release": {"lines": 4, "done": 4, "failed": 0, "start": 0, "sum": "00000000"},
    "unknown": {},
}


@st.composite
def lines(draw: st.DrawFn) -> dict[str, Any]:
    """A line of some type, in which up to two fields may be anything."""
    kind = draw(st.sampled_from([*KINDS, *KINDS, "death", "release", "unknown"]))
    record = {"type": kind, **{name: draw(one) for name, one in PLACE.items()}, **OTHERS[kind]}
    record |= {"value": {"n": 1}} if kind == "done" else {"error": "of a test"}
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(record)))
        if draw(st.booleans()):
            record.pop(name, None)
        else:
            units = ["items/000009-0", "nosuch/000001-0", "items", "/"]
            record[name] = draw(st.sampled_from(units if name == "unit" else VALUES))
    return {"type": kind} | record  # each line has a type


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 10**11


def is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 10**11  # type: ignore[operator]


def counts(record: dict[str, Any]) -> bool:
    """Whether a line is an attempt at an item of the run."""
    first = {"items/000001-0": 0, "items/000001-4": 4}.get(str(record.get("unit")))
    return (
        record["type"] in KINDS
        and first is not None
        and all(is_count(record.get(name)) for name in ("generation", "item"))
        and first <= record["item"] < first + UNIT
        and all(is_number(record.get(name)) for name in ("at", "seconds"))
        and ("value" in record if record["type"] == "done" else type(record.get("error")) is str)
    )


def read_all(run: Run, clock: ManualClock) -> None:
    """Every reader of attempts; none may raise."""
    view = run.view
    for number in range(ITEMS):
        life_lines(explain(view, find_item(view, str(number))))
        list(_log_parts(run, None, str(number)))
    read_activity(History(view), clock)
    list(Trace(view))
    read_work(view, clock, given="run")
    what_is_left(view, clock, job=None, watch_s=0.0, pause=lambda _: None)
    assert read_facts(run).problems == []


@settings(max_examples=40, deadline=None)
@given(single=st.lists(lines(), max_size=4), together=st.lists(lines(), max_size=4))
def test_foreign_lines_change_no_count_and_stop_no_reader(
    fast_dir: Path, single: list[dict[str, Any]], together: list[dict[str, Any]]
) -> None:
    toy = ToyRun(Path(tempfile.mkdtemp(dir=fast_dir)) / "run", ITEMS, unit=UNIT)
    worker = toy.worker("w1")
    worker.work(toy.unit_name(0), i0="done", i1="done", i2="done", i3="done")
    worker.work(toy.unit_name(4), i4="done", i5="failed")
    own = [(item, Told(1, "w1", item, "failed" if item == 5 else "done")) for item in range(6)]
    other = toy.worker("w2")
    for record in single:
        other.journal.append(encode_line(record))
    other.begin(toy.unit_name(4), 2)
    for record in together:
        other._write(record)
    other.release()

    told = [
        (record["item"], Told(record["generation"], "w2", 10 + place, record["type"]))
        for place, record in enumerate([*single, *together])
        if counts(record)
    ]
    expected = [
        expect([line for item, line in (*own, *told) if item == wanted]) for wanted in range(ITEMS)
    ]
    run = toy.reopen()
    status = run.status().stages["items"]
    assert [toy.states()[1, item] for item in range(ITEMS)] == [one.state for one in expected]
    states = Counter(one.state for one in expected)
    assert (status.done, status.failed, status.total) == (states["done"], states["failed"], ITEMS)
    assert status.duplicates == sum(one.duplicates for one in expected)
    finished = {item: one for item, one in enumerate(expected) if one.state != "pending"}
    rows = run.results(partial=True)
    assert [row["item"]["id"] for row in rows] == list(finished)
    assert [row["attempts"] for row in rows] == [one.attempts for one in finished.values()]
    read_all(run, ManualClock())
    check_run(toy.root)


@pytest.mark.parametrize(
    ("item", "fields"),
    [
        (2, {}),  # item 3 is missing, and 2 is there twice
        (7, {}),
        (3, {"item": "3"}),
        (3, {"unit": "items/000001-4", "item": 7}),
    ],
    ids=["twice", "other", "text", "other unit"],
)
def test_a_unit_run_that_counts_a_foreign_line_publishes_no_table(
    toy: ToyRun, item: int, fields: dict[str, Any]
) -> None:
    """Its release says that every item is done, and its checksum is right."""
    worker = toy.worker("w")
    worker.claim(toy.unit_name(0))
    for done in (0, 1, 2):
        worker.attempt(done)
    worker.attempt(**{"item": item, **fields})
    worker.release()
    run = toy.reopen()

    with pytest.raises(NotCompleteError, match="1 item of stage 'items' has no result") as caught:
        run.results()

    assert caught.value.pending == [{"id": 3}]
    assert [row["item"]["id"] for row in run.results(partial=True)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("generation", "fields", "words"),
    [
        (1, {}, "w2 did not claim generation 1 of unit items/000001-0)"),
        (7, {}, "w2 did not claim generation 7 of unit items/000001-0)"),
        (1, {"item": 13}, "unit items/000001-0 has no item 13)"),
        (1, {"unit": "items/000009-0"}, "there is no unit items/000009-0)"),
        (1, {"generation": True}, "'generation' is true)"),
        (1, {"types": [1]}, "'types' is [1])"),
    ],
    ids=["other worker", "unclaimed", "item", "unit", "true", "types"],
)
def test_doctor_names_a_foreign_line(
    toy: ToyRun, generation: int, fields: dict[str, Any], words: str
) -> None:
    worker, other = toy.worker("w1"), toy.worker("w2")
    worker.work(toy.unit_name(0), i0="done", i1="done", i2="done", i3="done")
    other.journal.append(b"\n")
    other.begin(toy.unit_name(0), generation)
    other.attempt(**{"item": 1, **fields})

    (found,) = (one for one in check_run(toy.root) if one.verdict is not Verdict.FINE)

    assert f": w2.jsonl at byte 1 ({words}" in found.found
