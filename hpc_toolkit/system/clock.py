"""Clocks that tests can replace, and readings that are too expensive to repeat often.

Wall-clock time is for display and never decides anything between two hosts. Every decision uses
the monotonic clock of the process that decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Clock(Protocol):
    """The clocks that the queue reads."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; shared by all processes of one host."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for display."""
        ...


class SystemClock:
    """The clocks of this machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


T = TypeVar("T")

_BUSY = 0.05
"""Largest share of a processor that the repetitions may take."""


class Seldom(Generic[T]):
    """Keeps the last value of a computation."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._kept: T | None = None
        self._key: object = None
        self._at = -math.inf
        self._took_s = 0.0

    def read(self, make: Callable[[], T], key: object) -> tuple[T, float]:
        """Return a value and its age in seconds; it is made anew if ``key`` is another one."""
        age_s = self._clock.monotonic() - self._at
        if self._kept is None or key != self._key or age_s >= self._took_s / _BUSY:
            started = time.process_time()
            self._kept = make()
            self._took_s = time.process_time() - started
            self._at, self._key, age_s = self._clock.monotonic(), key, 0.0
        return self._kept, age_s
