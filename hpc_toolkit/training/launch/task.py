"""A task that srun started becomes a rank: it finds the address of rank 0 and runs the script.

No agent runs beside it. A child of rank 0 serves the store in which the ranks meet. Rank 0 takes
the port before it publishes it, so that two jobs on a node cannot choose the same port.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.processes import die_with_parent
from hpc_toolkit.training.launch import meeting
from hpc_toolkit.training.launch.meeting import Address
from hpc_toolkit.training.launch.plan import Step
from hpc_toolkit.training.launch.rank import WARNINGS, ignore_warnings
from hpc_toolkit.training.launch.ranks import rank_variables
from hpc_toolkit.training.launch.rendezvous import Place

if TYPE_CHECKING:
    from hpc_toolkit.training.launch.plan import Plan

_BACKLOG = 4096
_ENDED = signal.SIGRTMIN
"""Signal that tells the store's process that rank 0 has ended."""


def join_ranks(plan: Plan) -> dict[str, str]:
    """Return torchrun's variables for this rank.

    Rank 0 starts a child that serves the store in which the ranks meet, and publishes its address
    in the run directory.

    Raises RunError if rank 0 did not publish its address in time, or the launch's name is taken.
    """
    step = Step.from_environ()
    assert step is not None
    if step.task == 0:
        address = _serve(plan)
    else:
        address = meeting.find(plan.rendezvous, timeout_s=plan.start_timeout_s)
    place = Place(address, step.task - step.local, sum(step.tasks))
    return rank_variables(plan, place, step.local)


def _serve(plan: Plan) -> Address:
    """Take a port, fork a child that serves it while this process lives, publish the address."""
    listener = socket.create_server(("", 0), backlog=_BACKLOG)
    address = Address(meeting.own_host(), listener.getsockname()[1])
    parent = os.getpid()
    # The child inherits the block, so that the signal stays pending until the child waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {_ENDED})
    if os.fork() == 0:
        _hold_store(listener, parent, plan, str(address))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {_ENDED})
    listener.close()
    meeting.publish(plan.rendezvous, address)
    return address


def _hold_store(listener: socket.socket, parent: int, plan: Plan, address: str) -> None:
    """Serve the ranks' store until rank 0 ends, then remove its published name; never return."""
    try:
        die_with_parent()
        for number in (*WARNINGS, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Slurm sends these to every process of a step; the store must outlive the ranks.
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(nothing, stream)
        here = Address("127.0.0.1", listener.getsockname()[1])
        store = meeting.open_store(here, plan.start_timeout_s, serve=True, fd=listener.detach())
        # A reader of rank 0's stderr would wait until this process has closed it, too.
        os.dup2(nothing, 2)
        die_with_parent(_ENDED)
        while os.getppid() == parent and signal.sigtimedwait({_ENDED}, 60) is None:
            pass
        # Do not remove the name of another launch, which can be there if ours was removed.
        if os.readlink(plan.rendezvous) == address:
            plan.rendezvous.unlink()
        del store
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - a child must not go on as its parent
        sys.stderr.write(f"the store of the ranks ended: {error}\n")
    finally:
        os._exit(1)


def become(command: list[str], environ: dict[str, str]) -> NoReturn:
    """Replace this process with the program.

    Raises ConfigError if the program cannot be started.
    """
    ignore_warnings()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environ)  # noqa: S606 - as in rank
    except OSError as error:
        message = f"{command[0]} cannot be started: {error.strerror}"
        raise ConfigError(message, hint="check that it exists on every node") from error
