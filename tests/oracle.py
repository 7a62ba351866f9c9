"""A second implementation of the rules for one item, as plain as possible (R8, R11, R18)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Told:
    """One valid attempt line."""

    generation: int
    worker: str
    place: int
    """Position in its worker's journal."""
    kind: str
    """``done``, ``failed``, ``permanent``, or ``short``: a failure for lack of memory or time."""
    value: Any = None


@dataclass(frozen=True)
class Expected:
    """The expected state of an item."""

    state: str
    attempts: int
    value: Any
    worker: str | None
    duplicates: int


def growth_of(lines: Iterable[Told], *, floor: int = 0, steps: int = 0) -> int:
    """Return how often the needs of an item grew, if they grow at most ``steps`` times."""
    kinds: dict[int, set[str]] = {}
    for line in lines:
        if line.kind != "done" and line.generation > floor:
            kinds.setdefault(line.generation, set()).add(line.kind)
    return min(steps, sum(found == {"short"} for found in kinds.values()))


def expect(
    lines: Iterable[Told], *, floor: int = 0, max_attempts: int = 3, steps: int = 0
) -> Expected:
    """Return the expected state of an item from all its lines."""
    lines = list(lines)
    done = sorted(
        (line for line in lines if line.kind == "done"),
        key=lambda line: (line.generation, line.worker, line.place),
    )
    counting = [line for line in lines if line.kind != "done" and line.generation > floor]
    attempts = len({line.generation for line in counting})
    attempts -= growth_of(lines, floor=floor, steps=steps)
    if done:
        winner = done[0]
        return Expected("done", attempts + 1, winner.value, winner.worker, len(done) - 1)
    permanent = any(line.kind == "permanent" for line in counting)
    state = "failed" if permanent or attempts >= max_attempts else "pending"
    return Expected(state, attempts, None, None, 0)
