"""How a launch ended: which rank was the cause, the exit code, and what to say of it."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.rundir import files

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SAVED = 75
"""What a rank exits with that saved its state and is to be started again later."""

_LAST_LINES = 12
_LAST_BYTES = 16384
# Of what a rank printed last, the words that tell what to do about it.
_HINTS = (
    (r"ModuleNotFoundError|No module named", "install it for the Python that runs hpctk"),
    (r"can't open file|No such file or directory", "is the path right on every node?"),
    (r"(?i)address already in use|EADDRINUSE", "leave the choice of ports to hpctk"),
    (r"(?i)out of memory", "a smaller batch, gradient checkpointing, or more GPUs"),
    (r"No space left on device|Disk quota exceeded", "free space there, and start it again"),
    (r"NCCL built in|NCCL is not", "--backend gloo where there is no NVIDIA GPU"),
)
_SIGNAL_HINTS = {
    "SIGKILL": "killed from outside, most often because memory ran out: see dmesg, or sacct's "
    "MaxRSS and the job's --mem",
    "SIGBUS": "shared memory or a disk ran full: see /dev/shm and df",
    "SIGSEGV": "a crash in compiled code: run again with PYTHONFAULTHANDLER=1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """A rank that ended with another code than 0."""

    rank: int
    """Its number in the whole job."""
    code: int
    """What waiting for it told: an exit code, or less than 0 for a signal."""
    first: bool
    """Whether it had ended before the agent told the others to end."""
    said_at: float = 0.0
    """When it last wrote to stderr, by the clock of its files."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended on this node."""

    code: int
    """The exit code of the launch."""
    error: HpcToolkitError | None = None
    """What to tell; None where there is nothing to tell."""


def exit_code(code: int) -> int:
    """A rank's code as a shell gives it: 128 + n for signal n."""
    return 128 - code if code < 0 else code


def saved(codes: Iterable[int]) -> bool:
    """Whether ranks left to be started again: one did so, and the others did nothing else.

    One that was told to end after that counts as having left.
    """
    found = set(codes)
    return SAVED in found and found <= {0, SAVED, -signal.SIGTERM, -signal.SIGKILL}


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure from which the others follow, as far as that can be told.

    Of those that ended by themselves one that a signal ended comes first, since the others then
    lose their connection to it and end with an error; else the one whose error was written first,
    which is before one that follows from it.
    """
    own = [one for one in failures if one.first] or list(failures)
    return min(own, key=lambda one: (one.code > 0, one.code == SAVED, one.said_at, one.rank))


def failure_error(
    failure: RankFailure, *, host: str, restarts: int, log: Path | None
) -> HpcToolkitError:
    """What to tell of the rank that failed."""
    name = signal_name(-failure.code) if failure.code < 0 else ""
    how = f"ended by {name}" if name else f"ended with exit code {failure.code}"
    after = f", after {restarts} restart{'s' if restarts != 1 else ''}" if restarts else ""
    lines = last_lines(log) if log is not None else []
    where = f"; its log: {log}" if log is not None else ""
    message = f"rank {failure.rank} on {host} {how}{after}{where}"
    if lines:
        message += "\n" + "\n".join(f"  {line}" for line in lines)
    if log is not None and _full(log):
        hint = "the disk of that log is full, so the log may lack the reason: free space there"
        return HpcToolkitError(message, hint=hint)
    return HpcToolkitError(message, hint=_SIGNAL_HINTS.get(name) or _hint("\n".join(lines)))


def _full(log: Path) -> bool:
    """Whether nothing can be written beside a log."""
    try:
        found = os.statvfs(log.parent)
    except OSError:
        return False
    return found.f_blocks > 0 and found.f_bavail == 0


def signal_name(number: int) -> str:
    """SIGKILL for 9; the number for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_lines(log: Path) -> list[str]:
    """The end of a log, from the last traceback on where there is one."""
    try:
        text = files.read_fresh(log)[-_LAST_BYTES:].decode(errors="replace")
    except OSError:
        return []
    _, found, traceback = text.rpartition("Traceback (most recent call last):")
    lines = (found + traceback if found else text).rstrip().splitlines()
    return lines[-_LAST_LINES:]


def _hint(text: str) -> str:
    return next((hint for pattern, hint in _HINTS if re.search(pattern, text)), "")
