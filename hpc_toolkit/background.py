"""The half of an executor that works in a thread: it writes calls, and reads their results."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import Counter
from concurrent import futures
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit import calls
from hpc_toolkit.calls.recorded import BEAT_S, Presence, Recorded
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.queue.control import ask_to_drain
from hpc_toolkit.queue.items import Item, ItemLines, segment_of
from hpc_toolkit.queue.presence import LIMIT_S
from hpc_toolkit.queue.view import Follower
from hpc_toolkit.queue.wants import MOST_WANTS, Wants, may_need
from hpc_toolkit.report.panel import one_line
from hpc_toolkit.report.terminal import Waiting
from hpc_toolkit.results.gather import rows_of_unit
from hpc_toolkit.results.workers import reachable_workers
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.files import list_names, writing
from hpc_toolkit.rundir.trust import is_local
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.terminal import note
from hpc_toolkit.worker.pool import PoolApart

if TYPE_CHECKING:
    from hpc_toolkit.workerjobs import CallJobs

_WINDOW_S, _LONGEST_S = 0.01, 1.0
"""Least and most seconds between the first call that waits to be written and its segment."""
_WRITES = 4  # times the seconds that writing a segment takes, between two of them
_MOST_SHARE = 20  # times the seconds that it takes to read the workers, between two readings
_NOTE_S = 10.0  # without a result, after which a lack of workers is reported


class Submitted(NamedTuple):
    key: bytes
    item: Item
    future: futures.Future[Any]
    want: dict[str, Any]
    """Its own needs and priority."""


class Background(futures.Executor):
    """Writes calls that are in its buffer to a run, ends their futures, and looks after workers."""

    _closing = False  # of the class: whether the interpreter ends

    def __init__(self, run: Run, workers: int, on_change: str, *, seal: bool) -> None:
        self.run = run
        """The run with the calls, for ``status()``, ``results()`` and ``retry()``."""
        self._workers = workers
        # Views serve one thread; the current directory may change.
        own = Run(self.run.root.absolute(), self.run.manifest)
        self._view, self._seal = own.view, seal
        (self._stage,) = own.view.stages.values()
        self._caller = calls.Caller(own.paths.calls)
        self._recorded = Recorded(own, on_change, self.run.root)
        self._presence = Presence(own.paths.calls)
        with writing(self.run.root):
            self._presence.beat()
        local = is_local(own.root)
        self._view.probes.limit_s = None if local else LIMIT_S
        self._follower = Follower(self._view, local=local)
        self._changed = threading.Condition()
        self._repeats: Counter[bytes] = Counter()
        self._buffer: list[Submitted] = []
        self._added: list[Submitted] = []
        self._waiting: dict[str, dict[int, Submitted]] = {}
        self._sealing = self._stopping = self._lost = False
        self._noted = set[str]()
        self._error: HpcToolkitError | None = None
        self._window_s = _WINDOW_S
        self._look_at = self._since = self._noted_at = 0.0
        self._shown, self._more_at = Waiting(), 0.0
        self._jobs: CallJobs | None = None
        self._pool = PoolApart(own.root, self._workers)
        self._idle, self._wanted = True, SimpleQueue[Background | None]()
        apart = (self._wanted, self._pool, self._presence)
        self._thread = threading.Thread(target=_serve, args=apart, daemon=True)
        self._thread.start()
        _executors.add(self)
        weakref.finalize(self, self._wanted.put, None).atexit = False

    def _settle(self, future: futures.Future[Any], row: dict[str, Any]) -> None:
        self._shown.done += row["state"] == "done"
        self._shown.failed += row["state"] != "done"
        calls.settle(future, row, self.run.values)

    def _wake(self) -> None:
        self._changed.notify()
        if self._idle:
            self._idle = False
            self._wanted.put(self)

    def _work(self) -> bool | None:
        """Write calls and read results until all are done; whether more calls may follow."""
        more = None
        try:
            with writing(self.run.root):
                while (more := self._step()) is None:
                    pass
        except HpcToolkitError as error:
            self._error = error
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            self._error = HpcToolkitError(message, hint="report this bug")
            raise
        finally:
            if not more:
                if self._stopping and self._error is None:
                    self._pool.end(complete=False)
                    with suppress(HpcToolkitError, OSError):  # of the calls that were running
                        self._read_results()
                self._give_up()
                if self._error is None and not self._stopping:
                    self._dismiss()
                self._presence.leave()
                self._pool.end(complete=self._stage.complete)
        return more

    def _step(self) -> bool | None:
        """Write or look once; at the end, whether more calls may follow."""
        with self._changed:
            if self._waiting and not (self._buffer or self._sealing or self._stopping):
                self._changed.wait(max(0.0, self._look_at - time.monotonic()))
            if self._buffer:  # more calls may follow at once, and belong to the same segment
                self._changed.wait_for(lambda: self._closing, self._window_s)
            sealing = self._sealing
        if self._stopping:
            return False
        if self._recorded.obsolete:
            self._recorded.withdraw(self._presence, self._changed)
        if self._buffer:
            self._write()
        if sealing:
            self._stage.log.seal()
            self._sealing = False
        if self._waiting and time.monotonic() >= self._look_at:
            self._look()
        with self._changed:
            if self._error is None and (self._buffer or self._waiting or self._sealing):
                return None
            self._idle = more = self._error is None and not self._closing
            return more

    def _write(self) -> None:
        """Add the calls in the buffer to the run, as one segment, unless it has them."""
        began = time.monotonic()
        with self._changed:
            fitting = self._fitting()
            taken = self._added = self._buffer[:fitting]
            self._buffer = self._buffer[fitting:]
        self._added = added = [one for one in taken if one.future.set_running_or_notify_cancel()]
        spec = self._stage.spec
        while True:
            self._stage.poll_log()
            self._recorded.find()
            new = [call for call in added if call.key not in self._recorded.places]
            self._caller.sync()
            if not new or self._stage.log.add_segment(segment_of(self._items(new), spec)):
                break
        self._stage.poll_log()
        self._recorded.find()
        for call in added:
            unit, position = self._recorded.places.pop(call.key)
            self._waiting.setdefault(unit, {})[position] = call
        self._added = []
        self._since = time.monotonic()
        self._window_s = min(_LONGEST_S, max(_WINDOW_S, _WRITES * (self._since - began)))

    def _fitting(self) -> int:
        """How many calls of the buffer one segment takes with their needs."""
        wants = set[str]()
        for number, call in enumerate(self._buffer):
            if call.want:
                wants.add(str(call.want))
            if len(wants) > MOST_WANTS:
                return number
        return len(self._buffer)

    def _items(self, added: list[Submitted]) -> ItemLines:
        wants = Wants(self._stage.spec)
        lines = ItemLines(wants.taken({**call.item, **call.want} for call in added))
        lines.wants = wants.each(len(lines))
        return lines

    def _look(self) -> None:
        """Read new results, and look after the workers."""
        os.stat(self._view.paths.root / "run.json")  # or the run has disappeared
        self._presence.beat()
        gone = None
        if self._workers:
            gone = self._pool.keep()
        self._note_lack()
        pause_s = self._read_results()
        self._tell()
        self._error = gone if self._waiting else None
        self._look_at = time.monotonic() + pause_s

    def _read_results(self) -> float:
        """Give futures what is new; return the seconds until more may be there."""
        waited_s = time.monotonic() - self._since
        pause_s = self._follower.look(self._stage, self._waiting.keys(), waited_s)
        state = self._stage.state
        for name in list(self._waiting):
            unit, left = state.units[name], self._waiting[name]
            if name in state.open and not unit.histories:
                continue
            for position, row in rows_of_unit(self._view, self._stage, unit, left):
                if call := left.pop(position, None):
                    if not left:  # before its future is done: the script may end at once
                        del self._waiting[name]
                    self._settle(call.future, row)
                    self._since = time.monotonic()
        return pause_s

    def _note_lack(self) -> None:
        if self._jobs is not None:
            self._jobs.look(self.run.root, self._since)
        if time.monotonic() < max(self._since, self._noted_at) + _NOTE_S:
            return
        self._noted_at = time.monotonic()
        for one in self._own().status(forecast=False).unmet if may_need(self._stage.spec) else ():
            if str(one["needs"]) not in self._noted:
                self._noted.add(str(one["needs"]))
                note(f"{self.run.root}: {one['text']}; {one['submit'] or 'start a worker with it'}")
        if "" in self._noted or self._jobs or self._workers:
            return
        self._noted.add("")
        if not list_names(self.run.paths.workers):
            root = self.run.root
            start = f"executor.slurm(), 'hpctk work {root}' or 'hpctk submit --run {root}'"
            note(f"{root} waits for workers; start them with {start}")

    def _own(self) -> Run:
        return Run(self._view.paths.root, self.run.manifest)  # a view serves one thread

    def _tell(self) -> None:
        """Update what is shown of the workers while somebody waits."""
        if self._shown.watched and time.monotonic() >= self._more_at:
            import hpc_toolkit.planning.reading  # noqa: F401 - takes longer than a reading

            began = time.monotonic()
            more = one_line(self._own().status()).partition("; ")[2]
            self._shown.more = more if self._jobs is None else self._jobs.line()
            self._more_at = time.monotonic() + max(1.0, _MOST_SHARE * (time.monotonic() - began))

    def _dismiss(self) -> None:
        """Ask workers to exit if all calls are done: they would wait for more, and hold nodes."""
        if self._stage.state.open:
            return
        with suppress(HpcToolkitError, OSError):
            # Before the look for other scripts: one that starts its workers now is seen then.
            names = sorted(reachable_workers(self._view, SystemClock()))
            if not self._presence.is_alone():
                return
            if names and not self._stage.log.sealed:
                ask_to_drain(self._view.paths, names)
            if self._jobs is not None:
                self._jobs.end()

    def _give_up(self) -> None:
        """End the futures that are not done."""
        with self._changed:
            self._closing, self._sealing = True, False
            self._lost = self._error is not None and bool(self._buffer or self._added)
            taken, self._buffer, added, self._added = self._buffer, [], self._added, []
        for call in taken:
            if self._error is None:
                call.future.cancel()
        added += [one for one in taken if one.future.set_running_or_notify_cancel()]
        waiting = [one for some in self._waiting.values() for one in some.values()]
        for call in (*added, *waiting):
            if self._error is None:
                _cancel(call.future)
            else:
                call.future.set_exception(self._error)


def _cancel(future: futures.Future[Any]) -> None:
    """Cancel what ``cancel()`` refuses, because workers may make a call that is written."""
    with future._condition:
        future._state = futures._base.PENDING
    future.cancel()
    future.set_running_or_notify_cancel()


def _serve(wanted: SimpleQueue[Background | None], pool: PoolApart, presence: Presence) -> None:
    """The thread of an executor; it has no reference to one that is idle, which may be dropped."""
    while True:
        with suppress(Empty):
            if (executor := wanted.get(timeout=BEAT_S)) is None:
                break
            if not executor._work():
                return
            del executor
        with suppress(OSError):
            presence.beat()
    presence.leave()
    pool.end(complete=False)


_executors: weakref.WeakSet[Background] = weakref.WeakSet()


def _write_all() -> None:
    """Write all calls; the threads go on, because others may still wait for results."""
    Background._closing = True
    for one in list(_executors):
        while (one._buffer or one._added or one._sealing) and one._thread.is_alive():
            time.sleep(0.001)
        if one._lost:
            sys.stderr.write(f"error: calls are not in the run: {one._error}\n")


def _renew_locks() -> None:
    """In a forked process, make locks that no thread of the parent can hold."""
    for executor in list(_executors):
        executor._changed = threading.Condition()


threading._register_atexit(_write_all)  # type: ignore[attr-defined] # before threads end
os.register_at_fork(after_in_child=_renew_locks)
