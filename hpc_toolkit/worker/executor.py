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
import traceback
from contextlib import suppress
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO, cast

from hpc_toolkit.errors import CommandInterruptedError, WorkloadError
from hpc_toolkit.rundir.files import write_all
from hpc_toolkit.system.binding import limit_memory
from hpc_toolkit.system.memory import Shrinking
from hpc_toolkit.system.processes import die_with_parent, kill_group
from hpc_toolkit.worker.attempts import BROKEN, END, FAILING, LOADED, LOADING, PREFETCHES, Report
from hpc_toolkit.worker.loading import Prefetch, load_workload, prefetch_of
from hpc_toolkit.worker.world import WORLD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hpc_toolkit.rundir.layout import StageSpec
    from hpc_toolkit.worker.command import CommandWorkload
    from hpc_toolkit.worker.loading import Workload

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


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
        """Send a request with its items as JSON lines; BrokenPipeError if the child is gone."""
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
    for sig in STOP_SIGNALS:
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
        for sig in STOP_SIGNALS:
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


class _Child:
    """The executor's own side of the pipes."""

    _workload: Workload
    _items: list[dict[str, Any]]
    _report: Report

    def __init__(
        self, stages: dict[str, StageSpec], requests: int, results: int, stop: mmap.mmap
    ) -> None:
        # Processes that user code spawns import the module of this name again.
        sys.modules["__main__"] = ModuleType("__main__")
        WORLD.watch()
        self._stages = stages
        self._requests = os.fdopen(requests, "rb", closefd=False)
        self._results = results
        self._stop = stop
        self._workloads: dict[str, Workload] = {}
        self._loaded: tuple[str, str] | None = None
        self._context: Any = None
        self._prefetch = Prefetch()
        self._taken = 0
        """Items that the running call of the workload has taken."""

    def serve(self) -> None:
        while header := self._requests.readline():
            request = json.loads(header)
            self._items = json.loads(self._requests.read(request["size"]))
            self._run_unit(self._stages[request["stage"]], request)

    def _send(self, kind: bytes, text: bytes = b"") -> None:
        write_all(self._results, b"%s%s\n" % (kind, text))

    def _run_unit(self, spec: StageSpec, request: dict[str, Any]) -> None:
        try:
            self._workload = self._workload_of(spec)
        except WorkloadError as error:
            self._send(BROKEN, f"{error.message}\t{error.hint}".replace("\n", " ").encode())
            return
        self._report = report = Report(request, self._send, self._stop)
        # After the groups of the request comes the one that the worker intends to claim next.
        following = json.loads(request.get("next_group", "null"))
        groups = list(_groups(self._items, spec.group_by))
        try:
            for number, (group, span) in enumerate(groups, 1):
                if report.over or report.failing:
                    break
                coming = groups[number][0] if number < len(groups) else following
                # Before the load, which may be most of a group's work.
                wanted = coming if request.get("prefetch", True) else None
                self._prefetch.name(self._workload, wanted, loads=group)
                if self._load(spec, group, span):
                    self._run_span(span)
            left = report.index < len(self._items)
            how = FAILING if report.failing else "stopped" if left else ""
            self._send(END, how.encode())
        except CommandInterruptedError:
            self._send(END, b"interrupted")

    def _workload_of(self, spec: StageSpec) -> Workload:
        if spec.name not in self._workloads:
            self._send(LOADING)
            workload = load_workload(spec.workload)
            if spec.workload.command is not None:
                _commands.append(cast("CommandWorkload", workload))
            self._workloads[spec.name] = workload
            self._send(LOADED)
            self._send(PREFETCHES, b"yes" if prefetch_of(workload) else b"")
        return self._workloads[spec.name]

    def _load(self, spec: StageSpec, group: Any, span: range) -> bool:
        """Load the context of a group; on failure, fail its items and return False."""
        key = (spec.name, json.dumps(group, sort_keys=True))
        if self._loaded == key:
            return True
        self._loaded, self._context = None, None  # free the old one before the new one is loaded
        self._send(LOADING)
        failure = self._try_load(group, self._items[span.start : span.stop])
        self._send(LOADED)
        self._report.restart_clock()
        if failure is not None:
            while self._report.index < span.stop and not self._report.failing:
                self._report.failure(failure)
            return False
        self._loaded = key
        self._prefetch.open()
        return True

    def _try_load(self, group: Any, items: list[dict[str, Any]]) -> BaseException | None:
        shrinking = Shrinking(self._workload)
        while self._context is None:
            failure: BaseException | None = None
            try:
                self._context = self._workload.load(group)
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

    def _run_span(self, span: range) -> None:
        shrinking, report = Shrinking(self._workload), self._report
        while report.index < span.stop and not report.failing:
            first = report.index
            failure = self._follow(span)
            if failure is not None:
                taken = self._items[report.index : max(first + self._taken, report.index + 1)]
                failure = shrinking.ask(failure, self._context, taken, report.index)
                if failure is not None:
                    report.failure(failure)
                else:
                    self._context = shrinking.context
            elif report.index == span.stop or report.failing:
                return
            elif report.index < first + self._taken:
                report.failure(RuntimeError("run() yielded fewer results than it took items"))
            elif report.over:
                return
            elif self._taken == 0:
                report.failure(RuntimeError("run() took no item"))

    def _follow(self, span: range) -> BaseException | None:
        """Report results until the workload has no more or raises; return the exception."""
        report = self._report
        self._taken = 0
        try:
            for value in self._workload.run(self._context, self._feed(report.index, span.stop)):
                report.result(value)
                if report.index == span.stop or report.failing:
                    break
        except CommandInterruptedError:
            raise
        except BaseException as error:  # noqa: BLE001 - the boundary of the user's code
            return error
        finally:
            if self._taken:
                WORLD.restore()
        return None

    def _feed(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        """Hand out items one at a time, as long as another one may start."""
        for item in self._items[start:stop]:
            if self._report.over:
                return
            if self._taken:
                WORLD.restore()
            else:
                WORLD.keep()
            self._taken += 1
            yield item


def _groups(items: list[dict[str, Any]], group_by: str | None) -> Iterator[tuple[Any, range]]:
    """Yield each group of consecutive items and their range; None for items without groups."""
    start = 0
    for group, some in groupby(
        items, lambda item: item[group_by] if group_by is not None else None
    ):
        stop = start + len(list(some))
        yield group, range(start, stop)
        start = stop
