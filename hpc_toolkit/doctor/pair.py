"""The side that asks, of two that look at a directory (:mod:`hpc_toolkit.doctor.partner`)."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hpc_toolkit.doctor.channel import Channel
from hpc_toolkit.doctor.sides import Side, are_apart, side_of

if TYPE_CHECKING:
    from pathlib import Path

LEAD, OTHER = "lead", "other"
ANSWER_S = 120.0
BYE = "bye"


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
        self.ask(BYE)
