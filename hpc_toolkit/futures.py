"""An executor of concurrent.futures whose calls are items of a run: it survives its own process."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import Counter
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar

from hpc_toolkit import calls
from hpc_toolkit.errors import ConfigError, HpcToolkitError, RunError, TryAgainLaterError
from hpc_toolkit.queue.creation import segment_of
from hpc_toolkit.queue.probes import LIMIT_S
from hpc_toolkit.queue.view import Follower
from hpc_toolkit.results.explain import unit_items
from hpc_toolkit.results.gather import rows_of_unit
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.files import is_local, list_names, writing
from hpc_toolkit.worker.apart import PoolApart
from hpc_toolkit.worker.calls import Calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    from hpc_toolkit.queue.items import Item

P = ParamSpec("P")
T = TypeVar("T")

_WINDOW_S, _LONGEST_S = 0.01, 1.0
"""Least and most seconds between the first call that waits to be written and its segment."""
_WRITES = 4  # times the seconds that writing a segment takes, between two of them
_NOTE_S = 10.0  # without a result, after which a lack of workers is reported


class _Call(NamedTuple):
    key: bytes
    item: Item
    future: futures.Future[Any]


class Executor(futures.Executor):
    """An executor like ``concurrent.futures.ProcessPoolExecutor``, on top of a run directory.

    Every call is an item of the run, and its result is in the run before ``result()`` returns it.
    After the loss of this process, a worker or its node, start the same script again: calls that
    are done return their recorded results at once, and the others go on.

    >>> from statistics import fmean
    >>> from hpc_toolkit import Executor
    >>> with Executor("runs/means", workers=2) as executor:
    ...     list(executor.map(fmean, [[1, 2], [3, 5]]))
    [1.5, 4.0]

    Functions, arguments, results and exceptions are anything that cloudpickle takes, and arrive as
    they were. A call is the same if its function has the same code and its arguments are equal; of
    several equal calls, the nth gets the nth result. A function whose code changed runs again.

    Not promised: that a change in an installed package, in a module that the function reaches only
    through another one, or in what a method of an argument does is noticed; an order of calls;
    that a call runs only once (one result counts); latency: a second on a shared filesystem.
    """

    _closing = False  # of the class: whether the interpreter ends

    def __init__(
        self,
        run: str | Path,
        workers: int | None = None,
        *,
        max_workers: int | None = None,
        on_change: Literal["rerun", "keep", "error"] = "rerun",
        seal: bool = False,
        max_attempts: int = 3,
        timeout_s: float | None = None,
        no_retry: str | None = None,
        max_failures: str | None = None,
        items_per_claim: int | None = None,
    ) -> None:
        """Create the run directory, or open it to continue.

        Args:
            run: the directory of this script's calls; nodes with workers must see it.
            workers: worker processes on this machine; None or 0: workers are started elsewhere,
                by ``hpctk work RUN`` in a job or :func:`hpc_toolkit.notebook.submit_workers`.
            max_workers: another name of ``workers``, which other executors have.
            on_change: what happens to calls that are done if the code of their function changed
                since: they run again; they keep their results; or :meth:`submit` raises.
            seal: let :meth:`shutdown` seal the run, so that also workers which start later exit at
                once; no call can be added afterwards. Without it, :meth:`shutdown` asks the
                workers that live to exit if all calls are done.
            max_attempts, timeout_s, no_retry, max_failures, items_per_claim: of calls, as
                :meth:`hpc_toolkit.Run.create` has them of items.

        Raises ConfigError: an argument is not valid, or the run was created with others; RunError:
        the directory is something else, or others could change what it executes.
        """
        if Calls.importing:
            # A call that fails shows no hint of its cause.
            what = f"{run}: a worker imports this script, which creates the executor again"
            raise RunError(f"{what}; put what it does below if __name__ == '__main__':")
        self._workers = calls.number_of(workers, max_workers)
        settings = {"max_attempts": max_attempts, "timeout_s": timeout_s, "no_retry": no_retry}
        settings |= {"max_failures": max_failures, "items_per_claim": items_per_claim}
        self.run = calls.open_run(Path(run), **settings)
        """The run with the calls, for ``status()``, ``results()`` and ``retry()``."""
        # Views serve one thread; the current directory may change.
        own = Run(self.run.root.absolute(), self.run.manifest)
        self._view, self._seal = own.view, seal
        (self._stage,) = own.view.stages.values()
        self._caller = calls.Caller(own.paths.calls)
        self._recorded = calls.Recorded(own, on_change, self.run.root)
        self._places: dict[bytes, tuple[str, int]] = {}
        self._entries = 0
        self._find_places(only=self._stage.state.open)
        local = is_local(own.root)
        self._view.probes.limit_s = None if local else LIMIT_S
        self._follower = Follower(self._view, local=local)
        self._changed = threading.Condition()
        self._repeats: Counter[bytes] = Counter()
        self._buffer: list[_Call] = []
        self._added: list[_Call] = []
        self._waiting: dict[str, dict[int, _Call]] = {}
        self._sealing = self._stopping = self._noted = self._lost = False
        self._error: HpcToolkitError | None = None
        self._window_s = _WINDOW_S
        self._look_at = self._since = 0.0
        self._pool = PoolApart(own.root, self._workers)
        self._idle, self._wanted = True, SimpleQueue[Executor | None]()
        self._thread = threading.Thread(target=_serve, args=(self._wanted, self._pool), daemon=True)
        self._thread.start()
        _executors.add(self)
        weakref.finalize(self, self._wanted.put, None).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> futures.Future[T]:
        """Schedule ``fn(*args, **kwargs)``; the future's ``result()`` raises CallError if it fails.

        Calls that are submitted within a moment are written together. A future can be cancelled
        until its call is written, after about 10 ms. Then any worker may claim it, so it runs.

        Raises ConfigError: the function or an argument cannot be pickled, or the function changed
        and ``on_change="error"``; RunError: the run is sealed and does not have this call, or
        cannot be written; RuntimeError: after shutdown.
        """
        future: futures.Future[T] = futures.Future()
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._closing or not self._thread.is_alive():
                message = "cannot schedule new futures after shutdown, or in a forked process"
                raise RuntimeError(message)
            function, given, named = calls.unfold(fn, args, kwargs)
            made = self._caller.call(function, given, named)
            item = made.item
            key = self._recorded.key(item)
            if repeat := self._repeats[key]:
                item["repeat"] = repeat
            call = _Call(self._recorded.key(item) if repeat else key, item, future)
            row = self._recorded.rows.get(call.key)
            is_new = row is None and call.key not in self._places
            if is_new:
                self._recorded.notice(made)
            if is_new and self._stage.log.sealed:
                message = f"{self.run.root} is sealed, and does not have {calls.shown(item)}"
                hint = "use another directory; with seal=False a run stays open for more calls"
                raise RunError(message, hint=hint)
            if is_new and made.parts:
                with writing(self.run.root):
                    self._caller.store(made)
            self._repeats[key] += 1
            if row is None:
                self._buffer.append(call)
                self._wake()
        if row is not None:
            calls.settle(future, row, self.run.values)
        return future

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """Return the results of ``map(fn, *iterables)``, in order, as they are available.

        All calls are submitted at once. Taking the result of a call that failed raises CallError.
        ``timeout``: seconds from now, after which TimeoutError is raised. ``chunksize`` changes
        nothing: units of several calls are made anyway. ConfigError: it is less than 1.
        """
        if chunksize < 1:
            raise ConfigError(f"chunksize must be at least 1, got {chunksize}")
        columns = list(zip(*zip(*iterables, strict=False), strict=True))
        with self._changed, self._caller.mapping():  # so that all calls are in one segment
            return super().map(fn, *columns, timeout=timeout)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Seal the run, unless ``seal=False``, and wait until all submitted calls are done.

        ``wait=False`` returns at once; local workers go on until then or until this process ends.
        ``cancel_futures``, which is also the end of a ``with`` block by an exception, stops: it
        seals nothing, local workers exit after their current call, and futures that are not done
        are cancelled or raise TryAgainLaterError; the same script continues calls that are written.
        """
        with self._changed:
            self._closing, self._sealing = True, self._seal
            self._stopping |= cancel_futures
            self._wake()
        if wait:
            self._thread.join()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self.shutdown(cancel_futures=kind is not None)
        return None

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
                self._give_up()
                if self._error is None and not (self._stopping or self._stage.log.sealed):
                    self._dismiss()
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
            taken = self._added = self._buffer
            self._buffer = []
        self._added = added = [one for one in taken if one.future.set_running_or_notify_cancel()]
        while True:
            self._stage.poll_log()
            self._find_places()
            new = [call.item for call in added if call.key not in self._places]
            self._caller.sync()
            if not new or self._stage.log.add_segment(segment_of(new, self._stage.spec)):
                break
        self._stage.poll_log()
        self._find_places()
        for call in added:
            unit, position = self._places.pop(call.key)
            self._waiting.setdefault(unit, {})[position] = call
        self._added = []
        self._since = time.monotonic()
        self._window_s = min(_LONGEST_S, max(_WINDOW_S, _WRITES * (self._since - began)))

    def _find_places(self, only: Iterable[str] | None = None) -> None:
        """Find the units of calls in segments that were added, also by other processes."""
        for entry, segment in self._stage.log.segments.items():
            if entry > self._entries:
                for unit in segment.units:
                    if only is None or unit.name in only:
                        items = unit_items(self._stage, unit)
                        for position, item in zip(unit.items, items, strict=True):
                            self._places[self._recorded.key(item)] = unit.name, position
        self._entries = self._stage.log.length

    def _look(self) -> None:
        """Read new results, and look after the workers."""
        os.stat(self._view.paths.root / "run.json")  # or the run has disappeared
        gone = None
        if self._workers:
            gone = self._pool.keep()
        else:
            self._note_lack()
        waited_s = time.monotonic() - self._since
        pause_s = self._follower.look(self._stage, self._waiting.keys(), waited_s)
        state = self._stage.state
        for name in list(self._waiting):
            unit, left = state.units[name], self._waiting[name]
            if name in state.open and not unit.histories:
                continue
            for position, row in rows_of_unit(self._view, self._stage, unit, left):
                if position in left:
                    calls.settle(left.pop(position).future, row, self.run.values)
                    self._since = time.monotonic()
            if not left:
                del self._waiting[name]
        self._error = gone if self._waiting else None
        self._look_at = time.monotonic() + pause_s

    def _note_lack(self) -> None:
        if self._noted or time.monotonic() < self._since + _NOTE_S:
            return
        self._noted = True
        if not list_names(self.run.paths.workers):
            root = self.run.root
            start = f"'hpctk work {root}' or 'hpctk submit --run {root}'"
            sys.stderr.write(f"note: {root} waits for workers; start them with {start}\n")

    def _dismiss(self) -> None:
        """Ask workers to exit if all calls are done: they would wait for more, and hold nodes."""
        states = self._stage.state.units
        if not any(self._stage.state.pending(name) for name in states):
            with suppress(HpcToolkitError, OSError):
                Run(self._view.paths.root, self.run.manifest).drain()

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
            message = f"{calls.shown(call.item)} is not done: the executor was shut down"
            stopped = TryAgainLaterError(message, hint="start the script again: it continues")
            call.future.set_exception(self._error or stopped)


def _serve(wanted: SimpleQueue[Executor | None], pool: PoolApart) -> None:
    """The thread of an executor; it has no reference to one that is idle, which may be dropped."""
    while (executor := wanted.get()) is not None:
        if not executor._work():
            return
        del executor
    pool.end(complete=False)


_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


def _write_all() -> None:
    """Write all calls; the threads go on, because others may still wait for results."""
    Executor._closing = True
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
