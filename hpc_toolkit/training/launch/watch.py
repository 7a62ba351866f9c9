"""What the ends of some ranks mean for the others of their node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from hpc_toolkit.training.launch.outcome import SAVED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpc_toolkit.training.launch.rounds import Ending


class Watch:
    """Looks at the ranks of one round."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Give ranks ``patience_s`` to save their state once others have saved theirs."""
        self.ended_first: frozenset[int] = frozenset()
        """Local ranks that had failed before the others were told to end."""
        self._patience_s, self._clock = patience_s, clock
        self._since: float | None = None

    def verdict(self, codes: Mapping[int, int | None]) -> Literal["go", "wait", "stop"]:
        """Whether all goes on as it does, ranks are leaving by themselves, or some must be told.

        Args:
            codes: what each rank ended with, by local rank; None for one that runs.
        """
        failed = frozenset(local for local, code in codes.items() if code)
        if not failed:
            return "go"
        self.ended_first = failed
        if None not in codes.values():
            return "go"
        if any(codes[local] != SAVED for local in failed):
            # What the others wait for never comes.
            return "stop"
        return "wait" if self._patient() else "go"

    def follows(self, ending: Ending, *, running: bool) -> bool:
        """Whether this node ends now because another did.

        Ranks may save their state where those of the other node have.
        """
        return not (running and ending.code == SAVED and self._patient())

    def _patient(self) -> bool:
        if self._since is None:
            self._since = self._clock()
        return self._clock() - self._since < self._patience_s
