"""Time as the program sees it, so that tests can move it.

Wall-clock time is written for people and never decides anything between two hosts; every decision
rests on the monotonic clock of the process that decides.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the queue asks of time."""

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
