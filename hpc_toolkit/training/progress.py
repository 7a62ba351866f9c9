"""The state of a training, read from its directory, and how a launch of its ranks ended.

This imports no torch: ``hpctk status`` reads it on a login node.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpc_toolkit.errors import TRY_AGAIN, HpcToolkitError, RunError
from hpc_toolkit.report.panel import job_facts
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.files import last_lines, list_names
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.records import JobRecord
from hpc_toolkit.submit import JobStates, log_files, read_jobs
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.training.distributed.checkpoints import CHECKPOINT_NAME

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
    def goes_on(self) -> bool:
        """Whether it has jobs that are not over."""
        return bool(self.jobs) and not self.ended

    @property
    def failed(self) -> bool:
        """Whether its latest job is over and did not complete."""
        return self.ended and self.jobs[-1].state != "COMPLETED"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "jobs": job_facts(self.jobs)}


def is_training(root: Path) -> bool:
    """Return whether a directory has jobs, output or checkpoints of a training, and no run."""
    paths = RunPaths(root)
    return not paths.manifest.exists() and any(
        (paths.jobs.is_dir(), _launches(root), (root / CHECKPOINTS).is_dir())
    )


class Training:
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

    def by_rank(path: Path) -> tuple[int, int, str]:
        found = _OUTPUT.fullmatch(path.name)
        return (int(found[1]), int(found[2]), path.suffix) if found else (0, 0, path.name)

    changed = {one: max(map(_changed, _outputs(one)), default=0.0) for one in _launches(root)}
    latest = max(changed, key=lambda one: changed[one], default=None)
    return [] if latest is None else sorted(_outputs(latest), key=by_rank)


def _launches(root: Path) -> list[Path]:
    logs = RunPaths(root).logs
    folders = (logs / name for name in (list_names(logs) if logs.is_dir() else ()))
    return [path for path in folders if path.is_dir() and any(_outputs(path))]


def _outputs(launch: Path) -> Iterator[Path]:
    return (launch / name for name in list_names(launch) if _OUTPUT.fullmatch(name))


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


_LAST_LINES = 12
_LAST_BYTES = 16384
# Patterns in the last output of a rank, each with the hint to print.
_HINTS = (
    (r"ModuleNotFoundError|No module named", "install it for the Python that runs hpctk"),
    (r"can't open file|No such file or directory", "is the path right on every node?"),
    (r"(?i)address already in use|EADDRINUSE", "leave the choice of ports to hpctk"),
    (r"(?i)out of memory", "a smaller batch, gradient checkpointing, or more GPUs"),
    (r"No space left on device|Disk quota exceeded", "free space there, and start it again"),
    (
        r"terminate called without an active exception",
        "a thread outlived Python: sleep 0.05 s after destroy_process_group, as process_group does",
    ),
    (r"NCCL built in|NCCL is not", "--backend gloo where there is no NVIDIA GPU"),
)
_SIGNAL_HINTS = {
    "SIGKILL": "killed from outside, most often because memory ran out: see dmesg, or sacct's "
    "MaxRSS and the job's --mem",
    "SIGBUS": "shared memory or a disk ran full: see /dev/shm and df",
    "SIGSEGV": "a crash in compiled code: run again with PYTHONFAULTHANDLER=1",
}


class RankFailure(NamedTuple):
    """A rank that ended by itself, with a code other than 0."""

    rank: int
    """Its number in the job."""
    code: int
    """Its exit code, or minus the number of the signal that ended it."""
    log: Path | None = None
    """The file of its stderr, if it has one."""
    error_file: Path | None = None
    """The file to which ``@record`` of torch writes an exception, if there was one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended on this node."""

    code: int
    error: HpcToolkitError | None = None
    """The error to report; None if there is nothing to report."""
    log: Path | None = None
    """The log that the error names."""
    ranks: int = 0
    """Ranks of the last round, on all nodes; 0 if no round started."""
    restarts: int = 0
    """How often all ranks were restarted."""


def summary(outcome: Outcome, run_dir: Path | None) -> str:
    """Return how a launch ended and what to look at next, on one line."""
    if outcome.code == TRY_AGAIN and outcome.error is None:
        how = "the ranks saved and exited with 75; run the same command again to continue"
    else:
        how = f"exit code {outcome.code}"
    found = [how, counted(outcome.ranks, "rank") + ", " + counted(outcome.restarts, "restart")]
    if run_dir is None:
        found.append("with --run-dir DIR, 'hpctk status DIR' shows its output and checkpoints")
        return "; ".join(found)
    # The exit code is known: an unreadable directory must not replace it by an error.
    with suppress(HpcToolkitError, OSError):
        if (last := last_checkpoint(run_dir / CHECKPOINTS)) is not None:
            found.append(f"last checkpoint: step {last.step}, {last.path}")
    found.append(f"next: hpctk status {shlex.quote(str(run_dir))}")
    return "; ".join(found)


def exit_code(code: int) -> int:
    """Return a rank's code as a shell reports it: 128 + n for signal n."""
    return 128 - code if code < 0 else code


def saved(codes: Iterable[int | None]) -> bool:
    """Return whether the ranks saved their state and exited, to be started again.

    At least one exited with TRY_AGAIN; the others with 0 or TRY_AGAIN, or were ended after it.
    """
    found = set(codes) - {None}
    return TRY_AGAIN in found and found <= {0, TRY_AGAIN, -signal.SIGTERM, -signal.SIGKILL}


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the failure that most likely caused the others.

    A rank that a signal ended comes first: the others lose their connection to it and exit with an
    error. Otherwise it is the rank that wrote its error first, since the errors that follow from it
    are written later.
    """

    def order(one: RankFailure) -> tuple[bool, bool, float, int]:
        said_at = one.log.stat().st_mtime if one.log is not None else 0.0
        return one.code > 0, one.code == TRY_AGAIN, said_at, one.rank

    return min(failures, key=order)


def failure_error(failure: RankFailure, *, host: str, restarts: int) -> HpcToolkitError:
    """Describe a failed rank as an error, with the end of its log and a hint."""
    name, log = signal_name(-failure.code) if failure.code < 0 else "", failure.log
    how = f"ended by {name}" if name else f"ended with exit code {failure.code}"
    after = f", after {counted(restarts, 'restart')}" if restarts else ""
    lines = recorded_lines(failure.error_file) if failure.error_file is not None else []
    lines = lines or (log_end(log) if log is not None else [])
    where = f"; its log: {log}" if log is not None else ""
    message = f"rank {failure.rank} on {host} {how}{after}{where}"
    if lines:
        message += "\n" + "\n".join(f"  {line}" for line in lines)
    hints = (hint for pattern, hint in _HINTS if re.search(pattern, "\n".join(lines)))
    hint = _SIGNAL_HINTS.get(name) or next(hints, "")
    if log is not None:
        with suppress(OSError):
            disk = shutil.disk_usage(log.parent)
            if disk.free == 0 < disk.total:
                hint = "the log may be incomplete because its disk is full: free space there"
    return HpcToolkitError(message, hint=hint)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL for 9, or its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def recorded_lines(error_file: Path) -> list[str]:
    """Return the end of the exception that ``@record`` of torch wrote to a file; empty if none."""
    try:
        found = json.loads(files.read_fresh(error_file))["message"]
        return _end(found if isinstance(found, str) else found["extraInfo"]["py_callstack"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []  # a script may write anything there


def log_end(log: Path) -> list[str]:
    """Return the last lines of a log, starting at its last traceback if it has one."""
    try:
        return _end(files.read_fresh(log)[-_LAST_BYTES:].decode(errors="replace"))
    except OSError:
        return []


def _end(text: str) -> list[str]:
    text = text[-_LAST_BYTES:]
    _, found, traceback = text.rpartition("Traceback (most recent call last):")
    lines = (found + traceback if found else text).rstrip().splitlines()
    return lines[-_LAST_LINES:]
