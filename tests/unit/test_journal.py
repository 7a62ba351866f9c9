"""Journals: cut, damaged or foreign lines change nothing; both ways of reading agree (R7, R8)."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
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
from hpc_toolkit.rundir import journal
from hpc_toolkit.rundir.journal import (
    JournalReader,
    JournalWriter,
    Line,
    UnitRun,
    decode_line,
    encode_line,
    read_lines,
    read_unit_run,
)
from tests.manualclock import ManualClock
from tests.oracle import Told, expect
from tests.toyrun import ToyRun

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def records(found: Iterable[Line | UnitRun], path: Path) -> list[dict[str, Any]]:
    """Every record in order, those of passes expanded."""
    lines: list[dict[str, Any]] = []
    for one in found:
        if isinstance(one, UnitRun):
            lines += [line.record for line in read_lines(path, one.start, one.end)]
            lines.append(one.record)
        else:
            lines.append(one.record)
    return lines


def numbered(n: int, **fields: Any) -> bytes:
    """The line of a result, which also has a number."""
    place = {"type": "done", "unit": "items/000001-0", "generation": 1, "item": n}
    return encode_line({**place, "at": 0.0, "seconds": 0.0, "value": {}, "n": n, **fields})


@given(st.dictionaries(st.text(), VALUES, min_size=1, max_size=4))
def test_a_line_is_strict_json_with_the_check_as_its_last_key(record: dict[str, Any]) -> None:
    record.pop("crc", None)
    record["type"] = "done"

    line = encode_line(record)

    assert line.endswith(b'"}\n')
    assert line.count(b"\n") == 1
    assert decode_line(line[:-1]) == json.loads(line)
    assert list(json.loads(line))[-1] == "crc"
    assert {**json.loads(line), **record} == json.loads(line)


def test_a_line_that_is_cut_changed_or_not_json_is_refused() -> None:
    line = encode_line({"type": "done", "item": 7})[:-1]

    assert decode_line(line) is not None
    for size in range(len(line)):
        assert decode_line(line[:size]) is None
    for index in range(len(line)):
        for bit in range(8):
            changed = bytearray(line)
            changed[index] ^= 1 << bit
            assert decode_line(bytes(changed)) is None
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_line({"value": float("nan")})


def test_i1_sync_asks_the_disk_once_for_all_that_was_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = os.fdatasync

    def note(fd: int) -> None:
        real(fd)
        sizes.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fdatasync", note)
    writer = JournalWriter(tmp_path / "j")
    writer.append(b"one\n")
    writer.append(b"two\n")

    writer.sync()
    writer.sync()

    assert sizes == [8]
    assert not writer.dirty
    writer.close()
    with pytest.raises(FileExistsError, match="j"):
        JournalWriter(tmp_path / "j")


def test_i1_sync_that_failed_does_not_count_as_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_fd: int) -> None:
        message = "broken disk"
        raise OSError(message)

    writer = JournalWriter(tmp_path / "j")
    writer.append(b"one\n")
    monkeypatch.setattr(os, "fdatasync", fail)

    with pytest.raises(OSError, match="broken disk"):
        writer.sync()

    assert writer.dirty
    writer.close()


def test_a_span_is_read_to_its_end_or_to_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pread = tmp_path / "file", os.pread
    path.write_bytes(bytes(range(100)))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 7), at))
    with path.open("rb") as file:
        spans = [(0, 100), (5, 6), (90, 120), (120, 130), (3, 3)]
        found = [journal.read_span(file.fileno(), *span) for span in spans]
    assert found == [bytes(range(100))[start:end] for start, end in spans]


@pytest.mark.parametrize(
    "odd",
    [
        encode_line({"type": "done", "text": "damaged"}).replace(b"damaged", b"DAMAGED"),
        journal.seal_line(b"[1"),
        journal.seal_line(b'1,{"two":"values"'),
        journal.seal_line(b'{"n":NaN'),
    ],
)
def test_i8_a_line_that_is_not_strict_json_leaves_its_neighbours(
    tmp_path: Path, odd: bytes
) -> None:
    lines = [numbered(n) for n in range(600)]
    data = b"".join([*lines[:300], odd, *lines[300:]])
    path = tmp_path / "j"
    path.write_bytes(data)

    found = list(read_lines(path, 0, len(data)))

    assert decode_line(odd[:-1]) is None
    assert [line.record["n"] for line in found] == list(range(600))
    assert [data[one.start : one.end] for one in found] == lines


def test_i8_a_journal_cut_at_any_byte_loses_at_most_its_last_line(tmp_path: Path) -> None:
    lines = [numbered(n, text="x" * n) for n in range(4)]
    data = b"".join(lines)
    path = tmp_path / "j"
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        reader = JournalReader(path)

        found = records(reader.poll(), path)

        whole = data[:size].count(b"\n")
        assert [record["n"] for record in found] == list(range(whole))
        assert reader.bad_lines == {}
        assert reader.torn_bytes == size - sum(map(len, lines[:whole]))
        path.write_bytes(data)  # the torn line is finished later
        assert [record["n"] for record in records(reader.poll(), path)] == list(range(whole, 4))
        assert reader.torn_bytes == 0


@pytest.mark.parametrize("split", [0, 1, 9])
def test_i8_zeros_at_the_end_of_a_read_are_read_again(tmp_path: Path, split: int) -> None:
    """CephFS gives zeros for what another host appends during a read."""
    path = tmp_path / "w.jsonl"
    lines = [numbered(number) for number in range(2)]
    path.write_bytes(lines[0] + lines[1][:split] + bytes(len(lines[1]) - split))
    reader = JournalReader(path)
    assert records(reader.poll(), path) == [decode_line(lines[0][:-1])]
    path.write_bytes(b"".join(lines))
    assert records(reader.poll(), path) == [decode_line(lines[1][:-1])]
    assert (reader.bad_lines, reader.torn_bytes) == ({}, 0)


def test_a_pass_is_read_back_at_once_and_line_by_line_once_it_is_damaged(toy: ToyRun) -> None:
    worker = toy.worker("w")
    worker.work(toy.unit_name(0), i0="done", i1="done", i2="done", i3="done")
    path = toy.paths.journal("w")
    (found,) = JournalReader(path).poll()
    assert isinstance(found, UnitRun)
    lines = [line.record for line in read_lines(path, found.start, found.end)]

    assert len(lines) == 4
    assert read_unit_run(path, found) == lines
    data = bytearray(path.read_bytes())
    data[found.start + 3] ^= 1
    path.write_bytes(data)
    assert read_unit_run(path, found) == lines[1:]


@pytest.fixture(scope="module")
def two_passes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A journal of two passes over three items, one item failed."""
    toy = ToyRun(tmp_path_factory.mktemp("journal") / "run", 6, unit=3)
    worker = toy.worker("w")
    worker.work(toy.unit_name(0), i0="done", i1="done", i2="done")
    worker.work(toy.unit_name(3), i3="done", i4="failed", i5="done")
    return toy.paths.journal("w").read_bytes()


@settings(max_examples=300)
@given(data=st.data())
def test_i8_any_damage_leaves_the_lines_that_still_check_out(
    fast_dir: Path, two_passes: bytes, data: st.DataObject
) -> None:
    """The sum of a pass must not hide what reading line by line would have seen."""
    path = fast_dir / "j"
    content = bytearray(two_passes)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    *raw_lines, torn = bytes(content).split(b"\n")
    decoded = [decode_line(raw) for raw in raw_lines]
    reader = JournalReader(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "_CHUNK", data.draw(st.sampled_from([1, 64, 1 << 20])))
        found = records(reader.poll(), path)

    assert found == [record for record in decoded if record is not None]
    assert reader.torn_bytes == len(torn)
    starts = itertools.accumulate((len(raw) + 1 for raw in raw_lines), initial=0)
    of_lines = zip(starts, raw_lines, decoded, strict=False)
    assert list(reader.bad_lines) == [at for at, raw, one in of_lines if raw and one is None]


ITEMS, UNIT = 8, 4
KINDS = ("done", "failed", "permanent")
FIELDS = [
    True,
    -1,
    0,
    1.0,
    1.5,
    99,
    10**30,
    10**400,
    "3",
    "",
    None,
    [],
    {},
    [1],
    float("1e308"),
]
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
            record[name] = draw(st.sampled_from(units if name == "unit" else FIELDS))
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
