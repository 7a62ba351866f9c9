"""Numbers of a status."""

from __future__ import annotations

from hpc_toolkit.system.record import Record


class StageCounts(Record, frozen=False):
    """Items of one stage by state."""

    total: int = 0
    pending: int = 0
    """Items without a result that no living worker has claimed."""
    running: int = 0
    """Items that a living worker runs now, one for each worker that holds a unit."""
    claimed: int = 0
    """Items that wait behind these in the units of living workers."""
    done: int = 0
    failed: int = 0
    retried: int = 0
    """Items that were attempted in more than one generation."""
    duplicates: int = 0
    """Results beyond the one that counts."""
    sealed: bool = False
    """Whether no more items can be added."""
    coming: int = 0
    """Items that the search of a campaign may still request; not in ``total``."""

    @property
    def left(self) -> int:
        """Items in the queue without a result that are not failed for good."""
        return self.pending + self.running + self.claimed


class WorkerCounts(Record, frozen=False):
    """Number of workers by state."""

    alive: int = 0
    finished: int = 0
    dead: int = 0
    unreadable: int = 0
    """Workers whose file in ``workers/`` cannot be read: they may be running or not."""
