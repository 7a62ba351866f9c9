"""Outcome of a launch: the rank that caused it, the exit code and the error message."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hpc_toolkit.errors import TRY_AGAIN, HpcToolkitError
from hpc_toolkit.rundir import files
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.training.progress import CHECKPOINTS, last_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


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
    """The exit code of the launch."""
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
    lines = lines or (last_lines(log) if log is not None else [])
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


def last_lines(log: Path) -> list[str]:
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
