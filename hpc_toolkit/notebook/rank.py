"""What a submitted job runs: one rank, which starts workers and passes signals on to them.

The workers are a process of their own. submitit has handlers for the signals that workers are told
by, and a worker that is killed must not take the process with it that reports its end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.run import Run
from hpc_toolkit.system.processes import die_with_parent
from hpc_toolkit.system.ranks import process_ticks
from hpc_toolkit.worker.worker import EXIT_COMPLETE, EXIT_LEFT

if TYPE_CHECKING:
    from collections.abc import Callable

_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_LOOK_S = 1.0


def work_rank(
    root: str, workers: int | None = None, submitter: tuple[int, int] | None = None
) -> int:
    """Do what ``hpctk work ROOT`` does; 0 when the run is complete.

    This is the function that submitit loads and calls; its arguments are all that is pickled.

    Args:
        root: absolute path of the run.
        workers: start so many local workers; None: this is one rank of an srun step.
        submitter: process id and start, as :func:`own_identity` gives it; the workers leave when
            that process of this machine is gone.

    Raises:
        SystemExit: items are left, so that for submitit the job has no result yet. The code is 75,
            or submitit's own for a local job that its time limit ended and that starts again.
        HpcToolkitError: the workers ended with an error, which is in the job's stderr.
    """
    if _gone(submitter):
        raise SystemExit(EXIT_LEFT)
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
    child = subprocess.Popen(
        _argv(root, workers),
        env=_environment(workers),
        stdin=subprocess.DEVNULL,
        # A notebook's interrupt reaches the group of its kernel, and is not meant for workers.
        process_group=0,
        preexec_fn=_prepare_child,  # noqa: PLW1509 - only numpy's threads are beside this one
    )
    for number in told:
        _pass_on(child, number)
    code = _wait(child, submitter, lambda: tell(signal.SIGTERM, None))
    if code == EXIT_COMPLETE:
        return code
    if code == EXIT_LEFT or (code < 0 and told):
        raise SystemExit(_code_of_rest(workers, told))
    message = f"the workers of {root} ended with {_ending(code)}"
    raise HpcToolkitError(message, hint="their reason is in the job's stderr")


def items_left(root: str) -> int:
    """How many items are pending; 0 also when the run is complete."""
    status = Run.open(root).status()
    counts = status.stages.values()
    return 0 if status.complete else sum(stage.pending + stage.leased for stage in counts)


def own_identity() -> tuple[int, int]:
    """What tells this process from all others of this machine: its id, and when it started."""
    return os.getpid(), process_ticks(os.getpid())


def _gone(submitter: tuple[int, int] | None) -> bool:
    return submitter is not None and process_ticks(submitter[0]) != submitter[1]


def _wait(
    child: subprocess.Popen[bytes], submitter: tuple[int, int] | None, end: Callable[[], None]
) -> int:
    """Wait for the workers; ``end`` is called, once, when the submitter is gone before them."""
    while submitter is not None:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=_LOOK_S)
        if _gone(submitter):
            end()
            submitter = None
    return child.wait()


def _argv(root: str, workers: int | None) -> list[str]:
    count = [] if workers is None else ["--workers", str(workers)]
    return [sys.executable, "-m", "hpc_toolkit", "work", root, *count]


def _environment(workers: int | None) -> dict[str, str]:
    # A notebook may itself run in a step; its local workers are no ranks of that.
    hidden = set() if workers is None else {"SLURM_STEP_ID"}
    return {name: value for name, value in os.environ.items() if name not in hidden}


def _prepare_child() -> None:
    # Slurm signals every process of a step. What SIGUSR2 means, this process tells the workers.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    die_with_parent(signal.SIGTERM)


def _pass_on(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        child.send_signal(signal.SIGUSR1 if number in _WARNINGS else number)


def _code_of_rest(workers: int | None, told: list[int]) -> int:
    """The exit code that says whether a local job starts again."""
    if workers is None or not set(told) & set(_WARNINGS):
        return EXIT_LEFT
    from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

    return int(LOCAL_REQUEUE_RETURN_CODE)


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
