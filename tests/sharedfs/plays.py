"""Scenarios as they are played: on all filesystems at once, each examined before."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.sharedfs.outcome import MEASURED, Outcome, said_by
from tests.sharedfs.rehearsal import Rehearsal, Size
from tests.sharedfs.scenarios import examination, proven_locks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.sharedfs.filesystems import Filesystem
    from tests.sharedfs.scenarios import Scenario


@dataclass(frozen=True)
class Examined:
    """A run that doctor examined, and what it said."""

    rehearsal: Rehearsal
    report: dict[str, Any]


class Plays:
    """Has scenarios played on all filesystems at the same time, since they consist of waiting.

    Before the first one of a size ``hpctk doctor`` examines the filesystem.
    """

    def __init__(
        self, filesystems: dict[str, Filesystem], make_directory: Callable[[str], Path]
    ) -> None:
        self._filesystems = filesystems
        self._make_directory = make_directory
        self._threads = ThreadPoolExecutor(max_workers=len(filesystems))
        self._examined: dict[tuple[Size, str], Examined] = {}
        self._futures: dict[tuple[Callable[..., object], Size, str], Future[Any]] = {}

    def outcome(self, scenario: Scenario, size: Size, name: str) -> Outcome:
        """What a scenario of a size came to on one filesystem."""
        self._submit(scenario, size, self._play)
        outcome: Outcome = self._futures[scenario, size, name].result()
        return outcome

    def report(self, size: Size, name: str) -> dict[str, Any]:
        """What doctor says of a filesystem."""
        self._submit(examination, size, self._examine)
        examined: Examined = self._futures[examination, size, name].result()
        return examined.report

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, what: Any, size: Size, play: Callable[[Any, Size, str], Any]) -> None:
        for name in self._filesystems:
            if (what, size, name) not in self._futures:
                self._futures[what, size, name] = self._threads.submit(play, what, size, name)

    def _rehearsal(self, scenario: Scenario, size: Size, name: str) -> Rehearsal:
        title = scenario.__name__
        cwd = self._make_directory(f"{title}-{name}")
        return Rehearsal(self._filesystems[name], cwd, size, f"{title}-{size.items}")

    def _examine(self, _: object, size: Size, name: str) -> Examined:
        if (size, name) not in self._examined:
            rehearsal = self._rehearsal(proven_locks, size, name)
            self._examined[size, name] = Examined(rehearsal, examination(rehearsal))
        return self._examined[size, name]

    def _play(self, scenario: Scenario, size: Size, name: str) -> Outcome:
        examined = self._examine(None, size, name)
        known = scenario is proven_locks
        rehearsal = examined.rehearsal if known else self._rehearsal(scenario, size, name)
        try:
            outcome = scenario(rehearsal)
        finally:
            rehearsal.close()
        title = scenario.__name__.replace("_", " ")
        MEASURED.append(outcome.cells(name, said_by(examined.report), title))
        return outcome
