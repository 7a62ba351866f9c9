"""A pool of local workers in a process of its own, for a thread that may end at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from hpc_toolkit.errors import TRY_AGAIN, HpcToolkitError, TryAgainLaterError
from hpc_toolkit.rundir.layout import RunPaths, read_manifest
from hpc_toolkit.system.processes import die_with_parent
from hpc_toolkit.system.ranks import without_rank
from hpc_toolkit.worker.pool import Pool, error_report, reported_error, stopping_line
from hpc_toolkit.worker.worker import WorkerOptions

_LIVES = 5
"""How often a pool is started again if its process is killed."""
_QUIET_S = 1.0
"""Seconds of waiting for workers to exit before that is reported."""
_MAIN = "import sys; from hpc_toolkit.worker.apart import main; sys.exit(main(*sys.argv[1:]))"


class PoolApart:
    """Local workers of a run, which drain when the thread that started them ends."""

    def __init__(self, root: Path, workers: int) -> None:
        self._root, self._workers, self._lives = root, workers, _LIVES
        self._process: subprocess.Popen[bytes] | None = None
        self.environ: dict[str, str] = {}  # of the workers, besides that of this process

    def keep(self) -> HpcToolkitError | None:
        """Start the workers if they were not, or were killed; the error with which they ended."""
        process = self._process
        if process is None or ((process.poll() or 0) < 0 and self._lives):
            self._lives -= process is not None
            self._process = self._started()
        elif process.returncode is not None:
            assert process.stdout is not None
            with suppress(ValueError):
                return reported_error(json.loads(process.stdout.read()))
            message = f"the workers of {self._root} have ended, and items are left"
            return TryAgainLaterError(message, hint="start workers again; nothing is lost")
        return None

    def end(self, *, complete: bool) -> None:
        """Wait until the workers have exited; unless the run is ``complete``, ask them to."""
        if self._process is None:
            return
        if not complete:
            self._process.terminate()
        try:
            self._process.wait(timeout=_QUIET_S)
        except subprocess.TimeoutExpired:
            grace_s = WorkerOptions().grace_s
            os.write(2, stopping_line(signal.SIGTERM, self._workers, grace_s, again=False))
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _started(self) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-P", "-c", _MAIN]
        argv = [*program, str(self._root), str(self._workers), str(os.getpid()), *sys.argv]
        # The caller may run in an srun step, and its local workers are not ranks of that step.
        environ = without_rank() | self.environ
        if environ.pop("SLURM_STEP_ID", None) is not None:
            environ.setdefault("SLURM_OVERLAP", "1")  # as start_worker does
        # Its own process group: a terminal's ^C reaches only the caller.
        return subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0
        )


def main(root: str, workers: str, parent: str, *argv: str) -> int:
    """Run the pool of a script that was called with ``argv``; an error is reported on stdout."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):
        return TRY_AGAIN
    try:
        pool = Pool(
            paths=RunPaths(Path(root)),
            manifest=read_manifest(Path(root)),
            options=WorkerOptions(argv=argv),
            workers=int(workers),
            silent=True,
        )
        return pool.run()
    except HpcToolkitError as error:
        os.write(1, error_report(error))
        return error.exit_code
