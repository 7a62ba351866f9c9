"""The driver of a run's actors: keeps the requested number running while items are left."""

from __future__ import annotations

import math
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.engines.ray.cluster import joined
from hpc_toolkit.engines.ray.rank import Order
from hpc_toolkit.engines.ray.settings import check_room, demand_of, room
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.run import MAX_WORKERS
from hpc_toolkit.system.processes import describe_exit, handling
from hpc_toolkit.worker.pool import finished_items, overall_code, reported_error
from hpc_toolkit.worker.worker import DRAIN_SIGNALS, EXIT_COMPLETE

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_toolkit.engines.ray.cluster import RayCluster
    from hpc_toolkit.engines.ray.settings import RaySettings
    from hpc_toolkit.run import Run
    from hpc_toolkit.worker.worker import WorkerOptions

_TICK_S = 0.2
_BARREN_LIVES = 5
"""Consecutive deaths without a finished item after which a rank is given up."""
_TELL_AGAIN_S = 5.0
"""Seconds until a signal is repeated: a worker that is just starting does not handle it yet."""
_START_S = 60.0
"""Seconds for which an actor that has not started is waited for once all others have left."""


def work_on_ray(
    run: Run,
    workers: int | None,
    options: WorkerOptions,
    settings: RaySettings,
    on_tick: Callable[[], None] | None = None,
) -> int:
    """Work on a run by actors until nothing is left; return the exit code as for local workers.

    Args:
        run: the run, in a directory that all nodes of the cluster share.
        workers: number of workers; None: one per GPU of the cluster, or one.
        options: options of each worker.
        settings: the cluster, and the resources of a worker.
        on_tick: called a few times a second, to show progress.

    Raises HpcToolkitError: Ray is missing, the cluster has no room for a worker, or a worker failed
    with this error.
    """
    with joined(settings) as cluster:
        nodes = cluster.nodes()
        demand = demand_of(settings, nodes)
        if workers is None:
            workers = max(1, room(nodes, {"GPU": demand["GPU"]})) if demand["GPU"] else 1
        if not 1 <= workers <= MAX_WORKERS:
            message = f"workers must be from 1 to {MAX_WORKERS}, got {workers}"
            raise ConfigError(message, hint="one per core, or one per GPU, is usual")
        check_room(nodes, demand, workers)
        return Engine(cluster, run, workers, options, demand).run(on_tick)


@dataclass(slots=True)
class _Life:
    """One actor, from its request to its end."""

    rank: int
    actor: Any
    identity: Any
    """Ray's reference to host and PID, which are known later."""
    asked_at: float
    """Time of the request by this host's monotonic clock."""
    started: bool = False


class Engine:
    """Follows the actors of one run; this process runs no item and claims nothing."""

    def __init__(
        self,
        cluster: RayCluster,
        run: Run,
        workers: int,
        options: WorkerOptions,
        demand: dict[str, float],
    ) -> None:
        self._cluster = cluster
        self._ray = cluster.ray
        self._run = run
        self._workers = workers
        self._options = options
        self._demand = demand
        self._lives: dict[Any, _Life] = {}
        self._due: dict[int, float] = {}
        self._barren = [0] * workers
        self._codes: list[int] = []
        self._error: HpcToolkitError | None = None
        self._signals: list[int] = []
        self._draining = False
        self._told = signal.SIGTERM
        self._tell_again_at = math.inf

    def run(self, on_tick: Callable[[], None] | None = None) -> int:
        """Work until every worker has left; return the exit code.

        Raises HpcToolkitError: the first error that a worker reported.
        """
        # Ray's own handlers would end the driver.
        with handling(DRAIN_SIGNALS, lambda number, _: self._signals.append(number)):
            self._due = dict.fromkeys(range(self._workers), 0.0)
            while self._lives or self._due:
                self._pass_on()
                self._start_due()
                for promise in self._ended():
                    self._bury(promise)
                self._give_up_waiting()
                if on_tick is not None:
                    on_tick()
        if self._error is not None:
            raise self._error
        return overall_code(self._codes)

    def _pass_on(self) -> None:
        numbers, self._signals = self._signals, []
        if self._tell_again_at <= time.monotonic():
            numbers.append(self._told)
        for number in numbers:
            self._draining = True
            # Repeated as SIGTERM, because a second SIGINT would end the running item.
            self._told = signal.SIGTERM if number == signal.SIGINT else signal.Signals(number)
            self._tell_again_at = time.monotonic() + _TELL_AGAIN_S
            for life in self._lives.values():
                life.actor.tell.remote(int(number))

    def _start_due(self) -> None:
        now = time.monotonic()
        for rank in [rank for rank, at in self._due.items() if at <= now]:
            del self._due[rank]
            order = Order(
                root=str(self._run.root.resolve()),
                cwd=str(Path.cwd()),
                rank=rank,
                world_size=self._workers,
                gpus=self._demand["GPU"],
                memory_bytes=int(self._demand["memory"]),
                options=asdict(self._options),
            )
            actor = self._cluster.actor(order, self._demand)
            self._lives[actor.run.remote()] = _Life(rank, actor, actor.identity.remote(), now)

    def _ended(self) -> list[Any]:
        if not self._lives:
            time.sleep(_TICK_S)
            return []
        promises = list(self._lives)
        ended, _ = self._ray.wait(promises, num_returns=len(promises), timeout=_TICK_S)
        return list(ended)

    def _bury(self, promise: Any) -> None:
        life = self._lives[promise]
        try:
            report = self._ray.get(promise)
        except self._ray.exceptions.RayError as error:
            # The actor's node is lost, or the actor was killed: the same as a killed worker.
            reason = str(error).strip().partition("\n")[0]
            report = {"code": -int(signal.SIGKILL), "error": None, "reason": reason}
        code = int(report["code"])
        fruitful = self._has_finished_items(life)
        del self._lives[promise]
        self._end(life)
        if report["error"] is not None and self._error is None:
            self._error = reported_error(report["error"])
        if code >= 0:
            self._codes.append(code)
        elif not (self._draining or EXIT_COMPLETE in self._codes):
            self._replace(life.rank, code, report.get("reason", ""), fruitful=fruitful)

    def _replace(self, rank: int, code: int, reason: str, *, fruitful: bool) -> None:
        self._barren[rank] = 0 if fruitful else self._barren[rank] + 1
        barren = self._barren[rank]
        what = reason or f"its worker was {describe_exit(code)}"
        if barren >= _BARREN_LIVES:
            sys.stderr.write(f"note: rank {rank} is given up after {barren} deaths: {what}\n")
            return
        sys.stderr.write(f"note: rank {rank} starts again: {what}\n")
        self._due[rank] = time.monotonic() + (2.0 ** (barren - 1) if barren else 0.0)

    def _has_finished_items(self, life: _Life) -> bool:
        """Return whether the worker of an ended actor had finished an item; False if unknown."""
        try:
            host, pid = self._ray.get(life.identity, timeout=0)
        except self._ray.exceptions.RayError:
            return False
        return finished_items(self._run.paths.workers, pid, host) > 0

    def _give_up_waiting(self) -> None:
        """Stop waiting for room on the cluster if no work is left for more workers."""
        if not (self._is_over() or self._is_alone()):
            return
        self._due.clear()
        for promise, life in list(self._lives.items()):
            if not self._has_started(life):
                del self._lives[promise]
                self._end(life)

    def _is_over(self) -> bool:
        deadline = self._options.deadline
        late = deadline is not None and time.time() > deadline
        return late or self._draining or EXIT_COMPLETE in self._codes or self._error is not None

    def _is_alone(self) -> bool:
        """Return whether some workers have left and no other has started for _START_S seconds."""
        long_ago = time.monotonic() - _START_S
        return bool(self._codes and not self._due) and not any(
            self._has_started(life) or life.asked_at > long_ago for life in self._lives.values()
        )

    def _has_started(self, life: _Life) -> bool:
        if not life.started:
            life.started = bool(self._ray.wait([life.identity], timeout=0)[0])
        return life.started

    def _end(self, life: _Life) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(life.actor, no_restart=True)
