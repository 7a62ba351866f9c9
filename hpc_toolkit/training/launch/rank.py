"""What becomes a rank: ``python -m hpc_toolkit.training.launch.rank PARENT PROGRAM ARGUMENTS...``.

Torch starts ranks in a way that lets them outlive their agent. This asks the kernel to end them
with it, and becomes the program. A warning of Slurm that comes before the script has a handler for
it must not end the rank either.
"""

from __future__ import annotations

import os
import signal
import sys

from hpc_toolkit.system.processes import die_with_parent

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which Slurm, or a user, tells a training that its time is nearly over."""

_NOT_FOUND = 127


def main(argv: list[str]) -> int:
    """Become the program; returns only where it cannot be started."""
    die_with_parent()
    # The agent may have ended before the kernel was asked.
    if os.getppid() != int(argv[1]):
        return 1
    ignore_warnings()
    try:
        os.execvp(argv[2], argv[2:])  # noqa: S606 - the program is what the user launches
    except OSError as error:
        sys.stderr.write(f"{argv[2]}: {error.strerror}\n")
        return _NOT_FOUND


def ignore_warnings() -> None:
    """Let warnings pass until the script has a handler; what is ignored stays so after exec."""
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)


def wrapped(program: str, arguments: list[str], *, agent: int) -> tuple[str, list[str]]:
    """The command that becomes ``program`` as a rank of the process ``agent``."""
    return sys.executable, ["-m", __name__, str(agent), program, *arguments]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
