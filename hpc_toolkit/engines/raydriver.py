"""The driver of a run on Ray: joins a cluster, and keeps the run's actors running.

Ray decides where ranks run, the run directory what they do. Only this module imports ray, and only
when it joins a cluster.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_toolkit.engines.rayrank import CONCURRENCY, Order, RankActor, check_room, room
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.run import MAX_WORKERS, Run
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.system.processes import STOP_SIGNALS, describe_exit, handling
from hpc_toolkit.worker.pool import BARREN_LIVES, overall_code, reported_error
from hpc_toolkit.worker.worker import EXIT_COMPLETE, WorkerOptions

AUTO = "auto"
_ANSWER_S = 5.0
"""Seconds for a connection to a cluster; Ray itself would try for two minutes."""
_TICK_S = 0.2
_LONG_LIFE_S = 60.0
"""Deaths after more seconds than this are not counted: the worker was of use until then."""
_TELL_AGAIN_S = 5.0
"""Seconds until a signal is repeated: a worker that is just starting does not handle it yet."""
_START_S = 60.0
"""Seconds for which an actor that has not started is waited for once all others have left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """The options of ``hpctk work --engine ray``."""

    address: str = AUTO
    """HOST:PORT of a Ray cluster; ``auto`` for the one that RAY_ADDRESS names."""
    cpus_per_worker: float | None = None
    """CPUs that Ray counts for a worker; None: one."""
    gpus_per_worker: float | None = None
    """GPUs of a worker, an integer or a fraction of one; None: one if the cluster has any."""
    memory_per_worker: int | None = None
    """Bytes that each process of a worker's executor may allocate; Ray counts them, too."""

    def __post_init__(self) -> None:
        """Refuse values that Ray does not support.

        Raises ConfigError: names the option and its value.
        """
        amounts = {"cpus": self.cpus_per_worker, "gpus": self.gpus_per_worker}
        for what, amount in amounts.items():
            if amount is not None and not 0 <= amount <= 4096:
                message = f"--{what}-per-worker: {amount:g} is not a valid amount"
                raise ConfigError(message, hint="such as 0.5, 1 or 8")
        gpus = self.gpus_per_worker or 0.0
        if gpus > 1 and not gpus.is_integer():
            message = f"--gpus-per-worker: Ray allots whole GPUs or a fraction of one, not {gpus:g}"
            raise ConfigError(message, hint="such as 0.5, 1 or 2")

    def resolve(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return HOST:PORT. Raises ConfigError: the address is missing or invalid."""
        address = self.address
        if address == AUTO and not (address := environ.get("RAY_ADDRESS", "")):
            message = "no Ray cluster is named: RAY_ADDRESS is not set"
            raise ConfigError(message, hint="'ray start --head' starts one and prints HOST:PORT")
        host, _, port = address.rpartition(":")
        if not (host and port.isdigit() and 1 <= int(port) <= 65535) or "/" in host:
            message = f"the address of a Ray cluster is HOST:PORT, not {address!r}"
            raise ConfigError(message, hint="'auto', or such as node1:6379")
        return address

    def demand(self, nodes: list[dict[str, float]]) -> dict[str, float]:
        """Return the resources that Ray counts for each worker, by Ray's names."""
        gpus = self.gpus_per_worker
        if gpus is None:
            gpus = 1.0 if any(node.get("GPU") for node in nodes) else 0.0
        return {
            "CPU": 1.0 if self.cpus_per_worker is None else self.cpus_per_worker,
            "GPU": gpus,
            "memory": float(self.memory_per_worker or 0),
        }


def work_on_ray(
    run: Run, workers: int | None, options: WorkerOptions, settings: RaySettings
) -> int:
    """Work on a run by actors until nothing is left; return the exit code as for local workers.

    ``workers`` None: one per GPU of the cluster, or one.

    Raises HpcToolkitError: Ray is missing, the cluster has no room for a worker, or a worker failed
    with this error.
    """
    with joined(settings) as ray:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        demand = settings.demand(nodes)
        if workers is None:
            workers = max(1, room(nodes, {"GPU": demand["GPU"]})) if demand["GPU"] else 1
        if not 1 <= workers <= MAX_WORKERS:
            message = f"workers must be from 1 to {MAX_WORKERS}, got {workers}"
            raise ConfigError(message, hint="one per core, or one per GPU, is usual")
        check_room(nodes, demand, workers)
        return Engine(ray, run, workers, options, demand).run()


@dataclass(slots=True, eq=False)
class _Life:
    """One actor, from its request to its end."""

    rank: int
    actor: Any
    ready: Any
    """Ray's reference to an answer that the actor gives when it has started."""
    asked_at: float
    """Time of the request by this host's monotonic clock."""
    started_at: float | None = None
    """None while it waits for room, or imports."""


class Engine:
    """Follows the actors of one run; this process runs no item and claims nothing."""

    def __init__(
        self, ray: Any, run: Run, workers: int, options: WorkerOptions, demand: dict[str, float]
    ) -> None:
        self._ray = ray
        self._run = run
        self._workers = workers
        self._options = options
        self._demand = demand
        self._kind = ray.remote(RankActor).options(
            num_cpus=demand["CPU"],
            num_gpus=demand["GPU"],
            memory=demand["memory"] or None,
            # Not Ray but the driver replaces a dead actor: it knows whether the run is over.
            max_restarts=0,
            max_concurrency=CONCURRENCY,
            scheduling_strategy="SPREAD",
        )
        self._lives: dict[Any, _Life] = {}
        self._deaths = [0] * workers
        self._codes: list[int] = []
        self._error: HpcToolkitError | None = None
        self._signals: list[int] = []
        self._draining = False
        self._told = signal.SIGTERM
        self._tell_again_at = math.inf

    def run(self) -> int:
        """Work until every worker has left; return the exit code.

        Raises HpcToolkitError: the first error that a worker reported.
        """
        # Ray's own handlers would end the driver.
        with handling(STOP_SIGNALS, lambda number, _: self._signals.append(number)):
            for rank in range(self._workers):
                self._start(rank)
            while self._lives:
                self._pass_on()
                for promise in self._ended():
                    self._bury(promise)
                self._give_up_waiting()
        if self._error is not None:
            raise self._error
        return overall_code(self._codes)

    def _start(self, rank: int) -> None:
        order = Order(
            root=str(self._run.root.resolve()),
            cwd=str(Path.cwd()),
            rank=rank,
            world_size=self._workers,
            gpus=self._demand["GPU"],
            memory_bytes=int(self._demand["memory"]),
            options=asdict(self._options),
        )
        actor = self._kind.remote(order.to_json())
        ready = actor.__ray_ready__.remote()
        self._lives[actor.run.remote()] = _Life(rank, actor, ready, time.monotonic())

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

    def _ended(self) -> list[Any]:
        starting = {one.ready: one for one in self._lives.values() if one.started_at is None}
        if starting:
            ready, _ = self._ray.wait(list(starting), num_returns=len(starting), timeout=0)
            for answer in ready:
                starting[answer].started_at = time.monotonic()
        promises = list(self._lives)
        ended, _ = self._ray.wait(promises, num_returns=len(promises), timeout=_TICK_S)
        return list(ended)

    def _bury(self, promise: Any) -> None:
        life = self._lives.pop(promise)
        try:
            report = self._ray.get(promise)
        except self._ray.exceptions.RayError as error:
            # The actor's node is lost, or the actor was killed: the same as a killed worker.
            reason = str(error).strip().partition("\n")[0]
            report = {"code": -int(signal.SIGKILL), "error": None}
        else:
            reason = f"its worker was {describe_exit(report['code'])}"
        self._end(life)
        if report["error"] is not None and self._error is None:
            self._error = reported_error(report["error"])
        if report["code"] >= 0:
            self._codes.append(report["code"])
        elif not (self._draining or EXIT_COMPLETE in self._codes):
            now = time.monotonic()
            lasted = now - (life.started_at or now) > _LONG_LIFE_S
            deaths = self._deaths[life.rank] = 0 if lasted else self._deaths[life.rank] + 1
            again = deaths < BARREN_LIVES
            how = "starts again" if again else f"is given up after {deaths} deaths"
            sys.stderr.write(f"note: rank {life.rank} {how}: {reason}\n")
            if again:
                self._start(life.rank)

    def _give_up_waiting(self) -> None:
        """Stop waiting for room on the cluster if no work is left for more workers."""
        deadline = self._options.deadline
        late = deadline is not None and time.time() > deadline
        over = late or self._draining or EXIT_COMPLETE in self._codes or self._error is not None
        long_ago = time.monotonic() - _START_S
        # Without a worker that runs, an actor that waits for room may wait for ever.
        alone = bool(self._codes) and not any(
            life.started_at is not None or life.asked_at > long_ago for life in self._lives.values()
        )
        for promise, life in list(self._lives.items()) if over or alone else ():
            if life.started_at is None:
                del self._lives[promise]
                self._end(life)

    def _end(self, life: _Life) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(life.actor, no_restart=True)


@contextmanager
def joined(settings: RaySettings) -> Iterator[Any]:
    """Join the cluster of ``settings``; gives ``ray``.

    Raises HpcToolkitError: Ray is not installed, or does not answer.
    """
    address = settings.resolve()
    if find_spec("ray") is None:
        raise ConfigError("--engine ray: Ray is not installed", hint=how_to_add(extra="ray"))
    _check_answers(address)
    _quieten()
    import ray

    try:
        # Ray prints the output of actors, and messages about them; stdout is for data.
        with redirect_stdout(sys.stderr):
            _connect(ray, address)
            yield ray
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise HpcToolkitError if nothing listens at ``address``."""
    host, _, port = address.rpartition(":")
    place = host.removeprefix("[").removesuffix("]"), int(port)
    try:
        socket.create_connection(place, timeout=_ANSWER_S).close()
    except OSError as error:
        message = f"no Ray cluster answers at {address}: {error.strerror or error}"
        hint = "'ray start --head' printed host and port; may this machine connect there?"
        raise HpcToolkitError(message, hint=hint) from error


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=True)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        message = f"no Ray cluster answers at {address}: {str(error).strip():.300}"
        hint = "use the same Python, Ray and RAY_AUTH_TOKEN as the cluster"
        raise HpcToolkitError(message.partition("\n")[0], hint=hint) from error


def _quieten() -> None:
    """Set the variables that Ray reads when it is imported or started."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray would drop lines that several workers print, but each worker's line has its meaning.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
