"""A task that srun started becomes a rank: it learns where rank 0 is, and runs the script.

No agent stays beside it. The store in which the ranks meet is held by a child of rank 0, on a port
that rank 0 has taken before it tells anybody, so that two jobs of a node cannot choose the same.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_toolkit.system.processes import die_with_parent
from hpc_toolkit.training.launch import meeting
from hpc_toolkit.training.launch.meeting import Address
from hpc_toolkit.training.launch.rank import WARNINGS, ignore_warnings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import FrameType

    from hpc_toolkit.training.launch.plan import Plan
    from hpc_toolkit.training.launch.step import Step

_BACKLOG = 4096
_ENDED = signal.SIGRTMIN
"""By what the store's process learns that rank 0 has ended."""


def task_environment(plan: Plan, step: Step) -> tuple[dict[str, str], int | None]:
    """Where the ranks meet, and which of them this one is, in torchrun's variables.

    Rank 0 begins to serve, by a child whose process is the second value, and tells the others
    through the run directory.

    Raises:
        NodesMissingError: rank 0 did not say where it is in time.
        RunError: the name of this launch is taken.
    """
    assert plan.run_dir is not None
    keeper = None
    if step.task == 0:
        address, keeper = _serve(plan, meeting.own_host(None))
    else:
        address = meeting.find(plan.run_dir, plan.launch, timeout_s=plan.start_timeout_s)
    place = {
        "RANK": str(step.task),
        "LOCAL_RANK": str(step.local),
        "WORLD_SIZE": str(sum(step.tasks)),
        "LOCAL_WORLD_SIZE": str(plan.ranks),
        "GROUP_RANK": str(plan.node_rank),
        "GROUP_WORLD_SIZE": str(plan.nodes),
        "MASTER_ADDR": address.host,
        "MASTER_PORT": str(address.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": plan.launch,
    }
    return place, keeper


def _serve(plan: Plan, host: str) -> tuple[Address, int]:
    """Take a port, let a child serve there for as long as this process lives, and publish it."""
    assert plan.run_dir is not None
    listener = socket.create_server(("", 0), backlog=_BACKLOG)
    address = Address(host, listener.getsockname()[1])
    parent = os.getpid()
    # It waits for the child also while that is not yet ready for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {_ENDED})
    keeper = os.fork()
    if keeper == 0:
        path = plan.run_dir / "rendezvous" / plan.launch
        _hold_store(listener, parent, plan.start_timeout_s, path, str(address))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {_ENDED})
    listener.close()
    meeting.publish(plan.run_dir, plan.launch, address)
    return address, keeper


def _hold_store(
    listener: socket.socket, parent: int, timeout_s: float, path: Path, address: str
) -> None:
    """Be the store of the ranks until rank 0 ends, and take its name away; never returns."""
    try:
        die_with_parent()
        for number in (*WARNINGS, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Slurm sends them to every process of a step; what is open is for the ranks to say.
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(nothing, stream)
        from datetime import timedelta

        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        port, limit = listener.getsockname()[1], timedelta(seconds=timeout_s)
        store = TCPStore(
            "127.0.0.1", port, None, True, limit, False, master_listen_fd=listener.detach()
        )
        # Whoever reads rank 0's errors waits for the last that could write there.
        os.dup2(nothing, 2)
        die_with_parent(_ENDED)
        while os.getppid() == parent and signal.sigtimedwait({_ENDED}, 60) is None:
            pass
        # Another launch of this name can be there only where somebody removed ours.
        if os.readlink(path) == address:
            path.unlink()
        del store
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - a child must not go on as its parent
        sys.stderr.write(f"the store of the ranks ended: {error}\n")
    finally:
        os._exit(1)


def become(program: str, arguments: list[str], environ: Mapping[str, str]) -> None:
    """Replace this process; returns only by an error.

    Raises:
        OSError: the program cannot be started.
    """
    ignore_warnings()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(program, [program, *arguments], dict(environ))  # noqa: S606 - as in rank


def run_child(
    program: str, arguments: list[str], environ: Mapping[str, str], keeper: int | None
) -> int:
    """Run the program beside this process, which Python's caller wants to keep; its code.

    Signals are forwarded to it for as long as it runs, and ``keeper`` ends with it.
    """
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            become(program, arguments, environ)
        finally:
            os._exit(127)

    def forward(number: int, _frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    numbers = (*WARNINGS, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if keeper is not None:
            os.kill(keeper, _ENDED)
            os.waitpid(keeper, 0)
    return os.waitstatus_to_exitcode(status)
