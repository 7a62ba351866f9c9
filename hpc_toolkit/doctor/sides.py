"""The two sides of an examination, and the lead, which sends requests to the other one."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.doctor.channel import Channel
from hpc_toolkit.system.mounts import Mount, mount_of
from hpc_toolkit.system.ranks import boot_id, host_name

if TYPE_CHECKING:
    from pathlib import Path
LEAD, OTHER = "lead", "other"
ANSWER_S = 120.0
BYE = "bye"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One process that uses the directory by one path."""

    host: str
    boot: str
    device: int
    """The kernel's number of the mounted filesystem; comparable only within one boot."""
    path: str
    """The directory by this side's path."""
    mount: Mount

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Side:
        told = record["mount"]
        mount = Mount(told["point"], told["kind"], told["source"], tuple(told["options"]))
        return cls(**{**record, "mount": mount})


def side_of(directory: Path) -> Side:
    return Side(
        host=host_name(),
        boot=boot_id(),
        device=os.stat(directory).st_dev,
        path=str(directory),
        mount=mount_of(directory),
    )


def are_apart(one: Side, other: Side) -> bool:
    """Whether results between these sides are valid between hosts.

    Within one kernel only two mounts with separate caches and locks can stand for two hosts. A bind
    mount, or a second NFS mount that shares the cache of the first, has the same device.
    """
    return one.boot != other.boot or one.device != other.device


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
        if self._asked:
            # A failed check has left its answer unread; the other side takes one request at a time.
            with suppress(OSError):
                self.finish()
        self._number += 1
        self._asked = True
        self._channel.send(self._number, {"act": act, **words})

    def finish(self) -> Any:
        """Wait for the answer to the last request; raises the other side's OSError."""
        told = self._channel.receive(self._number, ANSWER_S)
        self._asked = False
        if "errno" in told:
            raise OSError(told["errno"], f"{told['error']}, on the other side", told["path"])
        return told["answer"]

    def ask(self, act: str, **words: Any) -> Any:
        self.start(act, **words)
        return self.finish()

    def close(self) -> None:
        self.ask(BYE)
