"""Clocks that tests can replace.

Wall-clock time is for display and never decides anything between two hosts. Every decision uses
the monotonic clock of the process that decides.
"""

from __future__ import annotations

import time
from typing import Protocol


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
