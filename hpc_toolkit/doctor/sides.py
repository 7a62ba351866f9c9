"""The two sides of an examination: their hosts and mounts, and whether they stand for two hosts."""

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
    """One process that uses the directory by one path."""

    host: str
    """Host name (see :func:`hpc_toolkit.system.ranks.host_name`)."""
    boot: str
    """Id of the host's boot."""
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
    """Describe this process as a side.

    Raises:
        OSError: the directory cannot be accessed.
    """
    return Side(
        host=host_name(),
        boot=boot_id(),
        device=os.stat(directory).st_dev,
        path=str(directory),
        mount=mount_of(directory),
    )


def are_apart(one: Side, other: Side) -> bool:
    """Return whether results between these sides are valid between hosts.

    Within one kernel only two mounts with separate caches and locks can stand for two hosts. A bind
    mount, or a second NFS mount that shares the cache of the first, has the same device.
    """
    return one.boot != other.boot or one.device != other.device
