"""Messages from an executor to its worker, its output, and the state that each item starts with."""

from __future__ import annotations

import io
import json
import math
import os
import posix
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, TextIO

from hpc_toolkit.errors import (
    LONGEST_TEXT,
    CommandInterruptedError,
    PermanentError,
    describe,
    shortened,
)
from hpc_toolkit.rundir.files import write_all
from hpc_toolkit.system.jsonlines import encode, is_plain
from hpc_toolkit.worker.memory import out_of

if TYPE_CHECKING:
    from mmap import mmap

# Messages to the worker: one line each; the first byte is the kind.
DONE, FAILED, PERMANENT = b"d", b"f", b"p"  # the rest is the beginning of a journal line
KEPT = b"k"  # as DONE; the line names bytes of the value file, which must be synced before it
UNWRITABLE = b"x"  # the value file cannot be written; the rest is the number of the error
LOADING, LOADED = b"l", b"L"  # a load began, or ended: the item's clock starts again
END = b"e"  # the request is over; the rest says why: "" (all items), "stopped", "interrupted"
INTERRUPTED = b"i"  # an item failed after a signal came to all processes; the rest is as in FAILED
FAILING = "failing"  # reason of END: many items failed in a row; the rest may be sent again
WORN = "worn"  # reason of END: this process has reached its limit of items or memory
BROKEN = b"w"  # the workload itself cannot be loaded; the rest says why

CONSECUTIVE_FAILURES = 8
"""Failures in a row after which an executor stops until its worker has looked at them."""


class _LogFile(io.FileIO):
    """Drops output that a full disk refuses, so that the item that printed it does not fail."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def text_stream(fd: int) -> TextIO:
    """The log as text, written line by line, so that a crash loses no printed line."""
    file = io.BufferedWriter(_LogFile(fd, "w", closefd=False))
    return io.TextIOWrapper(file, "utf-8", "backslashreplace", line_buffering=True)


class Log:
    """The log by a descriptor of its own: an item may close or redirect descriptors 1 and 2."""

    def __init__(self, fd: int) -> None:
        self._fd, self._inode = fd, os.fstat(fd).st_ino

    def settle(self) -> int:
        """Flush what was printed, and return the size of the log."""
        try:
            sys.stdout.flush()
            os.get_inheritable(2)  # raises OSError if an item closed it
            found = os.fstat(1)
            if found.st_ino == self._inode and not sys.stderr.closed:
                return found.st_size
        except BaseException:  # noqa: BLE001 - such as that of an object of the user
            return self.reopen()
        return self.reopen()

    def reopen(self) -> int:
        """Like :meth:`settle`, after opening what an item closed; this takes 5 us longer."""
        for fd, name in ((1, "stdout"), (2, "stderr")):
            try:
                os.get_inheritable(fd)
            except OSError:
                os.dup2(self._fd, fd)
            stream = getattr(sys, name)
            try:
                stream.flush()
            except BaseException as error:  # noqa: BLE001 - closed, or an object of the user
                if stream is None or not isinstance(error, AttributeError):
                    setattr(sys, name, text_stream(fd))
        return os.fstat(self._fd).st_size

    def write(self, text: str) -> None:
        with suppress(OSError):
            write_all(self._fd, text.encode(errors="backslashreplace"))


class Report:
    """Turns the results of one request into messages."""

    def __init__(
        self,
        request: dict[str, Any],
        send: Callable[[bytes, bytes], None],
        stop: mmap | bytes = b"\0",
        log: Log | None = None,
    ) -> None:
        """``stop``: its first byte becomes 1 when the worker wants no further item to start."""
        self._where = where(request)
        self._positions = request["positions"]
        self._send, self._stop, self._log = send, stop, log or Log(1)
        self._values: str | None = request.get("values")
        self.keeps_exceptions = False
        """Whether failures are recorded with their exceptions, beside their texts."""
        self._deadline: float | None = request["deadline"]
        self._final = frozenset(request.get("no_retry", ()))
        """Names of exceptions that fail an item for good."""
        self._expected_s: float = request["expected_s"]
        self._log_end = self._log.reopen()
        self.index = 0
        """Items reported so far."""
        self.seconds = 0.0
        """Duration of the last item."""
        self._since = time.monotonic()
        self.failures_left = int(request["failures_left"])
        self._failures_in_a_row = int(request.get("failures_in_a_row", CONSECUTIVE_FAILURES))
        self._written = ""
        """The last traceback in the log: that of a load fails each item of its group."""

    @property
    def failing(self) -> bool:
        """Whether the worker must look at the failures in a row before the next item."""
        return self.failures_left <= 0

    @property
    def over(self) -> bool:
        """Whether no further item may start: a stop was requested, or it would not end in time."""
        if self._stop[0]:
            return True
        limit = self._deadline
        return limit is not None and time.monotonic() + self._expected_s > limit

    def restart_clock(self) -> None:
        self._since = time.monotonic()

    def result(self, value: Any) -> None:
        try:
            text = encode(value) if is_plain(value) else ""
        except (ValueError, RecursionError):  # a number that is not finite, or too deep
            text = ""
        if text:
            self.failures_left = self._failures_in_a_row
            self._report(DONE, "done", f'"value":{text}')
        else:
            self._other_result(value)

    def _other_result(self, value: Any) -> None:
        """Report a result that JSON alone does not keep."""
        from hpc_toolkit.rundir.pickles import UnstorableError
        from hpc_toolkit.rundir.valuefiles import Encoded

        try:
            fields, grown = Encoded(value).line(self._values)
        except UnstorableError as error:
            self.failure(error)
        except OSError as error:
            # The item is not the cause, so it runs again, as if the worker's journal were full.
            self._send(UNWRITABLE, str(error.errno).encode())
            raise CommandInterruptedError from error
        else:
            self.failures_left = self._failures_in_a_row
            self._report(KEPT if grown else DONE, "done", fields)

    def failure(self, error: BaseException, signalled_at: float = -math.inf) -> None:
        """Report a failure; ``signalled_at``: when a signal came to all processes of the step."""
        interrupted = signalled_at >= self._since
        permanent = issubclass(type(error), PermanentError)
        if self._final and not interrupted:
            permanent |= any(one.__name__ in self._final for one in type(error).__mro__)
        trace, short = trace_of(error), out_of(error)
        if len(trace) > LONGEST_TEXT and trace != self._written:
            self._log.write(trace)
            self._written = trace
        fields = json.dumps(
            {
                "error": _message(error),
                "error_type": type(error).__name__,
                "oom": short == "oom",
                **({short: True} if short == "gpu_oom" else {}),
                "traceback": shortened(trace),
            }
        )[1:-1]
        if self.keeps_exceptions and self._values and not interrupted:
            from hpc_toolkit.rundir.valuefiles import exception_field

            with suppress(Exception):  # it cannot be pickled, or a full disk takes no more
                fields += exception_field(error, trace, self._values)
        if permanent:
            self._report(PERMANENT, "permanent", fields)
        else:
            self.failures_left -= 1
            self._report(INTERRUPTED if interrupted else FAILED, "failed", fields)

    def _report(self, kind: bytes, name: str, fields: str) -> None:
        now = time.monotonic()
        seconds = self.seconds = now - self._since
        self._since = now
        if seconds > self._expected_s:  # noqa: PLR1730 - max() takes three times as long
            self._expected_s = seconds
        # The byte range of the worker's log that this item wrote.
        start, self._log_end = self._log_end, self._log.settle()
        logged = f',"log":[{start},{self._log_end}]' if self._log_end > start else ""
        position = self._positions[self.index]
        self.index += 1
        self._send(
            kind,
            f'{{"type":"{name}",{self._where}{position},"at":{time.time():.3f},'
            f'"seconds":{seconds:.6f}{logged},{fields}'.encode(),
        )


def where(request: dict[str, Any]) -> str:
    """The fields of a journal line that name the unit run of a request."""
    unit = json.dumps(f"{request['stage']}/{request['unit']}")
    return f'"unit":{unit},"generation":{request["generation"]},"item":'


def results_of(workload: Any, context: Any, items: Iterator[dict[str, Any]]) -> Iterable[Any]:
    """Call ``run`` of a workload class; refuse what is not one result for each item."""
    results = workload.run(context, items)
    if isinstance(results, str | bytes | Mapping) or not isinstance(results, Iterable):
        message = f"run() returned {type(results).__name__}: yield one result for each item"
        raise TypeError(message)
    return results


def too_few() -> RuntimeError:
    """The failure of an item that ``run`` took and gave no result for."""
    return RuntimeError("run() ended without a result for this item: yield one for each item")


def try_item(workload: Any, group: Any, item: dict[str, Any]) -> dict[str, Any]:
    """Run one item in this process; return the line that a worker would write in its journal."""
    lines: list[bytes] = []
    place = {"stage": "try", "unit": "try", "generation": 1, "positions": [0]}
    limits = {"deadline": None, "expected_s": 0.0, "failures_left": 1}
    report = Report({**place, **limits}, lambda _kind, line: lines.append(line))
    try:
        for value in results_of(workload, workload.load(group), iter([item])):
            report.result(value)
            break
        else:
            report.failure(too_few())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the boundary of the user's code
        report.failure(error)
    record: dict[str, Any] = json.loads(lines[0] + b"}")
    return record


def _message(error: BaseException) -> str:
    with suppress(BaseException):  # a class of the user may lack the attributes
        if isinstance(error, PermanentError):
            return shortened(
                f"{error.message} ({error.hint})" if error.hint else f"{error.message}"
            )
    return describe(error)


def trace_of(error: BaseException) -> str:
    """The traceback of an exception whose own methods may fail."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as another:  # noqa: BLE001 - code of the user
        return f"{describe(error)}\n(without a traceback, which raised {describe(another)})\n"


LONG_S = 0.001
"""Seconds of an item after which the system calls of a check take no noticeable time.

Before that, only changes by Python's own functions are undone.
"""


class World:
    """The current directory and the umask with which each item of this process starts."""

    def __init__(self) -> None:
        self._path: str | None = None
        """The directory; None if it was removed."""
        self._directory = -1
        self._umask = 0o077
        self.changed = True
        """Whether an item called a function of Python that changes it."""

    def watch(self) -> None:
        """Notice calls of Python's functions that change it; a check costs a fifth of a no-op."""
        # umask(2) reads the mask only by changing it; a process that was just forked has no other
        # thread that could create a file meanwhile.
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        for name in ("chdir", "fchdir", "umask"):
            found = getattr(posix, name)
            noted = self._noted(found)
            for module in (os, posix):  # pickle compares what both have
                setattr(module, name, noted)
            os.supports_fd |= {noted} if found in os.supports_fd else set()

    def _noted(self, function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.changed = True
            return function(*args, **kwargs)

        return call

    def keep(self) -> None:
        """Start the next items with what is set now."""
        if (now := os.umask(self._umask)) != self._umask:
            self._umask = now
            os.umask(now)
        path = None
        with suppress(OSError):
            path = os.getcwd()
        if path is None or path != self._path:
            before, self._directory = self._directory, os.open(".", os.O_PATH)
            self._path = path
            with suppress(OSError):
                os.close(before)
        self.changed = False

    def restore(self) -> None:
        """Undo what an item changed."""
        os.umask(self._umask)
        path = None
        with suppress(OSError):
            path = os.getcwd()
        # Not at once: fchdir(2) asks the server of a network filesystem.
        if path is None or path != self._path:
            try:
                os.fchdir(self._directory)  # also if it was moved or removed
            except OSError:  # the item closed all descriptors
                os.chdir(self._path or ".")
        self.changed = False


WORLD = World()


def restored(item: dict[str, Any], own: str | None) -> dict[str, Any]:
    """The item as code gets it: results of earlier stages in it are as Python had them."""
    if "stored" not in item:
        return item
    from hpc_toolkit.rundir.valuefiles import with_results  # few items need it

    return with_results(item, own)
