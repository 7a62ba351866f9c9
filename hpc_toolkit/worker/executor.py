"""The executor: a child process that holds the loaded context and runs the user's code.

It knows nothing about claims or journals. It reads requests from a pipe, runs their items in
order, and writes one message per result; its worker journals them. A segfault, the OOM killer
or a call that never returns affects this process alone.
"""

from __future__ import annotations

import gc
import json
import math
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from hpc_toolkit.errors import CommandInterruptedError, WorkloadError
from hpc_toolkit.rundir.files import open_or_create, write_all
from hpc_toolkit.rundir.layout import StageSpec
from hpc_toolkit.system.binding import limit_memory
from hpc_toolkit.system.processes import STOP_SIGNALS, keep_descriptors
from hpc_toolkit.system.ranks import environment_of_items
from hpc_toolkit.worker import attempts
from hpc_toolkit.worker.loading import Prefetch, Workload, load_workload
from hpc_toolkit.worker.memory import Shrinking, resident_bytes

if TYPE_CHECKING:
    from hpc_toolkit.worker.command import CommandWorkload

_REQUESTS, _RESULTS, _LOG = 3, 4, 5
"""Descriptors of the executor; the last one is its own of the log."""


def become_child(
    stages: dict[str, StageSpec],
    log_path: Path,
    pipes: tuple[int, int],
    stop: mmap.mmap,
    prepared: Callable[[], object],
) -> None:
    """Serve requests in the forked child; never returns.

    ``prepared`` does what :func:`prepare` did if this process was forked from a fork server.
    """
    code = 70
    try:
        os.setpgid(0, 0)
        log = open_or_create(log_path, os.O_WRONLY | os.O_APPEND)
        keep_descriptors(os.open(os.devnull, os.O_RDONLY), log, log, *pipes, log)
        # Slurm signals every process of a step, and the worker decides what follows. Handlers are
        # used because commands would inherit SIG_IGN, which the guard has set.
        for sig in STOP_SIGNALS:
            signal.signal(sig, _note_signal)
        prepared()
        _guard_forks(_REQUESTS, _RESULTS)
        # Inherited objects stay to the end; garbage collection would copy their shared pages.
        gc.freeze()
        limit_memory()
        _Child(stages, stop).serve()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may run on in the parent's stack
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


_commands: list[CommandWorkload] = []
_forked = False
"""Whether the user's code forked this process from the executor."""
_signalled_at = -math.inf
"""Monotonic time of the last signal with which Slurm ends a step, or warns it."""


def _note_signal(_number: int, _frame: object) -> None:
    global _signalled_at  # noqa: PLW0603 - a handler has no other place
    _signalled_at = time.monotonic()
    for command in _commands:
        command.note_signal()


def _guard_forks(*pipes: int) -> None:
    """Let no child that the user's code forks be an executor: with its signals, with its pipes.

    Otherwise ``Process.terminate`` would be ignored, and the child could answer the worker.
    """
    own = threading.local()

    def before() -> None:
        # A signal between the fork and the change of its handler would be lost.
        own.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, own.mask)

    def after_in_child() -> None:
        global _forked  # noqa: PLW0603 - of this process, and of no object
        _forked = True
        for sig in STOP_SIGNALS:
            if signal.getsignal(sig) is _note_signal:
                fresh = signal.default_int_handler if sig == signal.SIGINT else signal.SIG_DFL
                signal.signal(sig, fresh)
        for fd in pipes:
            with suppress(OSError):
                os.close(fd)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


def prepare() -> None:
    """Make this process one in which the user's code can be imported."""
    environ = environment_of_items()
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = attempts.text_stream(fd)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)  # which code that replaced the first puts back
    # Processes that user code spawns import the module of this name again.
    sys.modules["__main__"] = ModuleType("__main__")
    attempts.WORLD.watch()


class _Child:
    """The executor's own side of the pipes."""

    _workload: Workload
    _items: list[dict[str, Any]]
    _report: attempts.Report
    _most: float  # items of one process; _least: before it can be replaced; _recycle_at: bytes

    def __init__(self, stages: dict[str, StageSpec], stop: mmap.mmap) -> None:
        self._stages = stages
        self._requests = os.fdopen(_REQUESTS, "rb", closefd=False)
        self._stop, self._log = stop, attempts.Log(_LOG)
        self._workloads: dict[str, Workload] = {}
        self._loaded: tuple[str, str] | None = None
        self._context: Any = None
        self._prefetch = Prefetch()
        self._taken = 0
        """Items that the running call of the workload has taken."""
        self._pid = os.getpid()
        self._begun = 0
        """Items that the workload has taken in this process."""

    def serve(self) -> None:
        while header := self._requests.readline():
            request = json.loads(header)
            self._items = json.loads(self._requests.read(request["size"]))
            self._run_unit(self._stages[request["stage"]], request)

    def _send(self, kind: bytes, text: bytes = b"") -> None:
        if os.getpid() != self._pid:
            self._leave_if_forked()
        write_all(_RESULTS, kind + text + b"\n")

    def _leave_if_forked(self, error: BaseException | None = None) -> None:
        """End a process that user code forked and that came back from it, as a script would end."""
        if os.getpid() == self._pid:
            return
        code: Any = 0 if error is None else 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            traceback.print_exception(error)
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(code & 0xFF)

    def _run_unit(self, spec: StageSpec, request: dict[str, Any]) -> None:
        try:
            self._workload = self._workload_of(spec)
        except WorkloadError as error:
            said = "\t".join(" ".join(one.split()) for one in (error.message, error.hint))
            self._send(attempts.BROKEN, said.encode(errors="backslashreplace"))
            return
        self._values = None if spec.workload.command else request.get("values")
        self._report = report = attempts.Report(request, self._send, self._stop, self._log)
        report.keeps_exceptions = getattr(self._workload, "keeps_exceptions", False) is True
        self._most = spec.max_items_per_process or math.inf
        self._recycle_at = math.inf if spec.recycle_at_mib is None else spec.recycle_at_mib << 20
        self._least = self._most if spec.recycle_at_mib is None else 1
        # After the groups of the request comes the one that the worker intends to claim next.
        following = json.loads(request.get("next_group", "null"))
        groups = list(_groups(self._items, spec.group_by))
        try:
            for number, (group, span) in enumerate(groups, 1):
                if report.over or report.failing or self._is_worn:
                    break
                coming = groups[number][0] if number < len(groups) else following
                # Before the load, which may be most of a group's work.
                wanted = coming if request.get("prefetch", True) else None
                self._prefetch.name(self._workload, wanted, loads=group)
                if self._load(spec, group, span):
                    self._run_span(span)
            how = ""
            if report.failing:
                how = attempts.FAILING
            elif report.index < len(self._items):
                how = attempts.WORN if self._is_worn and not report.over else "stopped"
            self._send(attempts.END, how.encode())
        except CommandInterruptedError:
            self._send(attempts.END, b"interrupted")

    @property
    def _is_worn(self) -> bool:
        """Whether a fresh process must run the next item; a process runs at least one."""
        if self._begun < self._least:
            return False
        return self._begun >= self._most or resident_bytes() > self._recycle_at

    def _workload_of(self, spec: StageSpec) -> Workload:
        if spec.name not in self._workloads:
            self._send(attempts.LOADING)
            workload = load_workload(spec.workload, pipefail=spec.pipefail)
            if spec.workload.command is not None:
                _commands.append(cast("CommandWorkload", workload))
            self._workloads[spec.name] = workload
            self._send(attempts.LOADED)
        return self._workloads[spec.name]

    def _load(self, spec: StageSpec, group: Any, span: range) -> bool:
        """Load the context of a group; on failure, fail its items and return False."""
        key = (spec.name, json.dumps(group, sort_keys=True))
        if self._loaded == key:
            return True
        self._loaded, self._context = None, None  # free the old one before the new one is loaded
        self._send(attempts.LOADING)
        failure = self._try_load(group, self._items[span.start : span.stop])
        self._send(attempts.LOADED)
        self._report.restart_clock()
        if failure is not None:
            # Each load may take minutes, so one failure is not tried again for each item.
            self._report.failures_left = max(
                self._report.failures_left, attempts.CONSECUTIVE_FAILURES
            )
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
            self._leave_if_forked(failure)
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
                    report.failure(failure, signalled_at=_signalled_at)
                else:
                    self._context = shrinking.context
            elif report.index == span.stop or report.failing:
                return
            elif report.index < first + self._taken:
                report.failure(attempts.too_few())
            elif report.over or self._is_worn:
                return
            elif self._taken == 0:
                report.failure(RuntimeError("run() took no item: iterate over them"))

    def _follow(self, span: range) -> BaseException | None:
        """Report results until the workload has no more or raises; return the exception."""
        report = self._report
        self._taken = 0
        try:
            for value in attempts.results_of(self._workload, self._context, self._feed(span)):
                report.result(value)
                if report.index == span.stop or report.failing:
                    break
        except CommandInterruptedError:
            raise
        except BaseException as error:  # noqa: BLE001 - the boundary of the user's code
            self._leave_if_forked(error)
            return error
        finally:
            if self._taken:
                attempts.WORLD.restore()
        return None

    def _feed(self, span: range) -> Iterator[dict[str, Any]]:
        """Hand out items one at a time, as long as another one may start."""
        for item in self._items[self._report.index : span.stop]:
            if _forked:
                self._leave_if_forked()
            if self._report.over or (self._begun >= self._least and self._is_worn):
                return
            if not self._taken:
                attempts.WORLD.keep()
            elif attempts.WORLD.changed or self._report.seconds > attempts.LONG_S:
                attempts.WORLD.restore()
            self._taken += 1
            self._begun += 1
            yield attempts.restored(item, self._values)


def _groups(items: list[dict[str, Any]], group_by: str | None) -> Iterator[tuple[Any, range]]:
    """Yield each group of consecutive items and their range; None for items without groups."""
    start = 0
    for group, some in groupby(
        items, lambda item: item[group_by] if group_by is not None else None
    ):
        stop = start + len(list(some))
        yield group, range(start, stop)
        start = stop
