"""A progress bar over the items of a run, on stderr."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from hpc_toolkit.system.quantities import format_duration

if TYPE_CHECKING:
    from hpc_toolkit.results.status import StageCounts
    from hpc_toolkit.run import Run

_REFRESH_S = 0.5


class RunProgress:
    """Shows how a run advances while this process waits for its workers."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._at = float("-inf")
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            auto_refresh=False,  # a thread of its own would make forking workers unsafe
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._at = float("-inf")
        self.tick()
        self._progress.stop()

    def tick(self) -> None:
        """Read the run and draw, at most twice a second."""
        now = time.monotonic()
        if now - self._at < _REFRESH_S:
            return
        self._at = now
        status = self._run.status()
        eta = f"{format_duration(status.eta_s)} left" if status.eta_s is not None else ""
        for name, counts in status.stages.items():
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=None, note="")
            self._progress.update(
                self._tasks[name],
                total=counts.total or None,
                completed=counts.done + counts.failed,
                note=_note(counts, eta),
            )
        self._progress.refresh()


def _note(counts: StageCounts, eta: str) -> str:
    parts = [eta] if eta and counts.pending + counts.leased else []
    if counts.failed:
        parts.append(f"{counts.failed} failed")
    return ", ".join(parts)
