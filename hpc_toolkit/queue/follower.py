"""Read results at a bounded cost for a waiting process, such as a campaign's coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.queue.pacing import READINGS_PER_S, pause_local_s
from hpc_toolkit.rundir import files

if TYPE_CHECKING:
    from collections.abc import Collection

    from hpc_toolkit.queue.view import RunView, StageView

_LOOK_S = 1.0
_MOST_OWNERS = 100
_LEAST_OTHERS = 4


class Follower:
    """Sees the results of awaited units soon, and eventually those of all units.

    On a shared filesystem it reads the journals of the workers that hold awaited units, when their
    files in ``workers/`` show progress. It reads all other journals a few at a time, in turn: a
    listing of claims may be a minute old, and a worker's file need not show all progress.
    """

    def __init__(self, view: RunView, *, local: bool) -> None:
        self._view = view
        self._local = local
        self._looks = 0
        self._asked: dict[str, int] = {}
        self._others: list[str] = []

    def look(self, stage: StageView, units: Collection[str], waited_s: float = 0.0) -> float:
        """Read what is new about these units of a stage; return the seconds until the next look.

        ``waited_s`` is how long the caller has waited for the units.
        """
        self._looks += 1
        if self._local or self._looks == 1:
            self._view.poll()
            return pause_local_s(waited_s) if self._local else _LOOK_S
        stage.poll_log(hinted=True)
        stage.claims.refresh()
        asked = 3 + self._read_holders(stage.holders(units))
        asked += self._read_others(max(_LEAST_OTHERS, int(READINGS_PER_S * _LOOK_S) - asked))
        return max(_LOOK_S, asked / READINGS_PER_S)

    def _read_holders(self, holders: Collection[str]) -> int:
        """Read what holders wrote, least recently read first; return the number of files read."""
        asked = 0
        for owner in sorted(holders, key=lambda one: (self._asked.get(one, 0), one))[:_MOST_OWNERS]:
            self._asked[owner] = self._looks
            presence = self._view.presence(owner)
            progress = None if presence is None else presence.progress
            asked += 1 + self._view.poll_if_moved(owner, progress)
        return asked

    def _read_others(self, count: int) -> int:
        if not self._others:
            names = files.list_names(self._view.paths.journals)
            self._others = sorted(names, reverse=True)
        for _ in range(min(count, len(self._others))):
            self._view.poll_journal(self._others.pop().removesuffix(".jsonl"))
        return count
