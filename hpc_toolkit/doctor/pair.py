"""The lead: the side that sends requests to the other one (:mod:`hpc_toolkit.doctor.partner`)."""

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
    """The lead's view of both sides, and its channel to the other one."""

    def __init__(self, area: Path, *, arrival_s: float) -> None:
        self.area = area
        """The area of the examination, by the lead's path."""
        self._channel = Channel(area, LEAD, OTHER)
        self._channel.connect(arrival_s)
        self._number = 0
        self._asked = False
        self.here = side_of(area.parent)
        self.there = Side.from_json(self.ask("where"))
        self.apart = are_apart(self.here, self.there)
        """Whether results between the sides are valid between hosts."""

    def start(self, act: str, **words: Any) -> None:
        """Send a request without waiting for the answer."""
        if self._asked:
            # A failed check has left its answer unread; the other side takes one request at a time.
            with suppress(OSError):
                self.finish()
        self._number += 1
        self._asked = True
        self._channel.send(self._number, {"act": act, **words})

    def finish(self) -> Any:
        """Wait for the answer to the last request.

        Raises:
            OSError: the request failed with this error on the other side.
            SilentSideError: the other side did not answer.
        """
        told = self._channel.receive(self._number, ANSWER_S)
        self._asked = False
        if "errno" in told:
            raise OSError(told["errno"], f"{told['error']}, on the other side", told["path"])
        return told["answer"]

    def ask(self, act: str, **words: Any) -> Any:
        """Send a request and wait for the answer."""
        self.start(act, **words)
        return self.finish()

    def close(self) -> None:
        """Tell the other side to end."""
        self.ask(BYE)
