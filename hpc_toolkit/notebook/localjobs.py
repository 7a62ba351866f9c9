"""submitit's jobs on this machine, whichever process started them: their state and their end."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.slurm.records import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNNING = "RUNNING"


def is_local(job: Any) -> bool:
    """Whether a submitit job runs as local processes and not in Slurm."""
    return type(job).__name__ == "LocalJob"


def local_state(job: Any) -> str:
    """``RUNNING``, ``FINISHED``, ``INTERRUPTED``, or "unknown": not running here and no result.

    submitit knows only the result of a job that another process started.
    """
    state = str(job.state)
    if state in (RUNNING, "FINISHED", "INTERRUPTED"):
        return state
    with _controller(job) as found:
        return UNKNOWN if found is None else RUNNING


def end_local(job: Any) -> bool:
    """Ask a job to end after its workers' current items; False if it cannot be asked."""
    with _controller(job) as found, suppress(OSError):
        if found is not None:
            signal.pidfd_send_signal(found, signal.SIGTERM)
            return True
    return False


@contextmanager
def _controller(job: Any) -> Iterator[int | None]:
    """A pidfd of the job's process that forwards signals; None if it does not run here."""
    pid = int(job.job_id) if job.job_id.isdecimal() else 0
    try:
        found = os.pidfd_open(pid)
    except (OSError, OverflowError):
        yield None
        return
    try:
        # Checked while the pidfd is held: the id cannot be reused, but may be another process's.
        yield found if _is_controller(pid, job.paths.folder) else None
    finally:
        os.close(found)


def _is_controller(pid: int, folder: Path) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[-4:-1] == [b"-m", b"submitit.local._local", os.fsencode(folder)]
