"""Journals: whatever is cut or damaged, the other lines count, and both ways of reading agree."""

from __future__ import annotations

import itertools
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
