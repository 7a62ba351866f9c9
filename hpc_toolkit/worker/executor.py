"""The executor: a child process that holds the loaded context and runs the user's code.

It knows nothing about claims or journals. It reads requests from a pipe, runs their items in
order, and writes one message per result; its worker journals them. A segfault, the OOM killer
or a call that never returns affects this process alone.
"""

from __future__ import annotations

import gc
import io
import json
import mmap
import os
import random
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from hpc_toolkit.errors import CommandInterruptedError, WorkloadError
from hpc_toolkit.rundir.files import write_all
from hpc_toolkit.system.binding import limit_memory
from hpc_toolkit.system.memory import Shrinking
from hpc_toolkit.system.processes import die_with_parent, kill_group
from hpc_toolkit.worker.attempts import BROKEN, END, FAILING, LOADED, LOADING, PREFETCHES, Report
from hpc_toolkit.worker.loading import Prefetch, load_workload, prefetch_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hpc_toolkit.rundir.layout import StageSpec
    from hpc_toolkit.worker.command import CommandWorkload
    from hpc_toolkit.worker.loading import Workload


class Executor:
    """The worker's handle on its executor process."""

    def __init__(self, stages: dict[str, StageSpec], log_path: Path) -> None:
        self._stop = mmap.mmap(-1, 1)
        request_read, self._requests = os.pipe()
        self.results, result_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become_child(stages, log_path, (request_read, result_write), self._stop)
        # Parent and child both set the group, so that it is set before either continues.
        with suppress(OSError):
            os.setpgid(self.pid, self.pid)
        os.close(request_read)
        os.close(result_write)
        os.set_blocking(self.results, False)
        # Children of the user's code may hold the pipe open, so only the pidfd shows that the
        # executor has ended.
        self.ended = os.pidfd_open(self.pid)

    def start(self, request: dict[str, Any], lines: list[bytes]) -> None:
        """Send a request; ``lines`` are its items as JSON.

        Raises BrokenPipeError: the child is gone.
        """
        self._stop[0] = 0
        # One array: parsing many short texts one by one takes six times as long.
        body = b"[%s]" % b",".join(lines)
        header = json.dumps({**request, "size": len(body)}).encode() + b"\n"
        write_all(self._requests, header + body)

    def stop(self) -> None:
        """Ask the child to end the request before the next item."""
        self._stop[0] = 1

    def end(self) -> str:
        """Kill the child and its children; return how it ended. Its messages stay readable."""
        kill_group(self.pid)
        _, status = os.waitpid(self.pid, 0)
        # If the child had died before, its commands are still in its process group.
        kill_group(self.pid)
        code = os.waitstatus_to_exitcode(status)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        for fd in (self._requests, self.results, self.ended):
            os.close(fd)
        self._stop.close()


def _become_child(
    stages: dict[str, StageSpec], log_path: Path, pipes: tuple[int, int], stop: mmap.mmap
) -> None:
    """Serve requests in the forked child; never returns."""
    code = 70
    try:
        parent = os.getppid()
        os.setpgid(0, 0)
        _take_signals()
        die_with_parent()
        if os.getppid() != parent:
            os._exit(0)
        requests, results = _arrange_descriptors(log_path, pipes)
        _leave_guard()
        # Otherwise all forked executors would draw the same random numbers.
        random.seed()
        # Inherited objects stay to the end; garbage collection would copy their shared pages.
        gc.freeze()
        limit_memory()
        _Child(stages, requests, results, stop).serve()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may run on in the parent's stack
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _take_signals() -> None:
    signal.set_wakeup_fd(-1)
    # Slurm signals every process of a step, and the worker decides what follows. Handlers are
    # used because commands would inherit SIG_IGN.
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, _note_signal)


def _leave_guard() -> None:
    """Start a guard process that kills this process group when the executor ends for any reason.

    The kernel ends the executor with its worker, but not the executor's own children.
    """
    executor = os.pidfd_open(os.getpid())
    between = os.fork()
    if between != 0:
        os.close(executor)
        os.waitpid(between, 0)
        return
    # A grandchild: user code that waits for all of its children must not wait for the guard.
    if os.fork() == 0:
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(sig, signal.SIG_IGN)
        os.dup2(executor, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        select.select([3], [], [])
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


_commands: list[CommandWorkload] = []


def _note_signal(*_: object) -> None:
    for command in _commands:
        command.note_signal()


def _arrange_descriptors(log_path: Path, pipes: tuple[int, int]) -> tuple[int, int]:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    kept = [os.dup(fd) for fd in (null, log, log, *pipes)]
    # The worker's lock must not stay open in this process or in children of the user's code.
    high = max(kept) + 1
    moved = [os.dup2(fd, high + index, inheritable=False) for index, fd in enumerate(kept)]
    for target, fd in enumerate(moved):
        os.dup2(fd, target, inheritable=target <= 2)
    os.closerange(5, os.sysconf("SC_OPEN_MAX"))
    sys.stdout = _text_stream(1)
    sys.stderr = _text_stream(2)
    return 3, 4


class _LogFile(io.FileIO):
    """Drops output that a full disk refuses, so that the item that printed it does not fail."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _text_stream(fd: int) -> TextIO:
    """The log as text, written line by line, so that a crash loses no printed line."""
    file = io.BufferedWriter(_LogFile(fd, "w", closefd=False))
    return io.TextIOWrapper(file, "utf-8", "backslashreplace", line_buffering=True)


class _Feed:
    """Hands out the items of a request one at a time, until a stop is requested."""

    def __init__(self, items: list[dict[str, Any]], pace: _Pace) -> None:
        self._items = items
        self._pace = pace
        self.taken = 0

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.taken == len(self._items) or self._pace.over:
            raise StopIteration
        self.taken += 1
        return self._items[self.taken - 1]


class _Pace:
    """Decides whether another item may start: no stop was requested and it would end in time."""

    def __init__(self, stop: mmap.mmap, deadline: float | None, expected_s: float) -> None:
        self._stop = stop
        self._deadline = deadline
        self._expected_s = expected_s

    def took(self, seconds: float) -> None:
        self._expected_s = max(self._expected_s, seconds)

    @property
    def over(self) -> bool:
        if self._stop[0]:
            return True
        return self._deadline is not None and time.monotonic() + self._expected_s > self._deadline


class _Child:
    """The executor's own side of the pipes."""

    def __init__(
        self, stages: dict[str, StageSpec], requests: int, results: int, stop: mmap.mmap
    ) -> None:
        self._stages = stages
        self._requests = os.fdopen(requests, "rb", closefd=False)
        self._results = results
        self._stop = stop
        self._workloads: dict[str, Workload] = {}
        self._loaded: tuple[str, str] | None = None
        self._context: Any = None
        self._prefetch = Prefetch()

    def serve(self) -> None:
        while header := self._requests.readline():
            request = json.loads(header)
            self._run_unit(request, json.loads(self._requests.read(request["size"])))

    def _send(self, kind: bytes, text: bytes = b"") -> None:
        write_all(self._results, b"%s%s\n" % (kind, text))

    def _run_unit(self, request: dict[str, Any], items: list[dict[str, Any]]) -> None:
        spec = self._stages[request["stage"]]
        try:
            workload = self._workload(spec)
        except WorkloadError as error:
            self._send(BROKEN, f"{error.message}\t{error.hint}".replace("\n", " ").encode())
            return
        report = Report(request, self._send)
        pace = _Pace(self._stop, request["deadline"], request["expected_s"])
        try:
            for span in _spans(items, spec.group_by):
                if pace.over or report.failing:
                    break
                # Before the load, which may be most of a group's work.
                loads, following = _groups(items, span, spec.group_by, request)
                self._prefetch.name(workload, following, loads=loads)
                if self._load(spec, workload, items, report, span):
                    self._run_span(workload, items, span, report, pace)
            how = FAILING if report.failing else "stopped" if report.index < len(items) else ""
            self._send(END, how.encode())
        except CommandInterruptedError:
            self._send(END, b"interrupted")

    def _workload(self, spec: StageSpec) -> Workload:
        if spec.name not in self._workloads:
            self._send(LOADING)
            workload = load_workload(spec.workload)
            if spec.workload.command is not None:
                _commands.append(cast("CommandWorkload", workload))
            self._workloads[spec.name] = workload
            self._send(LOADED)
            self._send(PREFETCHES, b"yes" if prefetch_of(workload) else b"")
        return self._workloads[spec.name]

    def _load(
        self,
        spec: StageSpec,
        workload: Workload,
        items: list[dict[str, Any]],
        report: Report,
        span: range,
    ) -> bool:
        """Load the context of the span's group; on failure, fail its items and return False."""
        group = items[span.start][spec.group_by] if spec.group_by is not None else None
        key = (spec.name, json.dumps(group, sort_keys=True))
        if self._loaded == key:
            return True
        self._loaded, self._context = None, None  # free the old one before the new one is loaded
        self._send(LOADING)
        failure = self._try_load(workload, group, items[span.start : span.stop])
        self._send(LOADED)
        report.restart_clock()
        if failure is not None:
            while report.index < span.stop and not report.failing:
                report.failure(failure)
            return False
        self._loaded = key
        self._prefetch.open()
        return True

    def _try_load(
        self, workload: Workload, group: Any, items: list[dict[str, Any]]
    ) -> BaseException | None:
        shrinking = Shrinking(workload)
        while self._context is None:
            failure: BaseException | None = None
            try:
                self._context = workload.load(group)
            except BaseException as error:  # noqa: BLE001 - the boundary of the user's code
                failure = error
            if failure is None:
                return None
            # Outside the except block, which keeps the failed call's memory alive.
            failure = shrinking.ask(failure, None, items, 0)
            if failure is not None:
                return failure
            self._context = shrinking.context
        return None

    def _run_span(
        self,
        workload: Workload,
        items: list[dict[str, Any]],
        span: range,
        report: Report,
        pace: _Pace,
    ) -> None:
        shrinking = Shrinking(workload)
        while report.index < span.stop and not report.failing:
            feed = _Feed(items[report.index : span.stop], pace)
            first = report.index
            failure = self._follow(workload, feed, span, report, pace)
            if failure is not None:
                taken = items[report.index : max(first + feed.taken, report.index + 1)]
                failure = shrinking.ask(failure, self._context, taken, report.index)
                if failure is not None:
                    report.failure(failure)
                else:
                    self._context = shrinking.context
            elif report.index == span.stop or report.failing:
                return
            elif report.index < first + feed.taken:
                report.failure(RuntimeError("run() yielded fewer results than it took items"))
            elif pace.over:
                return
            elif feed.taken == 0:
                report.failure(RuntimeError("run() took no item"))

    def _follow(
        self, workload: Workload, feed: _Feed, span: range, report: Report, pace: _Pace
    ) -> BaseException | None:
        """Report results until the workload has no more or raises; return the exception."""
        try:
            for value in workload.run(self._context, feed):
                pace.took(report.result(value))
                if report.index == span.stop or report.failing:
                    break
        except CommandInterruptedError:
            raise
        except BaseException as error:  # noqa: BLE001 - the boundary of the user's code
            return error
        return None


def _groups(
    items: list[dict[str, Any]], span: range, group_by: str | None, request: dict[str, Any]
) -> tuple[Any, Any]:
    """The group of a span, and the group to prefetch.

    The group to prefetch is the next span's, else the one that the worker intends to claim next.
    None: no group, an unknown one, or a prefetch that is not wanted.
    """
    if group_by is None:
        return None, None
    if not request.get("prefetch", True):
        return items[span.start][group_by], None
    if span.stop < len(items):
        return items[span.start][group_by], items[span.stop][group_by]
    return items[span.start][group_by], json.loads(request.get("next_group", "null"))


def _spans(items: list[dict[str, Any]], group_by: str | None) -> Iterator[range]:
    """Yield ranges of consecutive items of the same group."""
    start = 0
    for index in range(1, len(items) + 1):
        last = index == len(items)
        if last or (group_by is not None and items[index][group_by] != items[start][group_by]):
            yield range(start, index)
            start = index
