"""The process of one rank: ``python -m hpc_toolkit.engines.ray.rank ORDER FD PARENT``.

An actor starts it as a process of its own, because a worker needs the main thread for its signals
and forks its executor; a process with Ray's threads must not fork. Like a local worker, it leaves
when its parent, the actor, ends.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.system.binding import Place
from hpc_toolkit.system.gpus import CUDA
from hpc_toolkit.system.processes import die_with_parent
from hpc_toolkit.worker.worker import EXIT_LEFT, WorkerOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

_OF_TASKS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS")


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
        words = [
            "-m",
            "hpc_toolkit.engines.ray.rank",
            self.to_json(),
            str(report_fd),
            str(os.getpid()),
        ]
        return [sys.executable, *words]

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


def work(order: Order) -> int:
    """Run the worker of this rank; return its exit code (see :mod:`hpc_toolkit.worker.worker`)."""
    from hpc_toolkit.run import Run

    run = Run.open(order.root)
    gc.freeze()
    return run.work(None, WorkerOptions(**order.options))


def main() -> int:
    """Run as a program; an error that the user can act on goes to the actor, as JSON."""
    order, report_fd, parent = Order.from_json(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(report_fd, False)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return EXIT_LEFT
    try:
        return work(order)
    except HpcToolkitError as error:
        report = {"message": error.message, "hint": error.hint, "code": error.exit_code}
        os.write(report_fd, json.dumps(report).encode()[:4096])
        return error.exit_code
    except Exception:  # noqa: BLE001 - a bug, reported differently from errors of the user
        traceback.print_exc()
        sys.stderr.write("this is a bug in hpctk; please report it with the lines above\n")
        return 70


if __name__ == "__main__":
    sys.exit(main())
