"""The lanes of a timeline: one for each worker, or for the workers of hosts if there are many.

Time is divided into intervals of equal length, so a timeline does not grow with the number of
items.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpc_toolkit.queue.presence import Presence

MOST_LANES = 200
_MOST_CELLS, _FINEST, _COARSEST = 12_000, 240, 48
_TEXT_CHARS = 160


@dataclass(slots=True)
class Lane:
    """One row of a timeline."""

    host: str
    """The host of its workers, or the first and the last of several."""
    workers: int = 0
    spent: dict[str, dict[int, float]] = field(default_factory=dict)
    """Seconds by state and interval."""
    lives: dict[int, float] = field(default_factory=dict)
    """Seconds that workers lived, by interval."""
    marks: dict[tuple[int, str], Mark] = field(default_factory=dict)
    """Marks by interval and kind."""


@dataclass(slots=True)
class Mark:
    """Events of one kind in one interval of a lane."""

    at: float
    """The first of them, in epoch seconds."""
    text: str
    """What it was."""
    count: int = 1


class Timeline:
    """Intervals of equal length, and lanes that are filled with seconds."""

    def __init__(self, begin: float, end: float, lanes: list[Lane]) -> None:
        self.begin = begin
        self.lanes = lanes
        self.other = Lane("(unknown host)")
        """For workers whose files cannot be read."""
        fine = _MOST_CELLS // max(1, len(lanes))
        self.intervals = min(_FINEST, max(_COARSEST, fine))
        self.width_s = max((end - begin) / self.intervals, 1e-5)

    @property
    def end(self) -> float:
        return self.begin + self.intervals * self.width_s

    @property
    def drawn(self) -> list[Lane]:
        """The lanes that workers have."""
        return [*self.lanes, *([self.other] if self.other.workers else [])]

    def interval(self, at: float) -> int:
        return min(max(int((at - self.begin) / self.width_s), 0), self.intervals - 1)

    def add(self, lane: Lane, state: str, begin: float, end: float) -> None:
        """Count the seconds of a worker in a state."""
        self.fill(lane.spent.setdefault(state, {}), begin, end)

    def live(self, lane: Lane, begin: float, end: float) -> None:
        """Count a worker's life."""
        lane.workers += 1
        self.fill(lane.lives, begin, end)

    def mark(self, lane: Lane, kind: str, at: float, text: str) -> None:
        key = (self.interval(at), kind)
        if key in lane.marks:
            lane.marks[key].count += 1
        else:
            lane.marks[key] = Mark(at, text[:_TEXT_CHARS])

    def fill(self, cells: dict[int, float], begin: float, end: float, rate: float = 1.0) -> None:
        """Add ``rate`` for each second to the intervals."""
        first, last = self.interval(begin), self.interval(end)
        if first == last:
            cells[first] = cells.get(first, 0.0) + rate * (end - begin)
            return
        for number in range(first, last + 1):
            low = begin if number == first else self.begin + number * self.width_s
            high = end if number == last else self.begin + (number + 1) * self.width_s
            cells[number] = cells.get(number, 0.0) + rate * max(high - low, 0.0)


def lay_out(
    presences: dict[str, Presence | None], since: float, until: float
) -> tuple[dict[str, Lane], Timeline]:
    """The lane of each worker, and the empty timeline: of their lives, at least to ``until``.

    ``since`` is when it begins if no life is known.
    A lane has the workers of one rank that followed each other. If these are too many, a lane has
    all workers of a host, or of several hosts.
    """
    lives = [one for one in presences.values() if one is not None and one.started]
    lives.sort(key=lambda one: (one.host, one.started, one.rank, one.worker))
    begin = min((one.started for one in lives), default=since)
    end = max(begin, until, *(one.at for one in lives))
    lanes, of = _by_rank(lives)
    if len(lanes) > MOST_LANES:
        lanes, of = _by_host(lives)
    return of, Timeline(begin, end, lanes)


def _by_rank(lives: Iterable[Presence]) -> tuple[list[Lane], dict[str, Lane]]:
    lanes: dict[str, list[tuple[Lane, list[float]]]] = defaultdict(list)
    of: dict[str, Lane] = {}
    for one in lives:
        free = (found for found in lanes[one.host] if found[1][0] <= one.started)
        lane, ends = next(free, (None, [0.0]))
        if lane is None:
            lane = Lane(one.host)
            lanes[one.host].append((lane, ends))
        of[one.worker], ends[0] = lane, max(one.at, one.started)
    return [lane for some in lanes.values() for lane, _ in some], of


def _by_host(lives: list[Presence]) -> tuple[list[Lane], dict[str, Lane]]:
    hosts = list(dict.fromkeys(one.host for one in lives))
    size = -(-len(hosts) // MOST_LANES)
    lanes: list[Lane] = []
    lane_of: dict[str, Lane] = {}
    for first in range(0, len(hosts), size):
        some = hosts[first : first + size]
        lane = Lane(some[0] if len(some) == 1 else f"{some[0]} to {some[-1]}")
        lanes.append(lane)
        lane_of |= dict.fromkeys(some, lane)
    return lanes, {one.worker: lane_of[one.host] for one in lives}
