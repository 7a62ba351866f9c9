"""The file of a published results table, read or written row by row (rule R12)."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from hpc_toolkit.errors import TryAgainLaterError
from hpc_toolkit.queue.log import damaged
from hpc_toolkit.queue.units import Segment
from hpc_toolkit.queue.view import StageView
from hpc_toolkit.system.jsonlines import batches, decode, decode_each, encode


class PublishedTable:
    """Where the rows of a table are in its file: 8 bytes for each item instead of a row."""

    def __init__(self, stage: StageView) -> None:
        self._segments = stage.log.segments
        self.path: Path
        self.failed: dict[int, set[int]] = {}
        """Positions of failed items, by segment."""
        self._offsets = {
            entry: array("q", bytes(8 * one.count)) for entry, one in self._segments.items()
        }
        self._last = (0, 0)
        self._plain = True
        """Whether the rows are in the order of the segments, and each begins as we write it."""

    @property
    def count(self) -> int:
        return sum(len(offsets) - offsets.count(0) for offsets in self._offsets.values())

    @classmethod
    def read(cls, stage: StageView) -> PublishedTable:
        """Check every row of the latest table. RunError: it is damaged; TryAgainLaterError: now."""
        assert stage.log.table is not None
        table = cls(stage)
        table.path = stage.paths.root / stage.log.table[1]
        wanted, table.failed = stage.log.table_header()
        with table.path.open("rb") as file:
            at = len(file.readline())
            for lines in batches(file):
                at = table._check(lines, at)
        if table.count != wanted:
            message = f"{table.path} shows {table.count} of its {wanted} rows"
            hint = "try again in a minute; if they stay away, restore it from a backup"
            raise TryAgainLaterError(message, hint=hint)
        return table

    def _check(self, lines: list[bytes], at: int) -> int:
        """Note where these rows are, the first one at byte ``at``; return where they end."""
        try:
            rows = decode_each(lines)
        except (ValueError, RecursionError) as error:
            message = f"{self.path} is damaged: {error}"
            hint = "try again in a minute; if the error persists, restore the file from a backup"
            raise TryAgainLaterError(message, hint=hint) from error
        try:
            for row, line in zip(rows, lines, strict=True):
                key = entry, position = tuple(row["at"])
                self._plain &= self._last < key and line.startswith(b'{"at":[%d,%d],' % key)
                self._last = key
                self._offsets[entry][max(0, position)] = at
                at += len(line)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise damaged(self.path, "a row does not say whose it is") from error
        return at

    def write(
        self, units: Iterable[tuple[int, list[int], list[bytes]]], failed: dict[int, set[int]]
    ) -> Iterator[bytes]:
        """The bytes of a new table that has a row for every item.

        ``units`` are segment, positions and rows, each as its line in the table.
        """
        self.failed = failed
        wanted = sum(segment.count for segment in self._segments.values())
        header = {
            "format": 1,
            "segments": list(self._segments),
            "rows": wanted,
            "failed": [[entry, item] for entry in failed for item in sorted(failed[entry])],
        }
        first = json.dumps(header).encode() + b"\n"
        at = len(first)
        yield first
        for entry, positions, lines in units:
            *starts, at = accumulate(map(len, lines), initial=at)
            for position, start in zip(positions, starts, strict=True):
                self._offsets[entry][position] = start
            yield b"".join(lines)
        if self.count != wanted:
            message = f"{wanted - self.count} finished items have no row"
            raise TryAgainLaterError(message, hint="'hpctk doctor RUN' names damaged journals")

    def has(self, entry: int, position: int) -> bool:
        return bool(self._offsets[entry][position])

    def lines(self) -> Iterator[bytes]:
        """One or more lines at once: the rows, in the order in which their items were given."""
        if any(segment.numbers for segment in self._segments.values()):
            keys = [(e, p) for e, at in self._offsets.items() for p in range(len(at)) if at[p]]
            keys.sort(key=partial(given_order, self._segments))
            yield from map(without_at, batches(self._lines_at(keys)))
            return
        if not self._plain or any(segment.order for segment in self._segments.values()):
            for entry in self._segments:
                yield from map(without_at, batches(self.lines_of(entry, self._given(entry))))
            return
        with self.path.open("rb") as file:
            file.readline()
            yield from map(without_at, batches(self._every(file)))

    def _every(self, file: BinaryIO) -> Iterator[bytes]:
        """The rows from here; Python takes a read that fails with EAGAIN for the end of a file."""
        left = self.count
        for line in file:
            left -= 1
            yield line
        if left:
            raise self._ends_early()

    def _ends_early(self) -> TryAgainLaterError:
        message = f"{self.path} ended before its last row"
        return TryAgainLaterError(message, hint="the filesystem may have failed; try again")

    def _given(self, entry: int) -> Iterable[int]:
        """The positions of a segment's items that have a row, as they were given."""
        order = self._segments[entry].order
        positions = array("q", range(len(self._offsets[entry])))
        for position, given in enumerate(order or ()):
            positions[given] = position
        return (position for position in positions if self.has(entry, position))

    def lines_of(self, entry: int, positions: Iterable[int]) -> Iterator[bytes]:
        """The lines of some rows, as we write them."""
        return self._lines_at((entry, position) for position in positions)

    def _lines_at(self, keys: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            at = 0
            for entry, position in keys:
                offset = self._offsets[entry][position]
                if offset != at:
                    file.seek(offset)
                line = file.readline()
                at = offset + len(line)
                if not line.endswith(b"\n"):
                    raise self._ends_early()
                if line.startswith(b'{"at":[%d,%d],' % (entry, position)):
                    yield line
                else:  # of another writer
                    row = decode(line.decode())
                    yield encode({"at": row.pop("at"), **row}).encode() + b"\n"


def given_order(segments: Mapping[int, Segment], key: tuple[int, int]) -> tuple[int, int]:
    """What to sort items (entry, position) by, so that they are in the order of their list."""
    segment = segments[key[0]]
    return (0 if segment.numbers else key[0]), segment.number(key[1])


def without_at(lines: list[bytes]) -> bytes:
    """Rows as they are gathered, from their lines in a table."""
    return b"".join([b"{" + line[line.index(b"]") + 2 :] for line in lines])
