"""How a worker starts its executors: by a fork, from a fork server if the items need packages.

The fork server is a process that has imported the packages that the user's module imports first,
and forks an executor whenever a worker needs one; each executor imports the user's own files. The
workers of a pool share one, and so do the ranks of a step on one node. Where a process with these
packages cannot be forked safely, or an import fails, the worker forks the executor itself, and the
executor imports them.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from hpc_toolkit.queue.control import OUT_OF_MEMORY
from hpc_toolkit.rundir.files import write_all
from hpc_toolkit.rundir.layout import Manifest, StageSpec
from hpc_toolkit.system.gpus import ranks_here
from hpc_toolkit.system.processes import Guard
from hpc_toolkit.system.ranks import environment_of_items, step_nodes
from hpc_toolkit.worker.code import first_imports
from hpc_toolkit.worker.executor import become_child, prepare
from hpc_toolkit.worker.forkserver import (
    FORKED,
    SHARED,
    become_fork_server,
    devices,
    is_own,
    kill_started,
)
from hpc_toolkit.worker.memory import kernel_kills

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from pathlib import Path

_OF_A_WORKER = re.compile(
    "(CUDA|ROCR|HIP)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|HPCTK_LOCAL_RANK"
    "|SLURM_(PROCID|LOCALID|TASK_PID|STEP_GPUS)|PMI.*"
)
"""Variables in which workers of a node differ."""
_OF_A_STEP = re.compile("SLURM_(NTASKS|NPROCS|NTASKS_PER_NODE|DISTRIBUTION|(CPU|MEM)_BIND.*)")
"""Variables by which srun would start the same tasks again."""
_TRIES, _PAUSE_S, _MOST_RANKS = 100, 0.01, 256
_packages: dict[str, list[str]] = {}


class Executor(Guard):
    """The worker's handle on its executor process; its messages stay readable after the end."""

    def __init__(self, stages: dict[str, StageSpec], log_path: Path, stage: str = "") -> None:
        """``stage``: whose items it runs first; "": do not use a fork server."""
        self._memory = os.memfd_create("hpctk")
        os.ftruncate(self._memory, SHARED)
        self._kernel_kills = kernel_kills()
        super().__init__(mmap.mmap(self._memory, SHARED))
        request_read, self._requests = os.pipe()
        self.results, result_write = os.pipe()
        self._pipes = request_read, result_write
        os.set_blocking(self.results, False)
        self._unsent = b""
        self._stages, self._log_path = stages, log_path
        self._from_server = stage in stages and bool(packages_of(stages[stage]))
        if self._from_server:
            os.pwrite(self._memory, _order(stages, log_path, stage), SHARED)
        self._start()

    def _start(self) -> None:
        self.ended, alive = os.pipe()
        ends = self.life, alive, *self._pipes, self._memory
        self.starting = self._from_server and FORK_SERVER.asked(ends)
        """Whether the fork server may still import packages."""
        if not self.starting:
            log_path, shared = self._log_path, self._shared
            child = partial(become_child, self._stages, log_path, self._pipes, shared, prepare)
            self.fork(child, alive)
            self._begin()
        os.close(alive)

    def _begin(self) -> None:
        self.starting = False
        for fd in (self.life, *self._pipes, self._memory):
            os.close(fd)
        with suppress(BrokenPipeError):  # has_ended() shows it
            write_all(self._requests, self._unsent)
        self._unsent = b""

    def has_ended(self) -> bool:
        """Read why ``ended`` is readable: the end of the process, or the fork server's answer."""
        said = os.read(self.ended, 1024)
        if not self.starting:
            return not said
        FORK_SERVER.answered(said)
        if said == FORKED:
            self._begin()
        else:
            os.close(self.ended)
            self._start()
        return False

    def start(self, request: dict[str, Any], lines: list[bytes]) -> None:
        """Send a request with its items as JSON lines; BrokenPipeError if the child is gone."""
        self._shared[0] = 0
        # One array: parsing many short texts one by one takes six times as long.
        body = b"[%s]" % b",".join(lines)
        self._unsent = json.dumps({**request, "size": len(body)}).encode() + b"\n" + body
        if not self.starting:
            write_all(self._requests, self._unsent)
            self._unsent = b""

    def stop(self) -> None:
        """Ask the child to end the request before the next item."""
        self._shared[0] = 1

    def end(self) -> str:
        """As :meth:`Guard.end`; says so if the kernel killed the child to free memory."""
        if self.starting:  # the guard will find that the worker has closed its end
            os.close(self.ended)
            self.ended, self._unsent = os.open(os.devnull, os.O_RDONLY), b""
            self._begin()
        how = super().end()
        # The count is of the node; others' processes rarely end so while this one is killed.
        by_kernel = how.endswith("SIGKILL") and kernel_kills() > self._kernel_kills
        return f"{how}, {OUT_OF_MEMORY}" if by_kernel else how

    def close(self) -> None:
        """Release the descriptors, after :meth:`end`."""
        for fd in (self._requests, self.results):
            os.close(fd)
        self._shared.close()


def packages_of(stage: StageSpec) -> list[str]:
    """What a fork server imports for the executors of a stage; []: they need none."""
    work = stage.workload
    code = f"{work.function} {work.path}"
    if work.function is None or str(work.function).startswith("hpc_toolkit."):
        return []
    if code not in _packages:
        _packages[code] = first_imports(work)
    return _packages[code]


def _order(stages: dict[str, StageSpec], log_path: Path, stage: str) -> bytes:
    """What a fork server must know to fork an executor."""
    environ, in_step = environment_of_items(), bool(step_name(os.environ))
    if in_step:  # Slurm sets it for the first task of a node only
        environ.setdefault("TMPDIR", "/tmp")  # noqa: S108 - what Slurm sets
    order = {
        "imports": packages_of(stages[stage]),
        "path": stages[stage].workload.path,
        "stages": json.loads(Manifest(run="", stages=(*stages.values(),)).to_bytes()),
        "argv": {name: one.workload.argv for name, one in stages.items()},
        "log": str(log_path.absolute()),
        "own": {name: environ.pop(name) for name in filter(_OF_A_WORKER.fullmatch, [*environ])},
        "environ": environ,
        "cpus": sorted(os.sched_getaffinity(0)),
        "devices": devices() if in_step else [],
    }
    return json.dumps(order).encode()


class ForkServer:
    """The handle of a process, and of the workers that it forks, on the fork server."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._pid = self._owner = 0
        self._served = self._refused = False

    def start(self, *, common: bool = False) -> None:
        """Fork the server; it imports packages when the first executor is needed.

        ``common``: this process forks several workers, which share it. The ranks of a step on one
        node share one as well, and the first of them forks it.
        """
        import socket

        listener, self._connection = (None, None) if common else meet(step_name(os.environ))
        if self._connection is not None:
            return
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._owner = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            become_fork_server(other, listener, self._owner, common=common)
        other.close()
        if listener is not None:
            listener.close()
        self._connection.setblocking(False)

    def asked(self, ends: tuple[int, ...]) -> bool:
        """Ask for an executor with these descriptors; False: the worker must fork it."""
        import socket

        while not self._refused:
            try:
                if self._connection is None:
                    self.start()
                assert self._connection is not None
                socket.send_fds(self._connection, [FORKED], ends)
            except OSError:
                self.answered(b"")
            else:
                return True
        return False

    def answered(self, said: bytes) -> None:
        """Note what the server said; b"": it has ended, or gave its reason to another worker."""
        if said == FORKED:
            self._served = True
        elif not said and self._served:
            self.stop()  # somebody killed it: start another one
        else:
            self._refused = True
            if said.strip():
                why = said.decode(errors="replace")
                sys.stderr.write(f"note: each executor imports packages itself: {why}\n")

    def stop(self) -> None:
        """End the server if it is a child of this process; executors that it forked go on."""
        if self._connection is not None:
            self._connection.close()
        if self._owner == os.getpid():
            with suppress(OSError):
                os.kill(self._pid, signal.SIGSTOP)  # it starts no more processes
                kill_started(self._pid)
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
        self._connection, self._owner = None, 0
        self._served = self._refused = False


def step_name(environ: Mapping[str, str]) -> str:
    """Name of a socket for the ranks of this step on this node; "": there is one rank.

    It is in no directory (unix(7), abstract), so that nothing is left of it. Ranks in containers of
    their own, which have other files and processes, get other names.
    """
    if "SLURM_STEP_ID" not in environ or ranks_here(environ) < 2:
        return ""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURMD_NODENAME")
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("mnt", "pid", "user")]
    return "\0hpctk-" + "-".join(map(str, (os.getuid(), *map(environ.get, names), *spaces)))


def meet(name: str, tries: int = _TRIES) -> tuple[socket.socket | None, socket.socket | None]:
    """A new socket of this name, or one that is connected to it, or neither."""
    import socket

    for left in reversed(range(tries if name else 0)):
        try:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # a limit of files, or a sandbox
            break
        with suppress(OSError):  # another rank has it
            found.bind(name)
            found.listen(_MOST_RANKS)
            return found, None
        with suppress(OSError):  # it does not listen yet
            found.setblocking(False)
            found.connect(name)
            if is_own(found):
                return None, found
        found.close()
        if left:
            time.sleep(_PAUSE_S)
    return None, None


def prepare_steps() -> None:
    """Let items of this task of a step start steps by srun: on all nodes, if no others share them.

    srun sets its options in the environment of its tasks, and would repeat those of this worker.
    """
    os.environ.setdefault("SLURM_OVERLAP", "1")  # the step has all of the node's resources
    os.environ.pop("SLURM_LABELIO", None)  # which would alter the result of an item
    if (nodes := step_nodes()) == 1:
        return
    for name in [*os.environ]:
        if _OF_A_STEP.fullmatch(name) or (name, os.environ[name]) == ("SLURM_MPI_TYPE", "none"):
            del os.environ[name]
    os.environ |= {"SLURM_NNODES": str(nodes), "SLURM_TASKS_PER_NODE": f"1(x{nodes})"}


FORK_SERVER = ForkServer()
