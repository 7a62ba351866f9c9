"""The function of a submitted job: one rank, which starts workers and forwards signals to them.

The workers run in a separate process. submitit has its own handlers for the signals that workers
use, and a worker that is killed must not take down the process that reports its end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_toolkit.errors import TRY_AGAIN, HpcToolkitError
from hpc_toolkit.system.processes import describe_exit, die_with_parent
from hpc_toolkit.system.ranks import process_ticks, without_rank
from hpc_toolkit.worker.worker import EXIT_COMPLETE

if TYPE_CHECKING:
    from collections.abc import Callable

_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_LOOK_S = 1.0


def work_rank(
    root: str, workers: int | None = None, submitter: tuple[int, int] | None = None
) -> int:
    """Run ``hpctk work ROOT``; return 0 when the run is complete.

    submitit loads and calls this function; only its arguments are pickled with it.

    Args:
        root: absolute path of the run.
        workers: number of local workers to start; None: this is one rank of an srun step.
        submitter: process id and start time from :func:`own_identity`; the workers leave when
            that process on this machine is gone.

    Raises:
        SystemExit: items are left, so for submitit the job has no result yet. The code is 75, or
            submitit's requeue code for a local job that reached its time limit and starts again.
        HpcToolkitError: the workers ended with an error, which is in the job's stderr.
    """
    if _gone(submitter):
        raise SystemExit(TRY_AGAIN)
    told: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def tell(number: int, _frame: object) -> None:
        told.append(number)
        if child is not None:
            _pass_on(child, number)

    # submitit's handlers would requeue the job while the other ranks still finish their items,
    # and count a preemption in the first minutes as a timeout.
    for sig in (*_WARNINGS, signal.SIGTERM):
        signal.signal(sig, tell)
    argv, environ = [sys.executable, "-Pm", "hpc_toolkit", "work", root], without_rank()
    if workers is not None:
        argv += ["--workers", str(workers)]
        # A notebook may itself run in an srun step; its local workers are not ranks of that step.
        environ.pop("SLURM_STEP_ID", None)
    child = subprocess.Popen(
        argv,
        env=environ,
        stdin=subprocess.DEVNULL,
        # A notebook's interrupt reaches its kernel's process group, and is not meant for workers.
        process_group=0,
        preexec_fn=_prepare_child,  # noqa: PLW1509 - only numpy's threads are beside this one
    )
    for number in told:
        _pass_on(child, number)
    code = _wait(child, submitter, lambda: tell(signal.SIGTERM, None))
    if code == EXIT_COMPLETE:
        return code
    if code == TRY_AGAIN or (code < 0 and told):
        raise SystemExit(_code_of_rest(workers, told))
    how = "ended with" if code >= 0 else "were"
    message = f"the workers of {root} {how} {describe_exit(code)}"
    raise HpcToolkitError(message, hint="see the job's stderr for the reason")


def own_identity() -> tuple[int, int]:
    """The id and start time of this process, which identify it on this machine."""
    return os.getpid(), process_ticks(os.getpid())


def _gone(submitter: tuple[int, int] | None) -> bool:
    return submitter is not None and process_ticks(submitter[0]) != submitter[1]


def _wait(
    child: subprocess.Popen[bytes], submitter: tuple[int, int] | None, end: Callable[[], None]
) -> int:
    """Wait for the workers; call ``end`` once if the submitter is gone before them."""
    while submitter is not None:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=_LOOK_S)
        if _gone(submitter):
            end()
            submitter = None
    return child.wait()


def _prepare_child() -> None:
    # Slurm signals every process of a step; this process forwards SIGUSR2 as SIGUSR1.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    die_with_parent(signal.SIGTERM)


def _pass_on(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        child.send_signal(signal.SIGUSR1 if number in _WARNINGS else number)


def _code_of_rest(workers: int | None, told: list[int]) -> int:
    """The exit code if items are left; it says whether a local job starts again."""
    if workers is None or not set(told) & set(_WARNINGS):
        return TRY_AGAIN
    from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

    return int(LOCAL_REQUEUE_RETURN_CODE)
