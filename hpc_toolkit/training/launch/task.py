"""A task that srun started becomes a rank: it finds the address of rank 0 and runs the script.

No agent runs beside it. A child of rank 0 serves the store in which the ranks meet. Rank 0 takes
the port before it publishes it, so that two jobs on a node cannot choose the same port.
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

    from hpc_toolkit.training.launch.plan import Plan, Step

_BACKLOG = 4096
_ENDED = signal.SIGRTMIN
"""Signal that tells the store's process that rank 0 has ended."""


def task_environment(plan: Plan, step: Step) -> tuple[dict[str, str], int | None]:
    """Return torchrun's variables for this rank, and on rank 0 the store's process id.

    Rank 0 starts a child that serves the store in which the ranks meet, and publishes its address
    in the run directory.

    Raises:
        NodesMissingError: rank 0 did not publish its address in time.
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
    """Take a port, fork a child that serves it while this process lives, publish the address."""
    assert plan.run_dir is not None
    listener = socket.create_server(("", 0), backlog=_BACKLOG)
    address = Address(host, listener.getsockname()[1])
    parent = os.getpid()
    # The child inherits the block, so that the signal stays pending until the child waits for it.
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
    """Serve the ranks' store until rank 0 ends, then remove its published name; never return."""
    try:
        die_with_parent()
        for number in (*WARNINGS, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Slurm sends these to every process of a step; the store must outlive the ranks.
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
        # A reader of rank 0's stderr would wait until this process has closed it, too.
        os.dup2(nothing, 2)
        die_with_parent(_ENDED)
        while os.getppid() == parent and signal.sigtimedwait({_ENDED}, 60) is None:
            pass
        # Do not remove the name of another launch, which can be there if ours was removed.
        if os.readlink(path) == address:
            path.unlink()
        del store
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - a child must not go on as its parent
        sys.stderr.write(f"the store of the ranks ended: {error}\n")
    finally:
        os._exit(1)


def become(program: str, arguments: list[str], environ: Mapping[str, str]) -> None:
    """Replace this process with the program.

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
    """Run the program in a child, since a caller in Python keeps its process; return its code.

    Signals are forwarded to the child while it runs. The store's process, ``keeper``, ends with it.
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
