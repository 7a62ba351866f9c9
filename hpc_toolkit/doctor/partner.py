"""The other side: carries out the lead's requests through its own path to the directory."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from hpc_toolkit.doctor import gpus, locks, names, views
from hpc_toolkit.doctor.channel import Channel
from hpc_toolkit.doctor.pair import ANSWER_S, BYE, LEAD, OTHER
from hpc_toolkit.doctor.sides import side_of
from hpc_toolkit.rundir import files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Partner:
    """The other side: carries out requests until the lead ends the examination."""

    def __init__(self, area: Path) -> None:
        self._area = area
        self._holder: locks.Holder | None = None
        self._changes: views.Changes | None = None

    def serve(self, *, arrival_s: float) -> None:
        """Answer the lead's requests.

        Raises:
            SilentSideError: the lead did not arrive, or stopped sending requests.
        """
        channel = Channel(self._area, OTHER, LEAD)
        channel.connect(arrival_s)
        number, act = 0, ""
        try:
            while act != BYE:
                number += 1
                asked = channel.receive(number, ANSWER_S)
                act = asked.pop("act")
                channel.send(number, self._answer(act, asked))
        finally:
            self._let_go()

    def _answer(self, act: str, words: dict[str, Any]) -> dict[str, Any]:
        acts: dict[str, Callable[..., Any]] = {
            "where": lambda: side_of(self._area.parent).to_json(),
            "race": lambda own: names.race(self._area / "race", own),
            "create": lambda name, target: files.create_name(self._area / name, target),
            "replace": lambda name: names.replace_often(self._area / name),
            "prepare": self._prepare,
            "change": self._change,
            "hold": self._hold,
            "let_go": self._let_go,
            "try": lambda kind, name: locks.try_lock(kind, self._area / name),
            "wall": time.time,
            "gpus": gpus.look_here,
            "sum": self._sum,
            BYE: os.getpid,
        }
        try:
            return {"answer": acts[act](**words)}
        except OSError as error:
            told = {"errno": error.errno or 0, "error": error.strerror or str(error)}
            return {**told, "path": str(error.filename) if error.filename else None}

    def _prepare(self, name: str) -> None:
        self._changes = views.Changes(self._area / name)

    def _change(self) -> None:
        assert self._changes is not None
        self._changes.make()

    def _sum(self, **words: Any) -> list[dict[str, Any]]:
        return gpus.run_ranks(self._area / gpus.MEETING, **words)

    def _hold(self, kind: str, name: str) -> str:
        self._holder = locks.Holder(kind, self._area / name)
        return self._holder.outcome

    def _let_go(self) -> None:
        if self._holder is not None:
            self._holder.kill()
            self._holder = None
