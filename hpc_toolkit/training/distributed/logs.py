"""One log file per rank, with time and rank in front of each line."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.training.distributed.place import get_distributed_info

if TYPE_CHECKING:
    from hpc_toolkit.training.distributed.place import DistributedInfo

LOGGER = "hpc_toolkit.training.distributed"
"""The logger that this package tells of checkpoints and signals."""


def rank_logging(directory: str | Path, *, level: int = logging.INFO) -> logging.Logger:
    """Send the root logger's messages to ``directory/rank-<rank>.log`` as well; return it.

    Lines are appended, also by a rank that started again, and look like ``2026-01-31T18:00:00.123Z
    rank 3/8 restart 0 INFO message``; a message of several lines, such as a traceback, has that on
    each of them. Called again, the file is another one. What goes to stdout or stderr is not in it,
    and nothing is synced to disk.
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
    """Told apart from handlers of others."""


class _RankFormatter(logging.Formatter):
    def __init__(self, info: DistributedInfo) -> None:
        super().__init__("%(message)s")
        self._rank = f"rank {info.rank}/{info.world_size} restart {info.restart}"

    def format(self, record: logging.LogRecord) -> str:
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        front = f"{second}.{int(record.msecs):03d}Z {self._rank} {record.levelname} "
        lines = super().format(record).splitlines() or [""]
        return "\n".join(front + line for line in lines)
