"""Run short commands to their end, and kill those that take too long."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.system.processes import kill_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

ANSWER_S = 30.0
"""Seconds for a query. Slurm's programs retry by themselves for about 10 s."""


def finished(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    what: str,
    logs: Path,
    limit_s: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its exit code and output.

    Errors call it ``what`` and refer to ``logs``, the directory of the daemons' logs. It gets
    ``limit_s`` seconds, by default ANSWER_S.

    Raises:
        HpcToolkitError: the command did not end in time, for example because a daemon is stopped.
            Its process group was killed.
    """
    limit_s = ANSWER_S if limit_s is None else limit_s
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environ,
        process_group=0,
    )
    with child:
        try:
            stdout, stderr = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            message = f"{what} did not answer within {limit_s:.3g} s"
            raise HpcToolkitError(message, hint=f"the lab's logs are in {logs}") from None
        finally:
            if child.poll() is None:
                kill_group(child.pid)
    return subprocess.CompletedProcess(argv, child.returncode, stdout, stderr)
