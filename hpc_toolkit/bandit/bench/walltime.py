"""Simulate how long the pulls of a search take on several GPUs."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Literal

import numpy as np

from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Order = Literal["pull", "longest"]


def finish_times(
    durations: Sequence[Sequence[float]],
    told_before: Sequence[int],
    gpus: int,
    *,
    order: Order = "pull",
) -> NDArray[np.float64]:
    """Return when the last evaluation of each pull ends, in seconds; shape (n_pulls,).

    This is an event simulation. Each GPU runs one evaluation at a time and starts the next ready
    one at once. Deciding, loading models and claiming cost nothing, so the result is a lower bound
    for a run with this order. A pull without evaluations ends when it may begin.

    Args:
        durations: seconds of the evaluations of each pull, pulls in the order of asks.
        told_before: for each pull, how many results had to be told before it was asked for.
            Results are told in the order of asks, so it begins when that many first pulls ended.
        gpus: the number of GPUs; at least 1.
        order: which evaluation begins first. ``pull``: the evaluations of the earlier pull, its
            longest first; ``longest``: the longest of all that may begin.

    Raises ConfigError for no GPU, lists of unequal length, a negative or unknown duration, and a
    pull that waits for itself or a later one.
    """
    _check(durations, told_before, gpus)
    pulls = _Pulls(durations, told_before, order)
    running: list[tuple[float, int]] = []
    now = 0.0
    while True:
        pulls.ask(now)
        while pulls.ready and len(running) < gpus:
            pull, seconds = pulls.next()
            heapq.heappush(running, (now + seconds, pull))
        if not running:
            return pulls.ends
        now, pull = heapq.heappop(running)
        pulls.left[pull] -= 1
        pulls.ends[pull] = now


class _Pulls:
    """The evaluations that may begin."""

    def __init__(
        self, durations: Sequence[Sequence[float]], told_before: Sequence[int], order: Order
    ) -> None:
        self.ready: list[tuple[float, float, int, float]] = []
        self.ends = np.zeros(len(durations))
        self.left = [len(seconds) for seconds in durations]
        self._durations = durations
        self._told_before = told_before
        self._longest = order == "longest"
        self._asked = self._told = 0

    def ask(self, now: float) -> None:
        """Tell ended pulls and ask for pulls that waited for them, until neither is possible."""
        while True:
            pull = self._asked
            if pull < len(self.left) and self._told_before[pull] <= self._told:
                self.ends[pull] = now
                for seconds in self._durations[pull]:
                    key = (-seconds, pull) if self._longest else (pull, -seconds)
                    heapq.heappush(self.ready, (*key, pull, seconds))
                self._asked += 1
            elif self._told < self._asked and not self.left[self._told]:
                self._told += 1
            else:
                return

    def next(self) -> tuple[int, float]:
        """Remove the evaluation that begins now, and return its pull and its duration."""
        *_, pull, seconds = heapq.heappop(self.ready)
        return pull, seconds


def _check(durations: Sequence[Sequence[float]], told_before: Sequence[int], gpus: int) -> None:
    if gpus < 1:
        message = f"{gpus} GPUs"
        raise ConfigError(message, hint="give at least 1")
    if len(durations) != len(told_before):
        message = f"{len(durations)} pulls, but what was told before {len(told_before)}"
        raise ConfigError(message, hint="give one number for each pull")
    for pull, (seconds, told) in enumerate(zip(durations, told_before, strict=True)):
        if not 0 <= told <= pull:
            message = f"pull {pull} waits for {told} results"
            raise ConfigError(message, hint=f"0 to {pull}: those of the pulls before it")
        # Written so that NaN is rejected too.
        if not all(0 <= one < np.inf for one in seconds):
            message = f"pull {pull}: durations {list(seconds)!r}"
            raise ConfigError(message, hint="give seconds, 0 or more")
