"""One log file per rank, with time and rank at the start of each line."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.training.distributed.place import get_distributed_info

if TYPE_CHECKING:
    from hpc_toolkit.training.distributed.place import DistributedInfo

LOGGER = "hpc_toolkit.training.distributed"
"""The logger for this package's messages about checkpoints and signals."""


def rank_logging(directory: str | Path, *, level: int = logging.INFO) -> logging.Logger:
    """Also send the root logger's messages to ``directory/rank-<rank>.log``; return the logger.

    Lines are appended, also after a restart, and look like ``2026-01-31T18:00:00.123Z rank 3/8
    restart 0 INFO message``. Each line of a longer message, such as a traceback, has this prefix.
    A second call switches to another file. Output on stdout or stderr is not included, and nothing
    is synced to disk.
    """
    info = get_distributed_info()
    path = Path(directory) / f"rank-{info.rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    for old in [one for one in root.handlers if isinstance(one, _RankHandler)]:
        root.removeHandler(old)
        old.close()
    handler = _RankHandler(path, encoding="utf-8")
    handler.setFormatter(_RankFormatter(info))
    handler.setLevel(level)
    root.addHandler(handler)
    if root.getEffectiveLevel() > level:
        root.setLevel(level)
    return root


class _RankHandler(logging.FileHandler):
    """A class of its own, so that a second call replaces only this package's handler."""


class _RankFormatter(logging.Formatter):
    def __init__(self, info: DistributedInfo) -> None:
        super().__init__("%(message)s")
        self._rank = f"rank {info.rank}/{info.world_size} restart {info.restart}"

    def format(self, record: logging.LogRecord) -> str:
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        front = f"{second}.{int(record.msecs):03d}Z {self._rank} {record.levelname} "
        lines = super().format(record).splitlines() or [""]
        return "\n".join(front + line for line in lines)
