"""Snapshots of a run that is being worked on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.run.snapshot.file import take_snapshot, write_snapshot
from hpc_toolkit.system.clock import SystemClock

if TYPE_CHECKING:
    from hpc_toolkit.run import Run
    from hpc_toolkit.system.clock import Clock

_LOOK_S = 1.0


class Snapshots:
    """Takes snapshots of a run while workers are at it, one for every so many results.

    It looks once a second, so that of results that come faster several numbers share a snapshot.
    What cannot be written costs the snapshot and not the work.

    Args:
        run: opened by this process.
        pattern: the file; ``{done}`` in it is replaced by the number of items that are done, so
            that each snapshot has a file of its own.
        every: how many more items must be done for the next one; None: none but the last.

    Raises:
        ConfigError: ``every`` is below 1.
    """

    def __init__(
        self, run: Run, pattern: str, every: int | None, clock: Clock | None = None
    ) -> None:
        if every is not None and every < 1:
            message = f"--snapshot-every must be at least 1, got {every}"
            raise ConfigError(message, hint="such as --snapshot-every 50")
        self._run = run
        self._pattern = pattern
        self._every = every
        self._clock = clock if clock is not None else SystemClock()
        self._done = self._count()
        self._look_at = self._clock.monotonic() + _LOOK_S

    def _count(self) -> int:
        return sum(counts.done for counts in self._run.status().stages.values())

    def look(self) -> None:
        """Take a snapshot if enough was done since the last one."""
        now = self._clock.monotonic()
        if self._every is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        try:
            done = self._count()
        except (OSError, HpcToolkitError) as error:
            _warn(error)
            return
        if done // self._every > self._done // self._every:
            self.take()
        self._done = done

    def take(self) -> None:
        """Take one now."""
        try:
            snapshot = take_snapshot(self._run)
            done = str(snapshot.counts["done"])
            write_snapshot(Path(self._pattern.replace("{done}", done)), snapshot)
        except (OSError, HpcToolkitError) as error:
            _warn(error)


def _warn(error: Exception) -> None:
    sys.stderr.write(f"warning: no snapshot was taken: {error}\n")
