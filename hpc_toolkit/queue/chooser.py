"""The order in which a worker looks for its next unit, and when it makes expensive looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_toolkit.queue.pacing import Pacing
    from hpc_toolkit.queue.picker import Assignment, Picker


class Chooser:
    """Finds one worker's next unit: cheap looks always, expensive ones when useful or due."""

    def __init__(self, picker: Picker, pacing: Pacing, *, restarted: bool) -> None:
        self._picker = picker
        self._pacing = pacing
        self._restarted = restarted
        self.died_nearby = False
        """Set when a death was seen, or a host asks other hosts to try its items."""

    def next(self, loaded: tuple[str, str | None]) -> Assignment | None:
        """Claim a unit; None if none can be found now.

        Args:
            loaded: stage and group of the loaded context.
        """
        return self._left_half_done(loaded) or self._fresh_or_free(loaded)

    def _left_half_done(self, loaded: tuple[str, str | None]) -> Assignment | None:
        if not (self.died_nearby or self._restarted):
            return None
        picker = self._picker
        # All workers count a half-done group as begun, and would leave it until the very end.
        found = picker.fresh(loaded, news=self._restarted, elsewhere=False)
        if found is None and self._restarted:
            # Units that the job had begun when it was interrupted; no worker remembers them.
            found = picker.left_behind(self._pacing.looks_at_start)
            self._restarted = found is not None
        if found is None and self.died_nearby:
            self.died_nearby = False
            found = picker.takeover()
            self.died_nearby |= found is not None  # it may have held more units
        return found

    def _fresh_or_free(self, loaded: tuple[str, str | None]) -> Assignment | None:
        picker, pacing = self._picker, self._pacing
        news = pacing.poll_due
        found = picker.fresh(loaded, news=news)
        if news:
            pacing.polled(picker.polled)
        if found is None and not pacing.local:
            found = picker.take_released()
        if found is not None or picker.told_complete or not pacing.scan_due():
            return found
        found = picker.takeover()
        pacing.scanned(found=found is not None, operations=picker.operations)
        return found
