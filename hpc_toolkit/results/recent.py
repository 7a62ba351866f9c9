"""The latest events of a run, from what a view has read: no journal is read again for them."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hpc_toolkit.queue.presence import FINISHED
from hpc_toolkit.results.entries import RequestReader, read_entries
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.results.records import LogEntry, Request

_TOGETHER_S = 60.0
"""Equal events that follow each other within this time share a line."""
_REQUESTS = {"drain": "asked to exit", "deaths": "reported dead by Slurm", "sick": "suspected"}


@dataclass(frozen=True, slots=True)
class Recent:
    """Something that happened, or several alike."""

    at: float
    """Epoch seconds, of the last one."""
    what: str
    count: int = 1
    where: str = ""
    """Worker or host of the last one."""
    is_bad: bool = False


class RecentEvents:
    """Returns the latest events of a run; log entries and requests are read once."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._requests = RequestReader(view.paths)
        self._numbers: dict[str, int] = {}
        self._kept: list[Recent] = []

    def read(
        self,
        seen: Mapping[str, Presence | None],
        alive: set[str],
        failures: Sequence[dict[str, Any]],
        most: int = 10,
    ) -> list[Recent]:
        """The latest events, newest first; ``failures`` are those of a status."""
        for entry in read_entries(self._view, self._numbers):
            self._numbers[entry.stage] = entry.number
            self._kept += _entry(entry)
        self._kept += [_request(one) for one in self._requests.poll()]
        self._kept = sorted(self._kept, key=attrgetter("at"))[-most:]
        found = [*self._kept, *_workers(seen, alive), *_failed(failures)]
        return _joined(sorted(found, key=attrgetter("at"), reverse=True), most)


def _entry(entry: LogEntry) -> Iterator[Recent]:
    at, items = entry.at or 0.0, counted(entry.items or 0, "item")
    decision = entry.decision if isinstance(entry.decision, dict) else None
    if decision is not None:
        arms = decision.get("arms")
        count = len(arms) if isinstance(arms, list) else 0
        yield Recent(at, f"search asked for {counted(count, 'arm')} ({items})")
    elif entry.kind == "add":
        yield Recent(at, f"{items} added to stage {entry.stage}")
    elif entry.kind == "retry":
        yield Recent(at, f"retry of {items} of {entry.stage}")
    elif entry.kind == "gather":
        yield Recent(at, f"results of {entry.stage} gathered")


def _request(one: Request) -> Recent:
    what = _REQUESTS.get(one.kind, one.kind)
    if one.kind == "sick":
        return Recent(one.at or 0.0, f"host {one.host}: {one.reason}", is_bad=True)
    reason = f" ({one.reason})" if one.reason else ""
    return Recent(one.at or 0.0, f"{counted(len(one.workers), 'worker')} {what}{reason}")


def _workers(seen: Mapping[str, Presence | None], alive: set[str]) -> Iterator[Recent]:
    for name, one in seen.items():
        if one is None:
            continue
        if one.started:
            yield Recent(one.started, "worker started", where=one.host)
        if one.state == FINISHED:
            why = f": {one.note}" if one.note else ""
            yield Recent(one.at, f"worker ended{why}", where=one.host)
        elif name not in alive:
            yield Recent(one.at, "worker died", where=name, is_bad=True)


def _failed(failures: Sequence[dict[str, Any]]) -> Iterator[Recent]:
    for one in failures:
        if one["last"] is not None:
            yield Recent(one["last"], f"item {one['item']} failed: {one['message']}", is_bad=True)


def _joined(events: list[Recent], most: int) -> list[Recent]:
    """The newest events, those that are alike and near each other as one."""
    found: list[Recent] = []
    begun: dict[str, tuple[int, float]] = {}
    for one in events:
        place, at = begun.get(one.what, (-1, 0.0))
        if place >= 0 and at - one.at <= _TOGETHER_S:
            before = found[place]
            found[place] = Recent(before.at, one.what, before.count + 1, before.where, one.is_bad)
        elif len(found) == most:
            break
        else:
            place = len(found)
            found.append(one)
        begun[one.what] = (place, one.at)
    return found
