"""The fork server: a process that has imported packages, and forks executors that need them."""

from __future__ import annotations

import gc
import importlib
import json
import mmap
import os
import re
import signal
import struct
import sys
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.rundir.files import open_or_create
from hpc_toolkit.rundir.layout import StageSpec, parse_manifest
from hpc_toolkit.system import processes
from hpc_toolkit.system.binding import limit_memory
from hpc_toolkit.system.record import replace
from hpc_toolkit.worker.executor import become_child, prepare
from hpc_toolkit.worker.loading import add_paths

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Iterator, Mapping

SHARED = 64
"""Bytes that an executor and its worker share; the order for a fork server follows them."""
FORKED = b"+"
"""The fork server's answer when it has forked an executor."""
_CONNECTION, _LISTENER = 3, 4
_LONGEST_FORK_S = 1.0
_PINS = re.compile("OMP_PROC_BIND|OMP_PLACES|(GOMP_CPU|KMP)_AFFINITY")
_FORK_SAFE = {"jemalloc_bg_thd"}
"""Threads of libraries that prepare for a fork, and go on without them: here, that of pyarrow."""


def become_fork_server(
    connection: socket.socket, listener: socket.socket | None, owner: int, *, common: bool
) -> None:
    """Import packages and fork executors until nobody can ask; never returns."""
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in processes.STOP_SIGNALS:  # Slurm signals every process of a step
            signal.signal(number, lambda *_: None)
        processes.die_with_parent()
        # What an import starts, and leaves behind, can be found.
        processes.adopt_orphans()
        if os.getppid() == owner:
            null = os.open(os.devnull, os.O_RDWR)
            listens = [] if listener is None else [listener.detach()]
            processes.keep_descriptors(null, null, null, connection.detach(), *listens)
            _Process(shared=common or bool(listens)).serve(listens=bool(listens))
    finally:
        os._exit(0)


def is_own(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    import socket

    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", peer)[1]) == os.getuid()


def devices() -> list[str]:
    """The GPUs that this process may use: a control group of Slurm's may have those of one task."""
    import glob

    found = []
    for path in sorted([*glob.glob("/dev/nvidia[0-9]*"), *glob.glob("/dev/dri/render[A-Z]*")]):
        with suppress(OSError):
            os.close(os.open(path, os.O_RDWR))
            found.append(path)
    return found


def kill_started(server: int) -> None:
    """Kill the processes that an import has started, and not the guards of executors.

    A guard leads a process group by setpgid(2), a daemon by setsid(2).
    """
    for child in processes.children_of(server):
        with suppress(ProcessLookupError):
            if os.getsid(child) == child or os.getpgid(child) != child:
                for one in (*processes.descendants(child), child):
                    os.kill(one, signal.SIGKILL)


class _Process:
    """The fork server itself."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._first: dict[str, Any] | None = None
        self._imported: set[str] = set()

    def serve(self, *, listens: bool) -> None:
        """Answer the workers that are connected, until none is left or none must be answered."""
        import socket

        listener = socket.socket(fileno=_LISTENER) if listens else None
        workers = {_CONNECTION: socket.socket(fileno=_CONNECTION)}
        while workers:
            for fd in processes.readable(*workers, *([_LISTENER] if listens else [])):
                if listener is not None and fd == _LISTENER:
                    found, _ = listener.accept()
                    if is_own(found):
                        workers[found.fileno()] = found
                    continue
                message, ends, *_ = socket.recv_fds(workers[fd], 1, 5)
                if not message:
                    workers.pop(fd).close()
                    continue
                self._reap()
                if not self._answered(*ends):
                    return
                for end in ends:
                    os.close(end)

    def _answered(self, life: int, alive: int, requests: int, results: int, memory: int) -> bool:
        """Fork an executor, or refuse to; False: the fork server must end."""
        order = json.loads(os.pread(memory, os.fstat(memory).st_size, SHARED))
        if differs := self._adopt(order):
            os.write(alive, differs.encode())
            return True
        reason = None if self._imported.issuperset(order["imports"]) else self._import(order)
        if reason is not None:
            os.write(alive, reason.encode()[:1000] or b" ")
            return False
        if os.fork() == 0:
            os.setpgid(0, 0)
            os.write(alive, FORKED)
            shared = mmap.mmap(memory, SHARED)
            stages, log = dict[str, StageSpec](), Path(order["log"])
            for one in parse_manifest(order["stages"]).stages:
                work = replace(one.workload, argv=tuple(order["argv"][one.name]))
                stages[one.name] = replace(one, workload=work)
            own = partial(_become_own, order)
            child = partial(become_child, stages, log, (requests, results), shared, own)
            processes.become_guard(child, (life, alive), shared)
        return True

    def _adopt(self, order: dict[str, Any]) -> str:
        """Be like a worker, without what is its own; what makes that impossible, or ""."""
        if self._first is None:
            self._first = order | {"devices": devices() if order["devices"] else []}
            os.environ.clear()
            os.environ.update(order["environ"])
            if not self._shared:
                os.environ.update(order["own"])
            prepare()
            limit_memory()
        first, now = self._first["environ"].items(), order["environ"].items()
        if different := sorted(name for name, _ in first ^ now):
            return f"{different[0]} differs from that of another worker"
        if order["devices"] != self._first["devices"]:
            return "its GPUs are not those of another worker"
        # A library such as OpenMP has bound its threads when it was imported.
        pinned = [name for name in order["environ"] if _PINS.fullmatch(name)]
        if pinned and order["cpus"] != self._first["cpus"]:
            return f"{pinned[0]} binds threads to the CPUs of another worker"
        # A control group may have other CPUs only.
        with suppress(OSError):
            os.sched_setaffinity(0, order["cpus"])
        if sorted(os.sched_getaffinity(0)) != order["cpus"]:
            return "its CPUs are not those of another worker"
        return ""

    def _import(self, order: dict[str, Any]) -> str | None:
        """Import the packages of a stage; what they print is in the log of this worker.

        Returns why no executor must be forked from this process, or None. "": an import failed; an
        executor that imports the package itself reports that.
        """
        log = open_or_create(Path(order["log"]), os.O_WRONLY | os.O_APPEND)
        _redirect(log)
        os.close(log)
        self._reap()
        before, known, pid = _opened(), processes.children_of(os.getpid()), os.getpid()
        read = set[str]()
        try:
            with _noting(order["own"] if self._shared else ()) as read:
                add_paths(tuple(order["path"]))
                for name in order["imports"]:
                    _import_once(name)
            reason = _why_unsafe(before)
        except BaseException:  # noqa: BLE001 - the boundary of code that is not ours
            reason = ""
        finally:
            if os.getpid() != pid:
                os._exit(0)
            with suppress(BaseException):
                sys.stdout.flush()
        if read:
            reason = f"its import reads {', '.join(sorted(read))}"
        self._reap()
        if processes.children_of(pid) - known:
            reason = "its import starts processes"
            kill_started(pid)
        _redirect(0)
        self._imported.update(order["imports"])
        # Otherwise the executors' garbage collection would copy the memory that they share.
        gc.freeze()
        return reason

    def _reap(self) -> None:
        """Reap children that have ended."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue


def _import_once(name: str) -> None:
    """Import a module, or take a part from one that may import more for it."""
    parent, _, last = name.rpartition(".")
    if parent in sys.modules and hasattr(sys.modules[parent], last):
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The user's module may handle that.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise


def _become_own(order: dict[str, Any]) -> None:
    """Give a forked executor what is its worker's own, and random numbers of its own."""
    for name, text in order["own"].items():
        os.environ.setdefault(name, text)
    # Python has seeded its own numbers at the fork.
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()
    if generator := getattr(sys.modules.get("torch"), "default_generator", None):
        generator.seed()


class _Noting(dict[bytes, bytes]):
    """Variables of the environment; notes which of some names were looked for in vain."""

    def __init__(self, variables: Mapping[bytes, bytes], names: Iterable[str]) -> None:
        super().__init__(variables)
        self._names, self.read = {*map(os.fsencode, names)}, set[str]()

    def __missing__(self, name: bytes) -> bytes:
        self.read |= {os.fsdecode(name)} if name in self._names else set()
        raise KeyError(name)


@contextmanager
def _noting(own: Iterable[str]) -> Iterator[set[str]]:
    """Note which variables that workers do not share an import wants to read."""
    environ: Any = os.environ
    variables = environ._data
    environ._data = _Noting(variables, own)
    try:
        yield environ._data.read
    finally:
        now, environ._data = {**environ._data}, variables
        variables.clear()
        variables.update(now)


def _why_unsafe(before: dict[str, str]) -> str | None:
    """Why this process must not be forked with what it has imported; None if it may be."""
    if threading.active_count() == 1 and os.listdir("/proc/self/task")[1:]:
        _try_fork()
    if threads := _threads():
        return f"its import starts threads ({', '.join(threads)})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "its import initialises CUDA"
    if signal.getitimer(signal.ITIMER_REAL)[0]:  # a fork ends it
        return "its import starts a timer"
    opened = [name for place, name in _opened().items() if before.get(place) != name]
    return f"its import leaves {opened[0]} open" if opened else None


def _try_fork() -> None:
    """Fork a process that ends: libraries such as OpenBLAS end their threads before a fork."""
    with warnings.catch_warnings(action="ignore"):
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    ended = os.pidfd_open(pid)
    if not processes.readable(ended, timeout_s=_LONGEST_FORK_S):  # a lock that a thread held
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(ended)


def _threads() -> list[str]:
    """Names of the threads that do not expect a fork."""
    end = time.monotonic() + _LONGEST_FORK_S
    while True:
        found = []
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):
                name = Path(f"/proc/self/task/{thread}/comm").read_text("utf-8").strip()
                if thread != str(os.getpid()) and name not in _FORK_SAFE:
                    found.append(name)
        # A thread that has been joined may be listed a moment longer.
        if not found or threading.active_count() > 1 or time.monotonic() > end:
            return found
        time.sleep(0.01)


def _opened() -> dict[str, str]:
    """The descriptors of this process, and memory that its children would share, by their files."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        place, mode, *_, name = line.split(maxsplit=5)
        if mode.startswith("rw-s"):  # locks of multiprocessing have no descriptor
            found[place] = name
    return found


def _redirect(fd: int) -> None:
    for target in (1, 2):
        os.dup2(fd, target)
