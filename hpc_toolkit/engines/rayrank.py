"""One rank of a run in Ray: an actor, and the process that the actor starts and waits for.

The process, ``python -Pm hpc_toolkit.engines.rayrank ORDER FD PARENT``, is the worker. It is a
process of its own, because a worker needs the main thread for its signals and forks its executor;
a process with Ray's threads must not fork. Like a local worker, it exits when its parent, the
actor, ends.

This module does not import ray; :mod:`hpc_toolkit.engines.raydriver` makes an actor of the class.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import TRY_AGAIN, ConfigError, HpcToolkitError
from hpc_toolkit.system.binding import Place
from hpc_toolkit.system.gpus import CUDA
from hpc_toolkit.system.installation import leave_directory
from hpc_toolkit.system.processes import die_with_parent
from hpc_toolkit.system.ranks import host_name
from hpc_toolkit.worker.worker import WorkerOptions

_OF_TASKS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS")
CONCURRENCY = 2
"""Concurrent calls: one waits for the end, and one passes on a signal."""
_STDERR = 2
_STEPS = 10_000
"""Ray counts resources in ten-thousandths."""


def room(nodes: list[dict[str, float]], demand: dict[str, float]) -> int:
    """Return how many workers with this demand fit on the nodes at once, each on one node.

    Resources have Ray's names; a worker does not need those of which it demands 0.
    """
    needed = {name: amount for name, amount in demand.items() if amount > 0}
    if not needed:
        return 1 << 30
    return sum(
        min(_parts(node.get(name, 0.0), amount) for name, amount in needed.items())
        for node in nodes
    )


def check_room(nodes: list[dict[str, float]], demand: dict[str, float], workers: int) -> None:
    """Print a note if some workers must wait; refuse if none would ever start.

    Raises ConfigError: no node has the resources that a worker needs.
    """
    fit = room(nodes, demand)
    if fit >= workers:
        return
    asked = ", ".join(f"{amount:g} {name}" for name, amount in demand.items() if amount)
    if fit == 0:
        message = f"no node of the Ray cluster has {asked} for a worker"
        hint = "request less per worker; 'ray status' shows what is available"
        raise ConfigError(message, hint=hint)
    sys.stderr.write(
        f"note: the Ray cluster has room for {fit} of {workers} workers ({asked} each); "
        "the others wait for more\n"
    )


def _parts(amount: float, part: float) -> int:
    """Return how many workers with ``part`` have room in ``amount``: a part below 1 is of one."""
    if part < 1 < amount:
        return math.floor(amount) * _parts(1.0, part)
    return round(amount * _STEPS) // max(1, round(part * _STEPS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The description of a rank for its actor; plain values, which can be encoded as text."""

    root: str
    """Absolute path of the run."""
    cwd: str
    """Directory in which commands of a workload start: that of the driver."""
    rank: int
    """Number of the rank, from 0."""
    world_size: int
    """Number of requested workers."""
    gpus: float
    """GPUs that Ray counts for the rank; Ray names them in CUDA_VISIBLE_DEVICES."""
    memory_bytes: int
    """Bytes that each process of its executor may allocate; 0: no limit."""
    options: dict[str, Any]
    """Fields of :class:`~hpc_toolkit.worker.worker.WorkerOptions`."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        return cls(**json.loads(text))

    def argv(self, report_fd: int) -> list[str]:
        """Return the command of the process, which writes an error to ``report_fd``."""
        module = (sys.executable, "-Pm", "hpc_toolkit.engines.rayrank")
        return [*module, self.to_json(), str(report_fd), str(os.getpid())]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the actor's environment with the variables of this rank.

        The variables of an srun task are removed: it may have started the node's Ray.
        """
        kept = {
            name: value
            for name, value in environ.items()
            if name not in _OF_TASKS and not name.startswith("SLURM_STEP")
        }
        place = {"RANK": self.rank, "LOCAL_RANK": 0, "WORLD_SIZE": self.world_size}
        hidden = {} if self.gpus else {CUDA: ""}
        limit = Place(memory_bytes=self.memory_bytes or None).environment()
        return {**kept, **{name: str(number) for name, number in place.items()}, **hidden, **limit}


def main() -> int:
    """Run as a program; an error that the user can act on goes to the actor, as JSON."""
    order, report_fd, parent = Order.from_json(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    leave_directory()
    os.set_inheritable(report_fd, False)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return TRY_AGAIN
    from hpc_toolkit.run import Run
    from hpc_toolkit.worker.pool import error_report

    try:
        run = Run.open(order.root)
        gc.freeze()
        return run.work(None, WorkerOptions(**order.options))
    except HpcToolkitError as error:
        os.write(report_fd, error_report(error))
        return error.exit_code
    except Exception:  # noqa: BLE001 - a bug, reported differently from errors of the user
        traceback.print_exc()
        sys.stderr.write("this is a bug in hpctk; please report it with the lines above\n")
        return 70


class RankActor:
    """One rank of a run."""

    def __init__(self, order: str) -> None:
        self._order = Order.from_json(order)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._told: list[int] = []

    def run(self) -> dict[str, Any]:
        """Start the rank's process and wait until it has ended.

        Returns its exit ``code``, negative for a signal, and the ``error`` that it reported, or
        None.
        """
        if missing := self._missing():
            return {"code": 1, "error": missing}
        read_fd, write_fd = os.pipe()
        with os.fdopen(read_fd, "rb"):
            with os.fdopen(write_fd, "wb"), self._lock:
                if self._told:
                    return {"code": TRY_AGAIN, "error": None}
                self._child = subprocess.Popen(
                    self._order.argv(write_fd),
                    cwd=self._order.cwd,
                    env=self._order.environment(os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=_STDERR,
                    pass_fds=(write_fd,),
                    # A terminal's ^C must reach only the driver, which passes it on once.
                    process_group=0,
                )
            return {"code": self._child.wait(), "error": _report(read_fd)}

    def tell(self, number: int) -> None:
        """Pass a signal on to the worker; a signal before its start prevents the start."""
        with self._lock:
            self._told.append(number)
            if self._child is not None:
                with suppress(ProcessLookupError):
                    self._child.send_signal(number)

    def _missing(self) -> dict[str, Any] | None:
        for directory in (self._order.root, self._order.cwd):
            if not Path(directory).is_dir():
                message = f"{host_name()}, a node of the Ray cluster, cannot see {directory}"
                hint = "a run must be on a filesystem that all nodes share"
                return {"message": message, "hint": hint, "code": 1}
        return None


def _report(fd: int) -> dict[str, Any] | None:
    """Return the error that the ended process wrote to the pipe, or None; never waits."""
    os.set_blocking(fd, False)
    with suppress(BlockingIOError, ValueError):
        found: dict[str, Any] = json.loads(os.read(fd, 4096) or b"{}")
        return found or None
    return None


if __name__ == "__main__":
    sys.exit(main())
