"""Take snapshots of a run while workers run."""

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
    """Takes snapshots of a run while workers run, one each time ``every`` more items are done.

    It looks once a second, so several steps share a snapshot if results come faster. If a snapshot
    cannot be written, it is skipped and the work goes on.

    Args:
        run: opened by this process.
        pattern: path of the file; ``{done}`` in it is replaced by the number of items that are
            done, so that each snapshot has its own file.
        every: done items from one snapshot to the next; None: only :meth:`take` takes one.

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
        """Take a snapshot if the number of done items has passed a multiple of ``every``."""
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
        """Take a snapshot now."""
        try:
            snapshot = take_snapshot(self._run)
            done = str(snapshot.counts["done"])
            write_snapshot(Path(self._pattern.replace("{done}", done)), snapshot)
        except (OSError, HpcToolkitError) as error:
            _warn(error)


def _warn(error: Exception) -> None:
    sys.stderr.write(f"warning: no snapshot was taken: {error}\n")
