"""Which rank of a training this process is, set by a launcher or srun, and its log file."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.ranks import RankInfo

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedInfo:
    """Position of one process in a training, in torch.distributed's terms."""

    rank: int = 0
    """Number of the process in the training, from 0."""
    local_rank: int = 0
    """Number of the process on its node, from 0."""
    world_size: int = 1
    """Number of processes of the training."""
    local_world_size: int = 1
    """Number of processes on this node; 1 under plain srun, which does not set it as a number."""
    node_rank: int = 0
    """Number of the node, from 0."""
    backend: str = ""
    """Backend of the process group, such as "gloo"; "" without a group."""
    device: str = "cpu"
    """Device of this rank's model and batches, such as "cuda:1"."""
    restart: int = 0
    """How often the launcher restarted these ranks within their job."""
    requeue: int = 0
    """How often Slurm restarted the job."""
    launched: bool = False
    """Whether a launcher or srun set the rank; otherwise this process is alone."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only rank that writes shared files."""
        return self.rank == 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> DistributedInfo:
        """Read a launcher's variables (RANK, WORLD_SIZE, ...), else srun's, else assume one rank.

        A launcher inside a Slurm step takes precedence, since Slurm's task is the launcher itself.
        torch is not asked: ``backend`` and ``device`` keep their defaults.

        Raises ConfigError if a variable is missing or invalid.
        """
        slurm = RankInfo.from_environ(environ)
        if "RANK" in environ or "WORLD_SIZE" in environ:
            place = cls(
                rank=_number(environ, "RANK"),
                world_size=_number(environ, "WORLD_SIZE"),
                local_rank=_number(environ, "LOCAL_RANK", 0),
                local_world_size=_number(environ, "LOCAL_WORLD_SIZE", 1),
                node_rank=_number(environ, "GROUP_RANK", 0),
                restart=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
                requeue=slurm.restart,
                launched=True,
            )
        else:
            place = cls(
                rank=slurm.rank,
                world_size=slurm.world_size,
                local_rank=slurm.local_rank,
                node_rank=_number(environ, "SLURM_NODEID", 0) if slurm.in_step else 0,
                requeue=slurm.restart,
                launched=slurm.in_step and slurm.world_size > 1,
            )
        if not 0 <= place.rank < place.world_size:
            msg = f"rank {place.rank} is none of {place.world_size} ranks"
            raise ConfigError(msg, hint="ranks are numbered from 0; check RANK and WORLD_SIZE")
        return place


def get_distributed_info() -> DistributedInfo:
    """Return this process's position in the training, inside or outside a process group.

    Inside `process_group` it is the value that the block received.
    """
    return entered[-1] if entered else DistributedInfo.from_environ()


entered: list[DistributedInfo] = []
"""What the blocks of `process_group` that are running received."""


def world_size() -> int:
    """Return the number of ranks of any process group of torch; 1 without a group."""
    return rank_and_size()[1]


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank in the process group and its size; 0 and 1 without a group.

    Imports nothing: a process that never imported torch.distributed has no group.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _number(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environ.get(name)
    if text is None and otherwise is not None:
        return otherwise
    if text is not None and text.isdigit():
        return int(text)
    msg = f"{name} is {text!r}, which is not the number of a rank"
    if text is None:
        msg = f"{name} is not set, though another variable of a launcher is"
    raise ConfigError(msg, hint="start the script with 'hpctk launch' or torchrun")


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
