"""Keep one line with the progress of a run up to date on the terminal of 'hpctk work'.

This is a program of its own: a forecast needs numpy, and numpy's threads must not be in the process
that forks workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hpc_toolkit.report.panel import one_line
from hpc_toolkit.system.processes import die_with_parent
from hpc_toolkit.system.terminal import printable, split_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hpc_toolkit.run import Run

_REFRESH_S = 0.5


@contextmanager
def progress_line(root: Path) -> Iterator[None]:
    """Show the progress of a run on stderr, a terminal, while the block runs."""
    with subprocess.Popen(
        # -P: no module of the user in the current directory replaces one of Python.
        [sys.executable, "-P", "-m", "hpc_toolkit.cli.progressline", str(root)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        # ^C is for the workers; the line stays until they have stopped.
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
    ) as child:
        try:
            yield
        finally:
            child.terminate()
            child.wait()
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _show(run: Run) -> None:
    while True:
        room = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
        sys.stderr.write(f"\r{split_at(printable(one_line(run.status())), room)[0]}\x1b[K")
        sys.stderr.flush()
        time.sleep(_REFRESH_S)


if __name__ == "__main__":
    from hpc_toolkit.run import Run

    _show(Run.open(sys.argv[1]))
