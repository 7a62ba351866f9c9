"""Start, watch and end processes, with features of the kernel; keep a coordinator running."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import TRY_AGAIN

if TYPE_CHECKING:
    import subprocess
    from mmap import mmap

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that warn of the time limit, such as Slurm's that job scripts request (the first)."""
WARNING_NAMES = " ".join(number.name.removeprefix("SIG") for number in WARNINGS)
"""The same as sbatch, scancel and a shell write them."""
WARNING_NAME = WARNING_NAMES.partition(" ")[0]
"""The warning that job scripts request and that ranks are sent."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *WARNINGS)
"""Signals by which Slurm or a user may end or warn all processes of a step, and a worker leaves."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``sig`` to this process when its parent ends.

    Safe between fork and exec: it only makes one system call.
    """
    _prctl(_PR_SET_PDEATHSIG, int(sig))


def keep_descriptors(*kept: int) -> None:
    """Number these descriptors from 0 in their order, and close all others.

    Of the process that forked this one, no lock must stay open here, and no pipe.
    """
    high = max(kept) + 1  # no number is taken that is still needed
    moved = [os.dup2(fd, high + at, inheritable=False) for at, fd in enumerate(kept)]
    for target, fd in enumerate(moved):
        os.dup2(fd, target, inheritable=target <= 2)
    os.closerange(len(kept), os.sysconf("SC_OPEN_MAX"))


def kill_group(leader: int, number: int = signal.SIGKILL) -> None:
    """Kill a process group, or send it another signal; do nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def readable(*fds: int, timeout_s: float | None = None) -> set[int]:
    """Wait for descriptors that are readable or at end of file; empty after ``timeout_s``.

    A timeout is rounded up to milliseconds; None waits for ever.
    """
    # A notebook's process may have descriptors above 1023, which select(2) does not accept.
    waiting = select.poll()
    for fd in fds:
        waiting.register(fd, select.POLLIN)
    found = waiting.poll(None if timeout_s is None else math.ceil(1000 * timeout_s))
    return {fd for fd, _ in found}


@contextlib.contextmanager
def handling(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """Handle these signals in the block; does nothing in a thread other than the main one."""
    before: dict[int, Any] = {}
    with contextlib.suppress(ValueError):
        for number in numbers:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none is lost."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def describe_exit(code: int) -> str:
    """How a process ended, by its exit code, which is negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    named = -code in set(signal.Signals)  # most real-time signals have no name
    return f"killed by {signal.Signals(-code).name if named else f'signal {-code}'}"


def parent_of(pid: int | str) -> tuple[int, bool]:
    """Process id of a process's parent, and whether the process is a zombie (proc(5), stat)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        state, parent = file.read().rpartition(b")")[2].split(maxsplit=2)[:2]
    return int(parent), state == b"Z"


def children_of(pid: int) -> set[int]:
    """Process ids of a process's children, and of those that it has adopted; also of zombies."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found |= {*map(int, file.read().split())}
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of a process; without zombies."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent, ended = parent_of(name)
            if not ended:
                children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


CUT_SHORT = 143
"""Exit code of a process that SIGTERM ended."""
_LIVES = 5
_LONG_S = 600.0
"""A life of this many seconds counts as success: a search takes days."""
_TELL_S = 5.0


def shell_code(code: int) -> int:
    """The exit code of a process, 128 + N for signal N, for which Python has -N."""
    return code if code >= 0 else 128 - code


class Supervisor:
    """Starts a process again, up to five times, when it is killed: its decisions are in the run.

    ``stop_workers`` asks the workers to exit, once no coordinator will decide for them. Every
    ``look_s`` seconds it is tried whether another coordinator has ended.
    """

    def __init__(
        self,
        argv: Sequence[str],
        stop_workers: Callable[[], None],
        *,
        log: Callable[[str], object] = str,
        look_s: float = 30.0,
        **options: Any,
    ) -> None:
        self._argv = list(argv)
        self._options = options
        self._log = log
        self._look_s = look_s
        self._stop_workers = stop_workers
        self._lives = _LIVES
        self._code: int | None = None
        self._next = 0.0
        self._stopped = False
        self._start()

    def _start(self) -> None:
        import subprocess  # most processes start none

        self._began = time.monotonic()
        self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
            self._argv, stdin=subprocess.DEVNULL, **self._options
        )

    @property
    def running(self) -> bool:
        return self._child is not None

    def ended(self) -> int | None:
        """Its exit code once it will not be started again; 128 + N for signal N."""
        return self._code

    def stop(self) -> None:
        """End it by SIGTERM; ``ended`` then returns its last code, 143 if it had to be ended."""
        if self._stopped:
            return
        self._stopped = True
        if self._child is not None:
            self._child.terminate()
        elif self._code is None:
            self._code = CUT_SHORT

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def poll(self, *, ranks: bool) -> float | None:
        """Act on its end; the seconds after which to call again, None for at the end of a child.

        ``ranks`` says whether workers run that may have to be asked to exit.
        """
        now = time.monotonic()
        if self._child is not None and (code := self._child.poll()) is not None:
            self._child = None
            self._next = now
            self._after(shell_code(code), now)
        if self._child is None and self._code is None and now >= self._next:
            self._start()
        if self._code is None:
            return None if self._child is not None else max(0.0, self._next - now)
        return self._tell(now) if ranks and self._code and not self._stopped else None

    def _after(self, code: int, now: float) -> None:
        if now - self._began > _LONG_S:
            self._lives = _LIVES
        if self._stopped:
            self._code = CUT_SHORT
        elif code == TRY_AGAIN:
            self._log("another coordinator decides for this run; looking again, since it may end")
            self._next = now + self._look_s
        elif code > 128 and self._lives:
            self._lives -= 1
            self._log(f"the coordinator was killed (code {code}): starting it again")
        else:
            self._code = code

    def _tell(self, now: float) -> float:
        """Ask the workers to exit, again and again: a step that is just starting hears nothing."""
        if now >= self._next:
            self._log(f"the coordinator ended with code {self._code}: telling the ranks to finish")
            self._stop_workers()
            self._next = time.monotonic() + _TELL_S
        return max(0.0, self._next - time.monotonic())


_PID, _STATUS = 4, 8
"""Offsets in a guard's shared memory; its first byte belongs to the executor."""
_LIFE = 3
_LOOK_S = 0.05
_PATIENCE_S = 5.0
"""A process that does not end by SIGKILL, because its filesystem hangs, must not stop a worker."""


class Guard:
    """A worker's handle on its executor, a child with a guard that leaves no descendant behind.

    The kernel ends an executor with its parent, but not the processes that the user's code started,
    and a kill of the executor's process group misses those that called setsid(2). The guard, a
    process between the two, adopts such processes (PR_SET_CHILD_SUBREAPER in prctl(2)). When the
    executor or its worker has ended, the guard kills all processes that are left, and exits.
    """

    pid = 0
    """Process id of the guard, if this process forked it."""

    def __init__(self, shared: mmap) -> None:
        """``shared``: memory of at least 12 bytes, which the processes share."""
        self._shared = shared
        self.life, self._life = os.pipe()
        self.ended = -1
        """At end of file when the child has ended."""

    def fork(self, child: Callable[[], object], alive: int) -> None:
        """Fork a guard from this process; ``child`` must not return.

        Children of the user's code may hold the child's pipes open, so only the guard keeps
        ``alive``, the other end of ``ended``.
        """
        self.pid = os.fork()
        if self.pid == 0:
            become_guard(child, (self.life, alive), self._shared)

    @property
    def child(self) -> int:
        """Process id of the child; 0 until the guard has started it."""
        return int(struct.unpack_from("i", self._shared, _PID)[0])

    def terminate(self) -> None:
        """Ask the child's descendants to end by SIGTERM; the child itself gets no signal."""
        for pid in descendants(self.child) if self.child else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)

    def end(self) -> str:
        """Kill the child and all its descendants; return how the child ended."""
        os.close(self._life)
        if self.pid:
            os.waitpid(self.pid, 0)
        while not self.pid and os.read(self.ended, 64):
            continue
        os.close(self.ended)
        known, status = struct.unpack_from("?i", self._shared, _STATUS)
        if not known:  # somebody killed the guard, and the kernel the child
            if self.child:
                kill_group(self.child)
            return "killed by SIGKILL"
        return describe_exit(os.waitstatus_to_exitcode(status))


def become_guard(child: Callable[[], object], ends: tuple[int, int], shared: mmap) -> None:
    """Start the child, and wait for its end or the worker's; never returns.

    ``ends``: the pipe that ends with the worker, and the one that ends with this process.
    """
    try:
        os.setpgid(0, 0)
        # Slurm signals every process of a step.
        for sig in STOP_SIGNALS:
            signal.signal(sig, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        adopt_orphans()
        guard = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            if os.getppid() == guard:
                child()
            os._exit(0)
        struct.pack_into("i", shared, _PID, pid)
        gc.disable()  # a collection would copy the memory that is shared with the worker
        _watch(pid, ends, shared)
    finally:
        os._exit(0)


def _watch(child: int, ends: tuple[int, int], shared: mmap) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    keep_descriptors(null, null, null, *ends)
    wake, wake_write = os.pipe()
    for fd in (wake, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: list[int] = []
    while _reap(child, statuses) and not statuses:
        if _LIFE in readable(_LIFE, wake):
            os.kill(child, signal.SIGKILL)
            statuses.append(os.waitpid(child, 0)[1])
        _drain(wake)
    struct.pack_into("?i", shared, _STATUS, True, statuses[0])
    kill_group(child)
    end = time.monotonic() + _PATIENCE_S
    while _reap(child, statuses) and time.monotonic() < end:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        readable(wake, timeout_s=_LOOK_S)
        _drain(wake)


def _drain(wake: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(wake, 4096)


def _reap(child: int, statuses: list[int]) -> bool:
    """Reap the processes that have ended, and note the child's status; whether any is left."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                statuses.append(ended[1])
        return True
    return False
