"""The lines of the workers' journals, for all readers that need more than a view's counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_toolkit.rundir.journal import JournalReader, Line, read_lines, read_unit_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.queue.view import RunView

ATTEMPTS = ("done", "failed", "permanent")
"""Types of the journal lines that end an attempt."""
_MEMORY = 1 << 26
"""Bytes of all journals together that are held in memory."""
_LEAST_CHUNK, _MOST_CHUNK = 1 << 13, 1 << 20
_TAIL = 1 << 16


def lines_of(view: RunView, worker: str, start: int = 0) -> Iterator[Line]:
    """The lines of a journal that the view has read; a bounded part of them is in memory.

    A journal that cannot be read ends here, and the view's ``unreadable`` has the error.
    """
    path = view.readers[worker].path
    try:
        yield from read_lines(path, start, end_of_journal(view, worker), chunk_of(view))
    except OSError as error:
        view.unreadable[worker] = error


def last_line_at(view: RunView, worker: str) -> float | None:
    """When a worker wrote the newest line of its journal, by its own clock."""
    if worker not in view.readers:
        return None
    # A line that is cut at the start of the range is not valid and does not count.
    start = max(0, end_of_journal(view, worker) - _TAIL)
    return max((line.record["at"] for line in lines_of(view, worker, start)), default=None)


def end_of_journal(view: RunView, worker: str) -> int:
    """Where the complete lines end that the view has read."""
    reader = view.readers[worker]
    return reader.size - reader.torn_bytes


def chunk_of(view: RunView) -> int:
    """Bytes of each journal that are held in memory at once."""
    return min(_MOST_CHUNK, max(_LEAST_CHUNK, _MEMORY // max(1, len(view.readers))))


def records_of(view: RunView, worker: str, unit: str = "") -> Iterator[dict[str, Any]]:
    """The lines of a worker's journal; of unit runs, only those of ``unit`` if it is given."""
    path = view.paths.journal(worker)
    for found in JournalReader(path).poll():
        if isinstance(found, Line):
            yield found.record
        elif unit in ("", found.record["unit"]):
            yield from read_unit_run(path, found)
            yield found.record
