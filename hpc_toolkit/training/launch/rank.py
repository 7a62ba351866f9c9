"""Become a rank: ``python -Pm hpc_toolkit.training.launch.rank PARENT CPUS PROGRAM ARGUMENTS...``.

Child processes can outlive their agent. This process asks the kernel to end it with the agent,
binds itself to CPUS (such as 0-7; empty for all), and then executes the program. It ignores Slurm's
warning signals first: they would end a rank whose script has not set a handler yet. The agent
starts this process with signals blocked, so that none comes before.
"""

from __future__ import annotations

import os
import signal
import sys

from hpc_toolkit.system.processes import WARNINGS, die_with_parent
from hpc_toolkit.system.quantities import parse_cpus

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end all ranks."""

_NOT_FOUND = 127


def main(argv: list[str]) -> int:
    """Execute the program in this process; return only if it cannot be started."""
    die_with_parent()
    # The agent may have ended before the call above.
    if os.getppid() != int(argv[1]):
        return 1
    if argv[2]:
        os.sched_setaffinity(0, parse_cpus(argv[2]))
    ignore_warnings()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*WARNINGS, *ENDING))
    try:
        os.execvp(argv[3], argv[3:])  # noqa: S606 - the program is what the user launches
    except OSError as error:
        sys.stderr.write(f"{argv[3]}: {error.strerror}\n")
        return _NOT_FOUND


def ignore_warnings() -> None:
    """Ignore warning signals until the script sets a handler; exec keeps them ignored."""
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
