"""Two sides at work: the lead asks, the other does, through their own paths to one directory."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hpc_toolkit import files
from hpc_toolkit.doctor import gpus, locks, names, views
from hpc_toolkit.doctor.channel import Channel
from hpc_toolkit.doctor.sides import Side, are_apart, side_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LEAD, OTHER = "lead", "other"
ANSWER_S = 120.0
_BYE = "bye"


class Pair:
    """The lead's end."""

    def __init__(self, area: Path, *, arrival_s: float) -> None:
        self.area = area
        """The directory to work in, as the lead names it."""
        self._channel = Channel(area, LEAD, OTHER)
        self._channel.connect(arrival_s)
        self._number = 0
        self._asked = False
        self.here = side_of(area.parent)
        self.there = Side.from_json(self.ask("where"))
        self.apart = are_apart(self.here, self.there)
        """Whether what holds between the sides holds between hosts."""

    def start(self, act: str, **words: Any) -> None:
        """Ask for something without waiting for it."""
        if self._asked:
            # A check that failed on this side did not wait; the other side reads one at a time.
            with suppress(OSError):
                self.finish()
        self._number += 1
        self._asked = True
        self._channel.send(self._number, {"act": act, **words})

    def finish(self) -> Any:
        """Wait for what was asked for last.

        Raises:
            OSError: the other side met this.
            SilentSideError: it did not answer.
        """
        told = self._channel.receive(self._number, ANSWER_S)
        self._asked = False
        if "errno" in told:
            raise OSError(told["errno"], f"{told['error']}, on the other side", told["path"])
        return told["answer"]

    def ask(self, act: str, **words: Any) -> Any:
        """Ask for something and wait for the answer."""
        self.start(act, **words)
        return self.finish()

    def close(self) -> None:
        """Let the other side go."""
        self.ask(_BYE)


class Partner:
    """The other side: does what it is asked until it is let go."""

    def __init__(self, area: Path) -> None:
        self._area = area
        self._holder: locks.Holder | None = None
        self._changes: views.Changes | None = None

    def serve(self, *, arrival_s: float) -> None:
        """Answer the lead.

        Raises:
            SilentSideError: the lead fell silent.
        """
        channel = Channel(self._area, OTHER, LEAD)
        channel.connect(arrival_s)
        number, act = 0, ""
        try:
            while act != _BYE:
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
            _BYE: os.getpid,
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
