"""The journal of one worker: JSON lines with a checksum, appended by that worker alone.

A line is strict JSON whose last key is ``crc``, the CRC-32 of the bytes before it. The lines of
one unit run are contiguous and end with a ``release`` line, which carries their counts and
the CRC-32 of all their bytes. If that sum is right, a reader accepts the unit run without parsing
its lines; otherwise it parses line by line. Both ways count the same lines. A line whose fields
are not those of its type is skipped and reported, like a damaged one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple
from zlib import crc32

from hpc_toolkit.rundir.files import closing, shared, sync_directory, write_all
from hpc_toolkit.system.jsonlines import batches, decode, decode_each, raw_decode

_RELEASE = b'{"type":"release",'
_NEXT_RELEASE = b"\n" + _RELEASE
CRC_LENGTH = len(b',"crc":"00000000"}')
"""Bytes of a line from its checksum on."""
_CHUNK = 1 << 20

_COUNT, _NUMBER, _TEXT = ((int,), True), ((float, int), True), ((str,), False)
_MOST = 1e11
"""More than any count or number of seconds in a line; as a time, the year 5138."""
_JSON = (dict, list, str, int, float, bool, NoneType)
_RUN = {"unit": _TEXT, "generation": _COUNT, "at": _NUMBER}
_ATTEMPT = {**_RUN, "item": _COUNT, "seconds": _NUMBER, "log": ((list, NoneType), False)}
_FAILURE = {**_ATTEMPT, "error": _TEXT, "traceback": ((str, NoneType), False)}
_TEXTS = dict.fromkeys(("worker", "host", "evidence", "explained"), _TEXT)
_COUNTS = dict.fromkeys(("lines", "done", "failed", "start"), _COUNT)
_FIELDS: dict[str, dict[str, tuple[tuple[type, ...], bool]]] = {
    "done": {**_ATTEMPT, "types": ((dict, NoneType), False), "value": (_JSON, False)},
    "failed": _FAILURE,
    "permanent": _FAILURE,
    "release": {**_RUN, "seconds": _NUMBER, "sum": _TEXT, **_COUNTS},
    "death": {**_RUN, "item": _COUNT, "alone": ((bool,), False), **_TEXTS},
}
"""The fields that readers need, by type of line: types, and whether there is a range. A field of
NoneType may be missing, except ``value``."""


def seal_line(body: bytes) -> bytes:
    """Turn a JSON object without its closing brace into a journal line."""
    return body + b',"crc":"%08x"}\n' % crc32(body)


def encode_line(record: dict[str, Any]) -> bytes:
    """One journal line for a non-empty record of strict JSON values."""
    return seal_line(json.dumps(record, separators=(",", ":"), allow_nan=False)[:-1].encode())


def release_line(start: int, content: bytes, **facts: Any) -> bytes:
    """The line that ends a unit run, whose ``content`` begins at byte ``start`` of the journal."""
    record = {"type": "release", **facts, "start": start, "sum": f"{crc32(content):08x}"}
    return encode_line(record)


def is_whole(line: bytes) -> bool:
    """Whether a line without its newline ends with the right checksum."""
    return line[-CRC_LENGTH:] == b',"crc":"%08x"}' % crc32(line[:-CRC_LENGTH])


def line_fault(record: dict[str, Any]) -> str:
    """What is wrong with the fields of a line, which then does not count; "" for nothing."""
    fields = _FIELDS.get(str(record.get("type")), {"type": ((), False)})
    for name, (types, is_number) in fields.items():
        value = record.get(name)
        if type(value) not in types or (is_number and not 0 <= value < _MOST):  # type: ignore[operator]
            return f"{name!r} is {json.dumps(value):.40}"
        if value is None and name == "value" and name not in record:
            return "it has no 'value'"
    return ""


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Parse one line without its newline; None if the line is torn or damaged."""
    if not is_whole(line):
        return None
    try:
        text = line.decode()
        record, end = raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return record if end == len(text) and isinstance(record, dict) else None


def _decode_lines(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """What :func:`decode_line` makes of each line."""
    if all(map(is_whole, lines)):
        with suppress(ValueError, RecursionError):
            return decode_each(lines)  # a value that ends with a brace is an object
    return [decode_line(line) for line in lines]


class JournalWriter:
    """Appends to one journal; after an error nothing more may be appended (rule R4)."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._path = path
        self._fd = shared(os.open(path, flags, 0o666), path)
        self.size = 0
        """Bytes written so far."""
        self.synced = 0
        """Bytes that survive a power loss."""
        self.unsynced: list[bytes] = []
        """What was appended since the last sync that succeeded, or could not be appended."""

    @property
    def dirty(self) -> bool:
        """Whether a power loss could still lose appended bytes."""
        return self.synced != self.size

    def append(self, data: bytes) -> None:
        """Append complete lines; they survive this process, but not yet a power loss."""
        self.unsynced.append(data)
        write_all(self._fd, data)
        self.size += len(data)

    def sync(self) -> None:
        """Commit everything appended so far.

        Raises OSError: treat unsynced bytes as lost; a second call that succeeds proves nothing.
        """
        if self.dirty:
            os.fdatasync(self._fd)
            self.synced = self.size
            self.unsynced.clear()

    def reader(self) -> JournalReader:
        """A reader of this journal that uses the open descriptor, not the path."""
        return JournalReader(self._path, self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1  # a later append must not reach another file
            os.close(fd)


class ValueFile:
    """The value file beside a journal, which an executor writes and this process syncs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._named = False
        """Whether the name of the file survives a power loss."""

    def sync(self) -> None:
        """Commit what the executor has appended. Raises OSError: it may be lost."""
        with closing(os.open(self.path, os.O_WRONLY)) as fd:
            os.fdatasync(fd)
        if not self._named:
            sync_directory(self.path.parent)
            self._named = True


class Line(NamedTuple):
    """One valid line and its position."""

    record: dict[str, Any]
    start: int
    """Byte offset in the journal."""
    end: int
    """Byte offset after the newline."""


class UnitRun(NamedTuple):
    """All lines of one unit run, which one worker wrote, verified by one checksum."""

    record: dict[str, Any]
    """The release."""
    start: int
    end: int
    """Byte offset of the release line."""
    sum: int
    """CRC-32 of the bytes between the two."""


class JournalReader:
    """Reads a journal as it grows, from any process; takes no lock and never writes.

    ``fd`` is an open descriptor of the journal; without one, each :meth:`poll` opens it.
    ``singly``: yield the lines of unit runs too.
    """

    def __init__(self, path: Path, fd: int | None = None, *, singly: bool = False) -> None:
        self.path = path
        self._fd, self._singly = fd, singly
        self.bad_lines: dict[int, str] = {}
        """Byte offsets of lines that were read one by one and do not count -> what is wrong."""
        self.torn_bytes = 0
        """Bytes read after the last newline: a line being written, or cut off by a crash."""
        self._offset = 0

    @property
    def size(self) -> int:
        """Bytes that the journal had when it was last read."""
        return self._offset + self.torn_bytes

    def open(self) -> int:
        return os.open(self.path, os.O_RDONLY)

    def poll(self, open_file: Callable[[], int] | None = None) -> Iterator[Line | UnitRun]:
        """Yield lines and unit runs added since the last call, in order; a torn last line waits.

        If the caller fails to handle one of them, the next call yields it again. ``open_file``
        replaces :meth:`open`, for callers that limit how long opening may take.
        """
        try:
            fd = (open_file or self.open)() if self._fd is None else self._fd
        except FileNotFoundError:
            return
        try:
            size = _CHUNK
            while data := os.pread(fd, size, self._offset):
                end = (_last_release(data) if len(data) == size else 0) or data.rfind(b"\n") + 1
                start = self._offset
                if end:
                    yield from self._split(data, end, start)
                    self._offset = start + end
                self.torn_bytes = len(data) - end
                if len(data) < size:
                    return
                # A line longer than the chunk: read again with room for it.
                size = _CHUNK if end else size * 2
        finally:
            if self._fd is None:
                os.close(fd)

    def _split(self, data: bytes, stop: int, base: int) -> Iterator[Line | UnitRun]:
        position, view, found = 0, memoryview(data), []  # a slice of bytes would be a copy
        for release, at, end in () if self._singly else reversed(_releases(data, stop, base)):
            start = release["start"] - base
            whole, wanted = position <= start <= at, release["sum"]
            if whole and wanted == f"{crc32(view[start:at]):08x}":
                run = UnitRun(release, base + start, base + at, int(wanted, 16))
                found.append((position, run, end))
                position = end
        for before, unit_run, end in found:
            yield from self._lines(data, before, unit_run.start - base, base)
            yield unit_run
            self._offset = base + end
        yield from self._lines(data, position, stop, base)

    def _lines(self, data: bytes, start: int, stop: int, base: int) -> Iterator[Line]:
        while start < stop:
            end = data.index(b"\n", start)
            record = decode_line(data[start:end])
            fault = "wrong checksum or JSON" if record is None else line_fault(record)
            if record is not None and not fault:
                yield Line(record, base + start, base + end + 1)
            elif end > start:  # an empty line ends a torn line and is not damaged itself
                self.bad_lines[base + start] = fault
            start = end + 1
            self._offset = base + start


def _last_release(data: bytes) -> int:
    """End of the last complete release line; 0 if there is none.

    A chunk that ends there cuts no unit run in two; it would otherwise be read line by line.
    """
    at = data.rfind(_NEXT_RELEASE, 0, data.rfind(b"\n"))
    return data.index(b"\n", at + 1) + 1 if at >= 0 else 0


def _releases(data: bytes, stop: int, base: int) -> list[tuple[dict[str, Any], int, int]]:
    """Release lines, the last one first: (record, first byte, byte after the newline).

    The search jumps from each release line to the start of its unit run, so it scans little.
    """
    found = []
    while stop > 0:
        at = data.rfind(_NEXT_RELEASE, 0, stop) + 1
        if not data.startswith(_RELEASE, at):
            break
        end = data.index(b"\n", at) + 1
        release = decode_line(data[at : end - 1])
        stop = at
        if release is not None and not line_fault(release):
            found.append((release, at, end))
            stop = min(at, max(0, release["start"] - base))
    return found


def read_spans(path: Path, spans: Iterable[tuple[int, int]]) -> list[bytes]:
    """Some byte ranges of a journal, as they are now."""
    with closing(os.open(path, os.O_RDONLY)) as fd:
        return [read_span(fd, start, end) for start, end in spans]


def read_span(fd: int, start: int, end: int) -> bytes:
    """A byte range of a file, or what there is of it; a filesystem may give it in parts."""
    data = b""
    while start < end and (part := os.pread(fd, end - start, start)):
        data, start = data + part, start + len(part)
    return data


def read_unit_run(path: Path, found: UnitRun) -> list[dict[str, Any]]:
    """The records of a unit run, parsed in one call if its checksum is still right."""
    (data,) = read_spans(path, [(found.start, found.end)])
    if data and crc32(data) == found.sum:
        with suppress(ValueError, RecursionError):
            records: list[Any] = decode((b"[%s]" % data[:-1].replace(b"\n", b",")).decode())
            if all(type(one) is dict and not line_fault(one) for one in records):
                return records
    return [line.record for line in read_lines(path, found.start, found.end)]


def read_lines(path: Path, start: int, end: int, chunk: int = 0, *, of: str = "") -> Iterator[Line]:
    """The valid lines of a byte range that begins and ends at line boundaries.

    ``of``: the beginning of the names of their units.

    ``chunk``: bytes to keep in memory at once, or more for a longer line; 0: all of them. The file
    is open only while it is read, so any number of these iterators may be in use.
    """
    size = chunk or end - start
    while start < end and (data := read_spans(path, [(start, min(end, start + size))])[0]):
        *lines, rest = data.split(b"\n")
        for some in batches(lines):
            for raw, record in zip(some, _decode_lines(some), strict=True):
                if record and not line_fault(record) and record["unit"].startswith(of):
                    yield Line(record, start, start + len(raw) + 1)
                start += len(raw) + 1
        if not lines and len(rest) < size:
            return  # the range ends within a line
        size = (chunk or end - start) if lines else size * 2


def next_release(path: Path, start: int, end: int, chunk: int) -> dict[str, Any] | None:
    """The first valid release line of a byte range that begins at a line boundary, or None.

    Other lines are searched, but not parsed.
    """
    size = chunk
    while start < end and (data := read_spans(path, [(start, min(end, start + size))])[0]):
        at = 0 if data.startswith(_RELEASE) else data.find(_NEXT_RELEASE) + 1
        stop = data.find(b"\n", at)
        if stop >= 0 and data.startswith(_RELEASE, at):
            release = decode_line(data[at:stop])
            if release is not None and not line_fault(release):
                return release
            start, size = start + stop + 1, chunk
        elif len(data) < size:
            return None
        elif at or (at := data.rfind(b"\n") + 1):
            start, size = start + at, chunk
        else:
            size *= 2  # a line longer than the chunk
    return None
