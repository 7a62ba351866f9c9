"""Submit a job to a lab; an interrupt cancels a job that was already submitted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.lab import commands
from hpc_toolkit.lab.clients import ask, environment
from hpc_toolkit.lab.packages import program
from hpc_toolkit.slurm.records import parse_job_id
from hpc_toolkit.system.processes import interrupts_held, kill_group, readable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpc_toolkit.lab.settings import LabPaths


@dataclass(frozen=True, slots=True)
class Submission:
    """The result of sbatch for a script that it did not refuse."""

    job: str
    """The job's id; "" if sbatch submitted none, as for ``--test-only``."""
    said: str
    """The stderr of sbatch so far."""


def submit(paths: LabPaths, script: Path, arguments: Sequence[str]) -> Submission:
    """Submit a script with its arguments, and return as soon as the job has an id.

    ``#SBATCH --wait`` has no effect: sbatch is killed once it has printed the id. An interrupt
    cancels a job that was submitted by then.

    Raises:
        HpcToolkitError: sbatch refuses the script, or does not answer within 30 s.
    """
    # Absolute, so that sbatch takes no script for an option; the arguments go to the script.
    argv = [program("sbatch"), "--parsable", str(script.absolute()), *arguments]
    # A terminal: to a pipe sbatch would write the id when it ends, which is too late with --wait.
    terminal, end = os.openpty()
    with open(terminal, "rb", buffering=0), tempfile.TemporaryFile() as errors:
        with interrupts_held() as let_go:
            with open(end, "wb", buffering=0) as stdout:
                child = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=errors,
                    env=environment(paths),
                    process_group=0,
                )
            with child:
                try:
                    job = _interruptible_number(paths, terminal, let_go)
                    code = 0 if job else child.wait(commands.ANSWER_S)
                finally:
                    if child.poll() is None:
                        kill_group(child.pid)
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    if code != 0:
        message = " ".join(said.split()) or "sbatch failed"
        raise HpcToolkitError(message, hint=f"the lab's logs are in {paths.logs}")
    return Submission(job, said)


def _interruptible_number(paths: LabPaths, terminal: int, let_go: Callable[[], None]) -> str:
    printed = bytearray()
    try:
        let_go()
        return _number(paths, terminal, printed)
    except KeyboardInterrupt:
        # The controller may have the request already, so wait for the id and cancel that job.
        with contextlib.suppress(HpcToolkitError):
            if job := _number(paths, terminal, printed):
                ask(paths, "scancel", "--quiet", job)
        raise


def _number(paths: LabPaths, terminal: int, printed: bytearray) -> str:
    """Read the job's id from the terminal; "" if sbatch ended without one.

    ``printed`` is the output that has been read so far.
    """
    until = time.monotonic() + commands.ANSWER_S
    while not (found := parse_job_id(printed.decode(errors="replace").rpartition("\n")[0])):
        if not readable(terminal, timeout_s=max(0.0, until - time.monotonic())):
            message = f"sbatch did not answer within {commands.ANSWER_S:.3g} s"
            hint = f"the job may be queued all the same; the lab's logs are in {paths.logs}"
            raise HpcToolkitError(message, hint=hint)
        try:
            printed += os.read(terminal, 4096)
        except OSError:
            return ""  # A terminal whose other end is closed: ioctl_tty(2).
    return found[0]
