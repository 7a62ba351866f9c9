"""Decide what to do with the ranks of a node after some of them have ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from hpc_toolkit.training.launch.outcome import SAVED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpc_toolkit.training.launch.rounds import Ending


class Watch:
    """Evaluates the exit codes of the ranks of one round."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Give ranks ``patience_s`` to save their state once others have saved theirs."""
        self.ended_first: frozenset[int] = frozenset()
        """Local ranks that failed before the others were told to end."""
        self._patience_s, self._clock = patience_s, clock
        self._since: float | None = None

    def verdict(self, codes: Mapping[int, int | None]) -> Literal["go", "wait", "stop"]:
        """Decide whether to go on, to wait for ranks that are leaving, or to stop the others.

        Args:
            codes: exit code of each rank, by local rank; None while it runs.
        """
        failed = frozenset(local for local, code in codes.items() if code)
        if not failed:
            return "go"
        self.ended_first = failed
        if None not in codes.values():
            return "go"
        if any(codes[local] != SAVED for local in failed):
            # The other ranks would wait for the failed one forever.
            return "stop"
        return "wait" if self._patient() else "go"

    def follows(self, ending: Ending, *, running: bool) -> bool:
        """Return whether this node ends now because another node has ended.

        If that node's ranks saved their state, ranks that still run here get time to save theirs.
        """
        return not (running and ending.code == SAVED and self._patient())

    def _patient(self) -> bool:
        if self._since is None:
            self._since = self._clock()
        return self._clock() - self._since < self._patience_s
