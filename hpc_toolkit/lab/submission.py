"""One submission to a lab, which an interrupt does not leave behind half known."""

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
    """What sbatch did with a script that it did not refuse."""

    job: str
    """The job's number; "" where sbatch submitted none, as for ``--test-only``."""
    said: str
    """Its standard error so far."""


def submit(paths: LabPaths, script: Path, arguments: Sequence[str]) -> Submission:
    """Submit a script with its arguments, and return as soon as the job has a number.

    ``#SBATCH --wait`` waits for nothing here: sbatch is ended once it has told the number. An
    interrupt cancels what was submitted by then.

    Raises:
        HpcToolkitError: sbatch refuses the script, or does not answer within 30 s.
    """
    # Made absolute, so that no name is taken for an option; what follows is the script's.
    argv = [program("sbatch"), "--parsable", str(script.absolute()), *arguments]
    # Into a pipe sbatch would write the number when it ends, and with --wait that is too late.
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
        # What sbatch has asked for cannot be called back: it gets its number, and is cancelled.
        with contextlib.suppress(HpcToolkitError):
            if job := _number(paths, terminal, printed):
                ask(paths, "scancel", "--quiet", job)
        raise


def _number(paths: LabPaths, terminal: int, printed: bytearray) -> str:
    """The number once it is on the terminal; "" if sbatch ended without one.

    ``printed`` is what has been read from it.
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
