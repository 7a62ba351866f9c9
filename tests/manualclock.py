"""A clock that tests move."""

from __future__ import annotations


class ManualClock:
    """A clock that only ``advance`` moves."""

    def __init__(self, start: float = 1_000.0) -> None:
        self.now = start

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
