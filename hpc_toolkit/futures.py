"""An executor of concurrent.futures whose calls are items of a run: it survives its own process."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from hpc_toolkit.errors import CallError, ConfigError, HpcToolkitError, RunError, TryAgainLaterError
from hpc_toolkit.queue.creation import segment_of
from hpc_toolkit.queue.items import canonical
from hpc_toolkit.queue.probes import LIMIT_S
from hpc_toolkit.queue.view import Follower
from hpc_toolkit.results.explain import unit_items
from hpc_toolkit.results.gather import rows_of_unit
from hpc_toolkit.run import MAX_WORKERS, Run, create_run
from hpc_toolkit.rundir.files import is_local, list_names, writing
from hpc_toolkit.rundir.layout import check_trust, list_stage
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.worker import calls
from hpc_toolkit.worker.apart import PoolApart
from hpc_toolkit.worker.loading import new_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    from hpc_toolkit.queue.items import Item
    from hpc_toolkit.results.tables import Row

P = ParamSpec("P")
T = TypeVar("T")

_WINDOW_S = 0.01
"""Least seconds between the first call that waits to be written and the segment with it."""
_LONGEST_S = 1.0
"""Most seconds of that kind."""
_WRITES = 4
"""Between two segments pass this many times the seconds that writing one takes."""
_NOTE_S = 10.0
"""Seconds without a result after which a lack of workers is reported."""


class _Call(NamedTuple):
    key: bytes
    item: Item
    future: futures.Future[Any]


class Executor(futures.Executor):
    """An executor like ``concurrent.futures.ProcessPoolExecutor``, on top of a run directory.

    Every call is an item of the run, and its result is in the run before ``result()`` returns it.
    If this process, a worker or its node is lost, start the same script again: calls that are done
    return their recorded results at once, and the others go on.

    >>> from statistics import fmean
    >>> from hpc_toolkit import Executor
    >>> with Executor("runs/means", workers=2) as executor:
    ...     list(executor.map(fmean, [[1, 2], [3, 5]]))
    [1.5, 4.0]

    Functions must be importable by name, arguments must be JSON, and results are returned as JSON
    gives them: a tuple as a list. The nth of several equal calls gets the nth result.

    Not promised: that a changed function runs again (use another directory), the order in which
    calls run, that a call runs only once (a worker may be lost before its result is written, but
    one result counts), and latency: on a shared filesystem a call takes a second or more.
    """

    def __init__(
        self,
        run: str | Path,
        workers: int | None = None,
        *,
        seal: bool = True,
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
            seal: let :meth:`shutdown` seal the run, so that workers elsewhere exit when all calls
                are done; no call can be added afterwards.
            max_attempts: exceptions after which a call has failed.
            timeout_s: seconds that one call may take.
            no_retry: ``timeout``: a call that exceeds ``timeout_s`` fails for good.
            max_failures: pause the run if more calls than this fail, ``N`` or ``P%``.
            items_per_claim: calls that a worker claims at once; by default fewer towards the end.

        Raises ConfigError: an argument is not valid, or the run was created with others; RunError:
        the directory is something else, or others could change what it executes.
        """
        if calls.Calls.importing:
            # A call that fails shows no hint of its cause.
            what = f"{run}: a worker imports this script, which creates the executor again"
            message = f"{what}; put what it does below if __name__ == '__main__':"
            raise RunError(message)
        self._workers = workers or 0
        if not 0 <= self._workers <= MAX_WORKERS:
            message = f"workers must be 0 to {MAX_WORKERS}, got {workers}"
            raise ConfigError(message, hint="use one per core, or one per GPU")
        self.run = _open_run(
            Path(run),
            max_attempts=max_attempts,
            timeout_s=timeout_s,
            no_retry=no_retry,
            max_failures=max_failures,
            items_per_claim=items_per_claim,
        )
        """The run with the calls, for ``status()``, ``results()`` and ``retry()``."""
        own = Run(self.run.root, self.run.manifest)  # views serve one thread
        self._view, self._seal = own.view, seal
        self._stage = self._view.stages[own.manifest.stages[0].name]
        self._path = self._stage.spec.workload.path
        self._recorded = {canonical(row["item"]): row for row in own.results(partial=True)}
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
        self._closing = self._stopping = self._noted = False
        self._error: HpcToolkitError | None = None
        self._window_s, self._look_at, self._since = _WINDOW_S, 0.0, 0.0
        self._pool = PoolApart(self.run.root, self._workers)
        self._thread = threading.Thread(target=self._serve, name=f"hpctk {run}", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> futures.Future[T]:
        """Schedule ``fn(*args, **kwargs)``; the future's ``result()`` raises CallError if it fails.

        Calls that are submitted within a moment are written together. A future can be cancelled
        until its call is written, which takes about 10 ms; from then on it counts as running,
        because any worker may claim the call.

        Raises ConfigError: workers cannot import the function, or an argument is not JSON;
        RunError: the run is sealed and does not have this call; RuntimeError: after shutdown.
        """
        item = calls.item_of(calls.name_of(fn, self._path), args, kwargs)
        key = canonical(item)
        future: futures.Future[T] = futures.Future()
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._closing:
                message = "cannot schedule new futures after shutdown"
                raise RuntimeError(message)
            if repeat := self._repeats[key]:
                item["repeat"] = repeat
            call = _Call(canonical(item) if repeat else key, item, future)
            row = self._recorded.get(call.key)
            if row is None and self._stage.log.sealed and call.key not in self._places:
                message = f"{self.run.root} is sealed, and does not have {calls.shown(item)}"
                hint = "use another directory; with seal=False a run stays open for more calls"
                raise RunError(message, hint=hint)
            self._repeats[key] += 1
            if row is None:
                self._buffer.append(call)
                self._changed.notify()
        if row is not None:
            self._settle(call, row)
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
        ``timeout``: seconds from now, after which TimeoutError is raised. ``chunksize`` is ignored:
        units of several calls are made anyway.
        """
        columns = list(zip(*zip(*iterables, strict=False), strict=True))
        with self._changed:  # so that all calls are in one segment
            return super().map(fn, *columns, timeout=timeout)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Seal the run, unless ``seal=False``, and wait until all submitted calls are done.

        ``wait=False`` returns at once; local workers go on until then or until this process ends.

        ``cancel_futures``, which is also the end of a ``with`` block by an exception, stops: it
        seals nothing, local workers exit after their current call, and futures that are not done
        are cancelled or raise TryAgainLaterError. Calls that were written stay in the run; the
        same script continues them.
        """
        with self._changed:
            self._closing = True
            self._stopping |= cancel_futures
            self._changed.notify()
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

    def _serve(self) -> None:
        """The thread that writes calls, starts workers and reads results."""
        try:
            with writing(self.run.root):
                while self._step():
                    pass
        except HpcToolkitError as error:
            self._error = error
        except BaseException as error:
            self._error = HpcToolkitError(
                f"{type(error).__name__}: {error}", hint="report this bug"
            )
            raise
        finally:
            self._give_up()
            self._pool.end(complete=self._stage.complete)

    def _step(self) -> bool:
        """Write or look once; False at the end."""
        with self._changed:
            if not (self._buffer or self._stopping or (self._closing and not self._waiting)):
                pause_s = max(0.0, self._look_at - time.monotonic()) if self._waiting else None
                self._changed.wait(pause_s)
            if self._buffer:  # more calls may follow at once, and belong to the same segment
                self._changed.wait_for(lambda: self._closing, self._window_s)
            closing = self._closing
        if self._stopping:
            return False
        if self._buffer:
            self._write()
        if closing and self._seal and not self._stage.log.sealed:
            self._stage.log.seal()
        if self._waiting and time.monotonic() >= self._look_at:
            self._look()
        return self._error is None and bool(self._buffer or self._waiting or not closing)

    def _write(self) -> None:
        """Add the calls in the buffer to the run, as one segment, unless it has them."""
        began = time.monotonic()
        with self._changed:
            taken, self._buffer = self._buffer, []
        self._added = added = [one for one in taken if one.future.set_running_or_notify_cancel()]
        while True:
            self._stage.poll_log()
            self._find_places()
            new = [call.item for call in added if call.key not in self._places]
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
                            self._places[canonical(item)] = unit.name, position
        self._entries = self._stage.log.length

    def _look(self) -> None:
        """Read new results, and look after the workers."""
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
                    self._settle(left.pop(position), row)
                    self._since = time.monotonic()
            if not left:
                del self._waiting[name]
        self._error = gone if self._waiting else None
        self._look_at = time.monotonic() + pause_s

    def _settle(self, call: _Call, row: Row) -> None:
        if row["state"] == "done":
            call.future.set_result(calls.returned_by(row["value"]))
            return
        item, error, attempts = row["item"], row["error"], row["attempts"]
        root, after = self.run.root, f"after {counted(attempts, 'attempt')}"
        again = f"fix the cause, 'hpctk retry {root}', and start the script again"
        failure = CallError(
            f"{calls.shown(item)} failed {after}: {error}",
            hint=f"'hpctk status {root}' shows where; {again}",
            item=item,
            error=error,
            attempts=attempts,
        )
        call.future.set_exception(failure)

    def _note_lack(self) -> None:
        if self._noted or time.monotonic() < self._since + _NOTE_S:
            return
        self._noted = True
        if not list_names(self.run.paths.workers):
            root = self.run.root
            start = f"'hpctk work {root}' or 'hpctk submit --run {root}'"
            sys.stderr.write(f"note: {root} waits for workers; start them with {start}\n")

    def _give_up(self) -> None:
        """End the futures that are not done."""
        with self._changed:
            self._closing = True
            taken, self._buffer = self._buffer, []
        for call in taken:
            call.future.cancel()
            call.future.set_running_or_notify_cancel()
        waiting = [one for some in self._waiting.values() for one in some.values()]
        for call in (*self._added, *waiting):
            message = f"{calls.shown(call.item)} is not done: the executor was shut down"
            stopped = TryAgainLaterError(message, hint="start the script again: it continues")
            call.future.set_exception(self._error or stopped)


def _open_run(root: Path, **settings: Any) -> Run:
    """Open the run of an executor, or create it."""
    stage = list_stage(workload=calls.WORKLOAD, **settings)
    stage = replace(stage, workload=replace(stage.workload, path=calls.code_path()))
    if not root.exists():
        manifest = new_manifest(root, stage)
        manifest.provenance["argv"] = sys.argv
        try:
            return create_run(root, manifest, {}, sealed=False)
        except RunError:
            if not root.exists():
                raise  # else another process was faster
    run = Run.open(root)
    if warning := check_trust(root):
        sys.stderr.write(f"warning: {warning}\n")
    if changed := run.manifest.stages[0].differences(stage):
        message = f"{root} was created with other {' and '.join(changed)}"
        raise ConfigError(message, hint="use another directory, or the arguments of its creation")
    return run
