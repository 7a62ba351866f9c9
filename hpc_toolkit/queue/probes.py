"""Looks at other workers' files that cannot keep this process from its work.

A look may take long. An NFSv4 server that has delegated a file to a client which is now lost
answers others only when that client's lease ends, 90 s by default. A server that has just started
lets lock requests wait as long. A worker that waited with it would leave its executor idle.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

LIMIT_S = 0.5
"""Seconds that a look may take; less while other looks have no answer yet."""

PRESENCE, JOURNAL, LOCK, HEAD = "presence", "journal", "lock", "head"


class ProbeTimeoutError(TimeoutError):
    """The file server has not answered in time; it may do so later."""


class Probes:
    """Looks at other workers' files, each in a thread of its own and for a limited time.

    A look without an answer goes on in its thread, and the next look at the same file takes its
    answer. Until then looks at other files of the same host fail at once, so a lost host costs one
    wait and one thread, however many workers it had. Locks and files are
    counted apart, because a server may answer for one and not for the other.

    A thread lives only while a look is under way. A process may therefore fork between its looks:
    a thread that is left is inside one system call and holds no lock of this process. A process
    may end during a look on NFS; the kernel keeps one that waits for a FUSE filesystem until that
    answers, up to 120 s where MooseFS has lost a host in the middle of a write.
    """

    def __init__(self, limit_s: float | None = LIMIT_S) -> None:
        self.limit_s = limit_s
        """None to look without threads and for as long as it takes."""
        self._unanswered: dict[tuple[str, str], Future[Any]] = {}

    def look(self, kind: str, worker: str, call: Callable[[], T]) -> T:
        """What ``call`` returns, or returned to an earlier look of this kind at this worker.

        Args:
            kind: PRESENCE, JOURNAL or LOCK of a worker, or HEAD of a log.
            worker: whose file it is; for HEAD the offset that is written.
            call: the look; anything that it raises is raised here.

        Raises:
            ProbeTimeoutError: there is no answer yet.
        """
        if self.limit_s is None:
            return call()
        key = (kind, worker)
        future: Future[T] | None = self._unanswered.pop(key, None)
        limit_s = 0.0
        if future is None:
            hung = [one for one, look in self._unanswered.items() if not look.done()]
            if _group(key) in map(_group, hung):
                message = f"waiting for the file server to answer for another {kind} of this host"
                raise ProbeTimeoutError(message)
            future = _start(call)
            limit_s = self.limit_s / (1 + len(hung))
        if wait([future], limit_s).done:
            return future.result()
        self._unanswered[key] = future
        message = f"the file server has not answered for the {kind} of {worker}"
        raise ProbeTimeoutError(message)

    def wait(self) -> None:
        """Wait until every look has its answer, however long that takes."""
        wait(self._unanswered.values())


DIRECT = Probes(limit_s=None)
"""For programs that may wait, and for filesystems of this kernel."""


def host_part(worker: str) -> str:
    """A worker's name without its process id and its random end."""
    return worker.rpartition("-")[0].rpartition("-")[0]


def _group(key: tuple[str, str]) -> tuple[str, str]:
    """What one answer that does not come stands for: all locks, or all files, of a host."""
    kind, worker = key
    return kind if kind in (LOCK, HEAD) else "file", host_part(worker)


def _start(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is taken
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        # A daemon, because this process must be able to end while a look hangs.
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:  # no thread can be started now
        run()
    return future
