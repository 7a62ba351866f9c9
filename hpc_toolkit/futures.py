"""An executor of concurrent.futures whose calls are items of a run: it survives its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack

from hpc_toolkit import calls
from hpc_toolkit.background import Background, Submitted
from hpc_toolkit.errors import ConfigError, ItemsError, RunError
from hpc_toolkit.queue.wants import NEEDS, PRIORITY, Wants, may_need
from hpc_toolkit.report.terminal import Waiting
from hpc_toolkit.rundir.files import writing
from hpc_toolkit.worker.calls import Calls

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.submit import RunJob
    from hpc_toolkit.workerjobs import Resources

P = ParamSpec("P")
T = TypeVar("T")


class _Future(futures.Future[T]):
    """A future that shows the progress of all calls while somebody waits for it."""

    def __init__(self, shown: Waiting) -> None:
        super().__init__()
        self._shown = shown

    def result(self, timeout: float | None = None) -> T:
        return super().result(self._shown.watch(self, timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._shown.watch(self, timeout))


class Executor(Background):
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
        needs: Mapping[str, Any] | None = None,
        retry: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the run directory, or open it to continue.

        Args:
            run: the directory of this script's calls; nodes with workers must see it.
            workers: worker processes on this machine; None or 0: workers are started elsewhere,
                by :meth:`slurm`, or by ``hpctk work RUN`` in a job.
            max_workers: another name of ``workers``, which other executors have.
            on_change: what happens to calls that are done if the code of their function changed
                since: they run again; they keep their results; or :meth:`submit` raises.
            seal: let :meth:`shutdown` seal the run, so that also workers which start later exit at
                once; no call can be added afterwards. Without it, :meth:`shutdown` asks the
                workers that live to exit if all calls are done.
            max_attempts, timeout_s, no_retry, max_failures, items_per_claim, needs, retry: of
                calls, as :meth:`hpc_toolkit.Run.create` has them of items.

        Raises ConfigError: an argument is not valid, or the run was created with others; RunError:
        the directory is something else, or others could change what it executes.
        """
        if Calls.importing:
            # A call that fails shows no hint of its cause.
            what = f"{run}: a worker imports this script, which creates the executor again"
            raise RunError(f"{what}; put what it does below if __name__ == '__main__':")
        local = calls.number_of(workers, max_workers)
        settings: dict[str, Any] = {"max_attempts": max_attempts, "timeout_s": timeout_s}
        settings |= {"no_retry": no_retry, "max_failures": max_failures, "retry": retry}
        settings |= {"items_per_claim": items_per_claim, "needs": needs}
        opened = calls.open_run(Path(run), **settings)
        super().__init__(opened, local, on_change, seal=seal)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> futures.Future[T]:
        """Schedule ``fn(*args, **kwargs)``; the future's ``result()`` raises CallError if it fails.

        Calls that are submitted within a moment are written together. A future can be cancelled
        until its call is written, after about 10 ms. Then any worker may claim it, so it runs.

        Raises ConfigError: the function or an argument cannot be pickled, or the function changed
        and ``on_change="error"``; RunError: the run is sealed and does not have this call, or
        cannot be written; RuntimeError: after shutdown.
        """
        return self._submit({}, fn, args, kwargs)

    def _submit(
        self, want: dict[str, Any], fn: Callable[..., T], args: Any, kwargs: Any
    ) -> futures.Future[T]:
        future = _Future[T](self._shown)
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._closing or not self._thread.is_alive():
                message = "cannot schedule new futures after shutdown, or in a forked process"
                raise RuntimeError(message)
            made = self._caller.call(*calls.unfold(fn, args, kwargs))
            first = self._recorded.key(made.item)
            if repeat := self._repeats[first]:
                made.item["repeat"] = repeat
            key = self._recorded.key(made.item) if repeat else first
            row = self._recorded.rows.get(key)
            if row is None:
                if key not in self._recorded.places:
                    self._add(key, made)
                self._buffer.append(Submitted(key, made.item, future, want))
            if self._recorded.replaces(made.item) or row is None:
                self._wake()
            self._repeats[first] += 1
            self._shown.total += 1
        if row is not None:
            self._settle(future, row)
        elif self._jobs is not None:
            self._jobs.send()
        return future

    def _add(self, key: bytes, made: calls.Call) -> None:
        """Store what the item of a new call does not have in it."""
        self._recorded.notice(made)
        if self._stage.log.sealed:
            message = f"{self.run.root} is sealed, and does not have {calls.shown(made.item)}"
            hint = "use another directory; with seal=False a run stays open for more calls"
            raise RunError(message, hint=hint)
        if key in self._recorded.withdrawn:
            made.item["stored"]["again"] = self._recorded.withdrawn[key]
        if made.parts:
            with writing(self.run.root):
                self._caller.store(made)

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
        found: Iterator[T] = self._map(super().map, fn, iterables, timeout, chunksize)
        return found

    def _map(
        self, submit_all: Any, fn: Any, iterables: Any, timeout: float | None, chunksize: int
    ) -> Any:
        if chunksize < 1:
            raise ConfigError(f"chunksize must be at least 1, got {chunksize}")
        # Before the lock: an iterable may wait for the result of another call.
        columns = list(zip(*zip(*iterables, strict=False), strict=True))
        with self._changed, self._caller.mapping():  # so that all calls are in one segment
            return submit_all(fn, *columns, timeout=timeout)

    def with_needs(self, *, priority: int = 0, **needs: Any) -> futures.Executor:
        """Return an executor of the same run, each of whose calls has needs of its own.

        ``executor.with_needs(gpus=1, memory="40G").submit(train, 3)``. They replace those of the
        executor, name by name. Workers claim only calls that they can hold, those of a larger
        ``priority`` first. An equal call that the run has keeps the needs that it has there.

        Raises ItemsError: a need is not valid; ConfigError: the executor has no needs and no retry.
        """
        if not may_need(self._stage.spec):
            hint = "create its run with needs, such as Executor(RUN, needs={'cpus': 1})"
            raise ConfigError("workers do not know that calls may have needs", hint=hint)
        want = {NEEDS: needs, PRIORITY: priority}
        try:
            list(Wants(self._stage.spec).taken([want]))  # refuses what a worker cannot fulfil
        except ItemsError as error:
            raise ItemsError(error.message.removeprefix("item 0: "), hint=error.hint) from None
        return _WithNeeds(self, want)

    def slurm(
        self,
        n: int | None = None,
        *,
        cluster: str | Cluster | None = None,
        again: bool = False,
        **resources: Unpack[Resources],
    ) -> list[RunJob]:
        """Let workers in Slurm jobs make the calls, and return the jobs: ``job`` is the id of each.

        Args:
            n: workers of the job; None: as many as ``nodes`` have, one per GPU, else one per node.
            cluster: a name of ``hpctk cluster list``, the path of a TOML file, or the facts
                themselves; None: ``$HPCTK_CLUSTER``, else the cluster that is recognized here.
            again: submit one more job than there are, for each call of this method with it.
            resources: named as in ``hpctk render``, see :class:`hpc_toolkit.workerjobs.Resources`;
                ``nodes`` follows from ``n`` if it is left out.

        The request is checked at once. The jobs are submitted at once, or with the first call that
        has no result yet if the run has results. Jobs of an equal request that wait or run, also
        those of a script that was killed, are found again instead. The end of the executor asks its
        workers to exit and cancels jobs that have not started; after an exception, and if this
        process is killed, they go on.

        Raises ConfigError, RenderError: no job can be like this; RunError: the run is paused;
        SlurmError: Slurm refused the job, which :meth:`submit` raises as well.
        """
        from hpc_toolkit.workerjobs import CallJobs

        with self._changed:
            jobs = self._jobs = self._jobs or CallJobs(self._own())
            found = jobs.want(n, cluster, resources, again=again)
            if self._waiting or self._buffer or self._recorded.places or not self._recorded.rows:
                jobs.send()
        return found

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Seal the run, unless ``seal=False``, and wait until all submitted calls are done.

        ``wait=False`` returns at once; local workers go on until then or until this process ends.
        ``cancel_futures``, which is also the end of a ``with`` block by an exception, stops: it
        seals nothing, local workers exit after their current call, whose result counts, and futures
        that are not done are cancelled; the same script continues calls that are written.
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


class _WithNeeds(futures.Executor):
    """Makes calls with needs by an :class:`Executor`, which shuts down by itself."""

    def __init__(self, executor: Executor, want: dict[str, Any]) -> None:
        self._executor, self._want = executor, want

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> futures.Future[T]:
        return self._executor._submit(self._want, fn, args, kwargs)

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        found: Iterator[T] = self._executor._map(super().map, fn, iterables, timeout, chunksize)
        return found
