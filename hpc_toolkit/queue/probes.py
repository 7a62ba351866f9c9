"""Look at other workers' files without blocking this process.

A look may take long. An NFSv4 server that has delegated a file to a client that is now lost answers
other clients only when that client's lease ends, 90 s by default. A server that has just started
delays lock requests as long. A worker that waited for the answer would leave its executor idle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

LIMIT_S = 0.5
"""Seconds that a look may take; less while other looks have no answer yet."""

PRESENCE, JOURNAL, LOCK, HEAD = "presence", "journal", "lock", "head"


class ProbeTimeoutError(TimeoutError):
    """The file server has not answered in time; it may do so later."""


class Probes:
    """Looks at other workers' files, each in a thread of its own and for a limited time.

    A look without an answer continues in its thread, and the next look at the same file takes its
    answer. Until then, looks at other files of the same host fail at once. So a lost host costs one
    wait and one thread, however many workers it had. Locks and files are counted separately,
    because a server may answer for one and not for the other.

    A thread lives only during its look. The process may fork between looks, because a remaining
    thread is inside one system call and holds no lock of this process. On NFS the process may end
    during a look. If the look waits for a FUSE filesystem, the kernel keeps the process until that
    answers, up to 120 s where MooseFS has lost a host in the middle of a write.
    """

    def __init__(self, limit_s: float | None = LIMIT_S) -> None:
        self.limit_s = limit_s
        """Seconds for a look; None: look without threads, for as long as it takes."""
        self._unanswered: dict[tuple[str, str], _Look[Any]] = {}

    def look(self, kind: str, worker: str, call: Callable[[], T]) -> T:
        """Return the result of ``call``, or that of an earlier look of this kind at this worker.

        ``kind`` is PRESENCE, JOURNAL or LOCK of a worker, or HEAD of a log, whose ``worker`` is the
        offset that is written. Raises the exception of ``call``, or ProbeTimeoutError if there is
        no answer yet.
        """
        if self.limit_s is None:
            return call()
        key = (kind, worker)
        look: _Look[T] | None = self._unanswered.pop(key, None)
        limit_s = 0.0
        if look is None:
            hung = [one for one, other in self._unanswered.items() if not other.ended.is_set()]
            if _group(key) in map(_group, hung):
                message = f"waiting for the file server to answer for another {kind} of this host"
                raise ProbeTimeoutError(message)
            look = _Look(call)
            limit_s = self.limit_s / (1 + len(hung))
        if look.ended.wait(limit_s):
            return look.result()
        self._unanswered[key] = look
        raise ProbeTimeoutError(f"the file server has not answered for the {kind} of {worker}")

    def wait(self) -> None:
        """Wait until every look has its answer, however long that takes."""
        for look in self._unanswered.values():
            look.ended.wait()


DIRECT = Probes(limit_s=None)
"""Looks without a limit, for programs that may wait and for filesystems of this kernel."""


def host_part(worker: str) -> str:
    """The host as a worker's file name has it; its real name is ``view.presence(worker).host``."""
    return worker.rpartition("-")[0].rpartition("-")[0]


def _group(key: tuple[str, str]) -> tuple[str, str]:
    """The looks that one missing answer blocks: all locks, or all files, of a host."""
    kind, worker = key
    return kind if kind in (LOCK, HEAD) else "file", host_part(worker)


class _Look(Generic[T]):
    """One call in a thread of its own.

    A Future would do as well, but its package imports logging and four more modules into every
    worker.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        import threading  # commands that only read a run look without threads

        self._call = call
        self._answers: list[T] = []
        self._error: BaseException | None = None
        self.ended = threading.Event()
        try:
            # A daemon, because this process must be able to end while a look hangs.
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:  # no thread can be started now
            self._run()

    def _run(self) -> None:
        try:
            self._answers.append(self._call())
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is taken
            self._error = error
        self.ended.set()

    def result(self) -> T:
        """The answer of a call that has ended; its exception is raised."""
        if self._error is not None:
            raise self._error
        return self._answers[0]
