"""The state of a training, read from its directory: its jobs, last output and last checkpoint.

This imports no torch: ``hpctk status`` reads it on a login node.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import RunError
from hpc_toolkit.rundir.files import last_lines, list_names
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.submit.jobs import JobStates, log_files, read_jobs
from hpc_toolkit.training.distributed.checkpoints import CHECKPOINT_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hpc_toolkit.slurm.records import JobRecord

CHECKPOINTS = "checkpoints"
"""Where the examples save, below the directory of a training."""
_OUTPUT = re.compile(r"rank-(\d+)\.restart-(\d+)\.(?:out|err)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The last line that a training printed."""

    text: str
    path: str
    at: float
    """Epoch seconds at which the file last changed, by the clock of the filesystem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """The latest checkpoint; whether it is intact is not checked."""

    step: int
    path: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a training."""

    directory: str
    jobs: list[JobRecord]
    rank_restarts: int
    """How often the ranks were restarted within the latest launch."""
    output: Output | None
    checkpoint: SavedStep | None

    @property
    def ended(self) -> bool:
        """Whether all of its jobs are over, as far as Slurm says; False without a job."""
        return bool(self.jobs) and all(job.ended for job in self.jobs)

    @property
    def failed(self) -> bool:
        """Whether its latest job is over and did not complete."""
        return self.ended and self.jobs[-1].state != "COMPLETED"

    def to_json(self) -> dict[str, Any]:
        keys = ("id", "state", "reason", "nodes", "restarts", "start", "end")
        jobs = [{key: getattr(job, key) for key in keys} for job in self.jobs]
        last = self.output and asdict(self.output)
        saved = self.checkpoint and asdict(self.checkpoint)
        return {
            "directory": self.directory,
            "jobs": jobs,
            "rank_restarts": self.rank_restarts,
            "output": last,
            "checkpoint": saved,
        }


def is_training(root: Path) -> bool:
    """Return whether a directory has jobs, output or checkpoints of a training, and no run."""
    paths = RunPaths(root)
    return not paths.manifest.exists() and any(
        (paths.jobs.is_dir(), _launches(root), (root / CHECKPOINTS).is_dir())
    )


class Training:
    """The directory of a training."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = RunPaths(root)
        self._states = JobStates(self.paths)

    def progress(self, *, ask: bool = True) -> Progress:
        """Read its state; ``ask`` Slurm about its jobs, at most once in 30 s."""
        outputs = rank_outputs(self.root)
        named = (_OUTPUT.fullmatch(path.name) for path in outputs)
        return Progress(
            directory=str(self.root),
            jobs=self._states.read(ask=ask),
            rank_restarts=max((int(one[2]) for one in named if one), default=0),
            output=_last_line([*job_logs(self.paths), *outputs]),
            checkpoint=last_checkpoint(self.root / CHECKPOINTS),
        )


def job_logs(paths: RunPaths) -> list[Path]:
    """Return the existing logs of the latest recorded job that has written one."""
    for job in reversed(read_jobs(paths)):
        if job.log and (found := log_files(paths, job.job)):
            return found
    return []


def training_logs(root: Path) -> list[Path]:
    """Return the logs of the latest job, else the output of each rank of the latest launch.

    Raises RunError if there is neither.
    """
    found = job_logs(RunPaths(root)) or rank_outputs(root)
    if not found:
        message = f"{root}: the training has not written a log yet"
        raise RunError(message, hint="'hpctk status' shows whether its job waits")
    return found


def rank_outputs(root: Path) -> list[Path]:
    """Return the output files of the latest launch, by rank and restart."""
    latest = max(_launches(root), key=_latest_change, default=None)
    return [] if latest is None else sorted(_outputs(latest), key=_by_rank)


def _launches(root: Path) -> list[Path]:
    logs = RunPaths(root).logs
    folders = (logs / name for name in (list_names(logs) if logs.is_dir() else ()))
    return [path for path in folders if path.is_dir() and any(_outputs(path))]


def _outputs(launch: Path) -> Iterator[Path]:
    return (launch / name for name in list_names(launch) if _OUTPUT.fullmatch(name))


def _latest_change(launch: Path) -> float:
    return max(map(_changed, _outputs(launch)), default=0.0)


def _by_rank(path: Path) -> tuple[int, int, str]:
    found = _OUTPUT.fullmatch(path.name)
    return (int(found[1]), int(found[2]), path.suffix) if found else (0, 0, path.name)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _last_line(paths: list[Path]) -> Output | None:
    """Return the last line of the file that changed last, and has one."""
    for path in sorted(paths, key=_changed, reverse=True):
        with suppress(OSError):
            if text := next(filter(None, map(str.strip, reversed(last_lines(path)))), ""):
                return Output(text=text, path=str(path), at=_changed(path))
    return None


def last_checkpoint(directory: Path) -> SavedStep | None:
    """Return the checkpoint of the latest step in a directory; None if there is none."""
    found = [one for name in list_names(directory) if (one := CHECKPOINT_NAME.fullmatch(name))]
    if not found:
        return None
    last = max(found, key=lambda one: int(one[1]))
    path = directory / last[0]
    return SavedStep(step=int(last[1]), path=str(path), at=_changed(path))
