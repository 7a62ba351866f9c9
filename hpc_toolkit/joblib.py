"""A backend of joblib whose calls are items of a run; importing this module registers it."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections import Counter
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import cache
from typing import Any

from joblib import cpu_count, parallel_config, register_parallel_backend
from joblib import parallel as parts

from hpc_toolkit import calls
from hpc_toolkit.errors import CallError, ConfigError, HpcToolkitError
from hpc_toolkit.futures import Executor
from hpc_toolkit.rundir.values import pointer
from hpc_toolkit.system.terminal import note
from hpc_toolkit.worker.calls import FUNCTION

_LARGE = 1 << 20
"""Bytes of an argument that is taken as unchanged during a call of joblib, as loky does."""


class HpctkBackend(parts.AutoBatchingMixin, parts.ParallelBackendBase):  # type: ignore[misc] # Any
    """Runs calls as items of a run, one by one: the sizes of batches follow from durations.

    Not promised: that running calls end at once when another one fails; ``initializer``.
    """

    supports_retrieve_callback = supports_inner_max_num_threads = True
    default_n_jobs = -1
    MIN_IDEAL_BATCH_DURATION, MAX_IDEAL_BATCH_DURATION = 4.0, 16.0  # results take up to 2 s

    def __init__(self, **settings: Any) -> None:
        """Keep the settings, which ``parallel_config`` passes on.

        ``run``: the directory; ``workers``: of this machine, by default ``n_jobs``, and 0 if they
        are started elsewhere; ``slurm``: arguments of :meth:`hpc_toolkit.Executor.slurm`, whose
        workers then take the place of local ones; others as for :class:`hpc_toolkit.Executor`, but
        ``max_attempts=1``.
        """
        names = ("nesting_level", "inner_max_num_threads")  # of joblib's
        super().__init__(**{name: settings.pop(name, None) for name in names})
        self._settings = {"max_attempts": 1, **settings}
        self._workers: _Calls | None = None
        self._users = 0

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        given = self.default_n_jobs if n_jobs is None else n_jobs
        return 1 if self.nesting_level else given if given > 0 else max(cpu_count() + 1 + given, 1)

    def configure(self, n_jobs: int = 1, parallel: Any = None, prefer: Any = None, **_: Any) -> int:
        """Raises FallbackToBackend: joblib shall use threads, or this process; as Executor does."""
        number, level = self.effective_n_jobs(n_jobs), self.nesting_level
        local = 0 if "slurm" in self._settings else number
        settings = {"workers": local, **self._settings}
        if number == 1:
            if not level:
                _note_once("joblib makes calls here, and records none of them, if n_jobs is 1")
            raise parts.FallbackToBackend(parts.SequentialBackend(nesting_level=level))
        if prefer == "threads":
            if settings["workers"] != number:
                parallel.n_jobs = min(number, cpu_count())
            raise parts.FallbackToBackend(parts.ThreadingBackend(nesting_level=level))
        if "run" not in settings:
            message = "the backend hpctk of joblib needs the directory of a run"
            raise ConfigError(message, hint='parallel_config(backend="hpctk", run="runs/NAME")')
        environ = self._prepare_worker_env(n_jobs=max(settings["workers"], 1))
        environ["LOKY_MAX_CPU_COUNT"] = str(max(cpu_count() // max(settings["workers"], 1), 1))
        self.parallel, self._made_with = parallel, (environ, settings)
        return number

    def start_call(self) -> None:
        now = self._workers
        if now is None or now._closing or (not self._users and now.made_with != self._made_with):
            if now is not None:
                now.shutdown()
            now = self._workers = _Calls(*self._made_with)
            # When joblib drops this backend, workers elsewhere are asked to exit as well.
            weakref.finalize(self, now.shutdown, wait=False).atexit = False
        if not self._users:
            now.begin()
        self._users += 1

    def stop_call(self) -> None:
        self._users -= 1  # the workers stay for the next call of joblib

    def submit(self, func: Any, callback: Any) -> Future[Any]:
        assert self._workers is not None
        batch = _Batch(self._workers, func.items)
        # joblib submits the next batch in the callback, and its calls may be done at once.
        thread = threading.Thread(target=callback, args=(batch,), daemon=True)
        batch.add_done_callback(lambda _: thread.start())
        return batch

    retrieve_result_callback = staticmethod(Future.result)

    terminate = parts.AutoBatchingMixin.reset_batch_stats

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Let local workers end after their current call; written calls stay in the run."""
        if self._workers is not None and self._users == 1:
            self._workers.abort(again=not self.parallel.return_generator)


class _Task:
    """A function as workers call it: what it runs in parallel runs in threads, one level deep."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with parallel_config(backend=parts.ThreadingBackend(nesting_level=1), n_jobs=None):
            return self.function(*args, **kwargs)


class _How(calls._Function):
    """A function is known by its own code, and workers get its task."""

    def __init__(self, task: _Task) -> None:
        super().__init__(task.function)
        self.is_imported, self.task = False, task
        self.same.setdefault(FUNCTION, "")


class _Caller(calls.Caller):
    """Looks at functions and large arguments once in each call of joblib, as joblib does."""

    def begin(self) -> None:
        # Both refer to the objects, whose ids cannot become those of others.
        self._known: dict[int, _How] = {}
        self._large: dict[int, tuple[Any, ...]] = {}

    def _how(self, function: _Task) -> _How:
        at = id(function.function)
        self._known[at] = found = self._known.get(at) or _How(function)
        return found

    def call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> calls.Call:
        given: dict[str, Any] = {"args": [*args], "kwargs": _without_moment(kwargs)}
        places = [("args", at) for at in range(len(args))] + [("kwargs", at) for at in kwargs]
        large = [(some, at, given[some][at]) for some, at in places if _is_large(given[some][at])]
        for some, at, _ in large:
            given[some][at] = None
        self.made = made = super().call(function, given["args"], given["kwargs"])
        for some, at, value in large:
            place = f"/{some}{pointer(str(at))}"
            if known := self._large.get(id(value)):
                _, made.item[some][at], made.types[place], made.same[place] = known
                # It has a length once it is stored.
                made.parts += [] if made.types[place][2] else [(place, value)]
            else:
                made.item[some][at] = form = made.form(place, value)
                if isinstance(tag := made.types.get(place), list):
                    self._large[id(value)] = value, form, tag, made.same.get(place)
        return made


def _is_large(value: Any) -> bool:
    with suppress(Exception):  # of methods of the user
        sizes = [getattr(one, "nbytes", 0) for one in (value, getattr(value, "data", None))]
        return max(*sizes, sys.getsizeof(value)) >= _LARGE
    return False


def _without_moment(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without a context of scikit-learn's callbacks, which has times, if it has no callbacks."""
    unused = getattr(kwargs.get("callback_ctx"), "_callbacks", None) == []
    names = {"callback_ctx", "caller"} & kwargs.keys() if unused else ()
    return {**kwargs, **dict.fromkeys(names)}


class _Calls(Executor):
    """The executor of a backend."""

    def __init__(self, environ: dict[str, str], settings: dict[str, Any]) -> None:
        self.made_with = environ, settings
        for one in [*_all]:  # of which one that ends may ask workers of the run to exit
            if one._closing and one.made_with[1]["run"] == settings["run"]:
                one.shutdown()
        super().__init__(**{key: one for key, one in settings.items() if key != "slurm"})
        if "slurm" in settings:
            self.slurm(**settings["slurm"])
        self._caller: _Caller = _Caller(self._caller._file.parent)
        self._pool.environ = environ
        self._repeats = _positions.setdefault(self.run.root.absolute(), Counter())
        _all.add(self)

    def begin(self) -> None:
        self._caller.begin()
        self._before, self._failed = Counter(self._repeats), Counter[bytes]()

    def call(self, function: Any, args: Any, kwargs: Any) -> Future[Any]:
        function, args, kwargs = calls.unfold(function, args, kwargs)
        with self._changed:
            future = self.submit(_Task(function), *args, **kwargs)
            item = {**self._caller.made.item}
        number = item.pop("repeat", 0) + 1
        vars(future)["position"] = Counter({self._recorded.key(item): number})
        return future

    def abort(self, *, again: bool) -> None:
        """Stop; ``again``: calls that did not fail are the same if the script makes them again."""
        self.shutdown(wait=False, cancel_futures=True)
        if again:
            self._repeats.clear()
            self._repeats.update(self._before | self._failed)


class _Batch(Future[list[Any]]):
    """The results of some calls, or the first exception of one."""

    def __init__(self, executor: _Calls, items: list[tuple[Any, Any, Any]]) -> None:
        super().__init__()
        self._executor, self._left, self._counting = executor, len(items), threading.Lock()
        self._calls: list[Future[Any]] = []
        try:
            self._calls += [executor.call(*item) for item in items]
        except Exception as error:  # noqa: BLE001 - joblib expects it in the future
            self.set_exception(error)
        for one in self._calls:
            one.add_done_callback(self._ended)

    def _ended(self, call: Any) -> None:
        error = CancelledError() if call.cancelled() else call.exception()
        is_of_call = isinstance(error, CallError)
        with self._counting:
            self._left -= 1
            if not isinstance(error, HpcToolkitError | CancelledError | None) or is_of_call:
                self._executor._failed |= call.position
            if error is not None and not self.done():
                self.set_exception(error)
            elif not self._left and not self.done():
                self.set_result([one.result() for one in self._calls])


@atexit.register
def _close() -> None:
    for one in [*_all]:
        one.shutdown(cancel_futures=bool(one._waiting))


_all: weakref.WeakSet[_Calls] = weakref.WeakSet()
_note_once = cache(note)
_positions: dict[Any, Counter[bytes]] = {}
register_parallel_backend("hpctk", HpctkBackend)
