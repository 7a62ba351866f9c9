"""The two sides of an examination: where each stands, and what their agreement can prove."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.system.mounts import Mount, mount_of
from hpc_toolkit.system.ranks import boot_id, host_name

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One process that works through one path."""

    host: str
    """Host name (see :func:`hpc_toolkit.system.ranks.host_name`)."""
    boot: str
    """Id of the host's boot."""
    device: int
    """The kernel's number of the mounted filesystem; means something within one boot only."""
    path: str
    """The directory as this side names it."""
    mount: Mount

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Side:
        told = record["mount"]
        mount = Mount(told["point"], told["kind"], told["source"], tuple(told["options"]))
        return cls(**{**record, "mount": mount})


def side_of(directory: Path) -> Side:
    """This process as a side.

    Raises:
        OSError: the directory cannot be looked at.
    """
    return Side(
        host=host_name(),
        boot=boot_id(),
        device=os.stat(directory).st_dev,
        path=str(directory),
        mount=mount_of(directory),
    )


def are_apart(one: Side, other: Side) -> bool:
    """Whether what holds between these sides holds between hosts.

    Within one kernel only two mounts with caches and locks of their own can stand for two hosts; a
    bind mount, or a second NFS mount that shares the first one's cache, has the same device.
    """
    return one.boot != other.boot or one.device != other.device
