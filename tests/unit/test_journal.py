"""Journals: whatever is cut or damaged, the other lines count, and both ways of reading agree."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_encode_line_refuses_what_is_not_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_line({"value": float("nan")})


def test_decode_line_refuses_every_cut_and_every_changed_byte() -> None:
    line = encode_line({"type": "done", "item": 7})[:-1]

    assert decode_line(line) is not None
    for size in range(len(line)):
        assert decode_line(line[:size]) is None
    for index in range(len(line)):
        for bit in range(8):
            changed = bytearray(line)
            changed[index] ^= 1 << bit
            assert decode_line(bytes(changed)) is None


def test_decode_line_refuses_json_that_is_no_object() -> None:
    assert decode_line(journal.seal_line(b"[1")[:-1]) is None


def test_writer_refuses_a_journal_that_exists(tmp_path: Path) -> None:
    JournalWriter(tmp_path / "j").close()

    with pytest.raises(FileExistsError, match="j"):
        JournalWriter(tmp_path / "j")


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
    lines.insert(300, odd)
    path = tmp_path / "j"
    path.write_bytes(b"".join(lines))
    wanted = [json.dumps(one) for line in lines if (one := decode_line(line[:-1])) is not None]

    found = list(read_lines(path, 0, path.stat().st_size))

    assert [json.dumps(line.record) for line in found] == wanted
    assert len(found) >= 600
    assert all(b"".join(lines)[one.start : one.end] in lines for one in found)


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


def test_i8_a_torn_line_and_a_newline_poison_nothing_that_follows(tmp_path: Path) -> None:
    first, torn, last = (numbered(n) for n in range(3))
    path = tmp_path / "j"
    for size in range(len(torn) - 1):
        path.write_bytes(first + torn[:size] + b"\n" + last)
        reader = JournalReader(path)

        assert [record["n"] for record in records(reader.poll(), path)] == [0, 2]
        assert reader.bad_lines == ({len(first): "wrong checksum or JSON"} if size else {})
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


def test_i8_a_torn_line_that_is_finished_later_counts(tmp_path: Path) -> None:
    first, line = (numbered(n) for n in range(2))
    path = tmp_path / "j"
    path.write_bytes(first + line[:10])
    reader = JournalReader(path)

    assert [record["n"] for record in records(reader.poll(), path)] == [0]
    assert reader.torn_bytes == 10
    with path.open("ab") as file:
        file.write(line[10:])

    assert [record["n"] for record in records(reader.poll(), path)] == [1]
    assert reader.torn_bytes == 0


@pytest.mark.parametrize("chunk", [1, 64, 1000])
def test_poll_finds_the_same_lines_whatever_the_chunk(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    toy = ToyRun(fast_dir / "run", 8, unit=4)
    worker = toy.worker("w")
    worker.work(toy.unit_name(0), i0="done", i1="done", i2="failed", i3="done")
    worker.work(toy.unit_name(4), i4="done", i5="done", i6="done", i7="done")
    path = toy.paths.journal("w")
    whole = records(JournalReader(path).poll(), path)

    monkeypatch.setattr(journal, "_CHUNK", chunk)
    reader = JournalReader(path)

    assert records(reader.poll(), path) == whole
    assert len(whole) == 10
    assert reader.torn_bytes == 0


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


def test_i8_a_pass_with_a_damaged_line_is_read_line_by_line(toy: ToyRun) -> None:
    worker = toy.worker("w")
    worker.work(toy.unit_name(0), i0="done", i1="done", i2="done", i3="done")
    path = toy.paths.journal("w")
    data = bytearray(path.read_bytes())
    second = data.index(b"\n") + 1
    data[second + 20] ^= 1
    path.write_bytes(data)
    reader = JournalReader(path)

    found = list(reader.poll())

    assert all(isinstance(one, Line) for one in found)
    assert [record.get("item") for record in records(found, path)] == [0, 2, 3, None]
    assert reader.bad_lines == {second: "wrong checksum or JSON"}


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
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    raw_lines = bytes(content).split(b"\n")[:-1]
    expected = [record for raw in raw_lines if (record := decode_line(raw)) is not None]

    assert records(JournalReader(path).poll(), path) == expected
