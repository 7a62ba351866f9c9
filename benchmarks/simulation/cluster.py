"""A simulated cluster: many workers of one run in one process, on a virtual clock.

The workers use the queue's own code on a run directory in memory. Nothing sleeps and nothing reads
a clock of this machine, so a week passes in seconds and equal scenarios have equal outcomes.
Operations on files take no time, and every worker sees a change at once, unless a
:class:`~simulation.fileserver.FileServer` stands between.
"""

from __future__ import annotations

import heapq
import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.queue.affinity import FreshUnits, group_key
from hpc_toolkit.queue.items import encode_segment
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.units import Segment
from hpc_toolkit.rundir.layout import Manifest, RunPaths, StageSpec, WorkloadSpec
from simulation.coordinator import SimulatedCoordinator
from simulation.scenario import Outcome
from simulation.worker import STAGE, SimulatedWorker, Site, VirtualClock, host_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from simulation.fileserver import FileServer
    from simulation.scenario import Kill, Preemption, Scenario

_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class _Place:
    """A slot of the cluster, for one worker at a time."""

    number: int
    worker: SimulatedWorker | None = None
    life: Iterator[float] | None = None
    turn: int = 0
    """Number of the current wake-up; wake-ups of earlier turns are void."""
    births: int = 0
    alive_s: float = 0.0
    busy_s: float = 0.0
    """Busy seconds of earlier workers, without the running one."""


def simulate(
    scenario: Scenario,
    root: Path | None = None,
    *,
    look: tuple[int, Callable[[VirtualClock], None]] | None = None,
    server: FileServer | None = None,
) -> Outcome:
    """Run a scenario to its last result, or until no worker is left and none will start.

    Args:
        scenario: the work, and the kills and preemptions of workers.
        root: an empty directory in which the run is kept; by default a temporary one in memory.
        look: a number of items, and a function to call once as soon as that many have a result,
            to read the run at that moment.
        server: what operations on files cost, and when their effects are seen elsewhere; by
            default they take no time, and every worker sees a change at once.
    """
    if root is not None:
        return _Cluster(scenario, root, look, server).run()
    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="hpctk-simulation-", dir=memory) as directory:
        return _Cluster(scenario, Path(directory), look, server).run()


class _Cluster:
    def __init__(
        self,
        scenario: Scenario,
        root: Path,
        look: tuple[int, Callable[[VirtualClock], None]] | None,
        server: FileServer | None,
    ) -> None:
        self._scenario = scenario
        self._server = server
        self._look = look
        self._clock = VirtualClock()
        self._items = max(1, scenario.steps) * len(scenario.places)
        self._outcome = Outcome(scenario=scenario, left=set(range(self._items)))
        self._site = self._make_site(root)
        self._places = [_Place(number) for number in range(scenario.workers)]
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = 0
        self._restart = 0
        self._leaving: Preemption | None = None
        self._coordinates = False

    def _make_site(self, root: Path) -> Site:
        paths = RunPaths(root)
        paths.make([STAGE])
        log = StageLog(paths.stage(STAGE))
        scenario = self._scenario
        lines = list(
            encode_segment(
                scenario.items(),
                group_by=scenario.group_by,
                unit_size=scenario.unit_size,
                kinds=scenario.kinds,
            )
        )
        path = root / "segment.jsonl"
        path.write_bytes(b"".join(lines))
        segment = Segment(path, 1)  # as each of a coordinator's will be
        if not scenario.steps:
            log.add_segment(lines)
            log.seal()
        stage = StageSpec(name=STAGE, workload=WorkloadSpec(function="none:none"))
        manifest = Manifest(run="simulation", stages=(stage,))
        paths.manifest.write_bytes(manifest.to_bytes())
        fresh = FreshUnits("")
        fresh.add(segment.units, lambda unit: group_key(segment.group_of(unit)))
        given = scenario.places
        order = segment.order or range(len(given))
        return Site(
            scenario=scenario,
            paths=paths,
            manifest=manifest,
            clock=self._clock,
            outcome=self._outcome,
            log=log,
            places=[given[index] for index in order],
            units={unit.name: unit for unit in segment.units},
            segments={},
            fresh=fresh,
            nodes={},
            slow=self._server is not None,
        )

    def run(self) -> Outcome:
        if self._server is None:
            return self._run()
        with self._server.between(self._site.paths.root, self._clock):
            return self._run()

    def _run(self) -> Outcome:
        for place in self._places:
            self._at(0.0, partial(self._start, place))
        if self._scenario.steps:
            self._go_on_coordinating(SimulatedCoordinator(self._site).life())
        for kill in self._scenario.kills:
            self._at(kill.at_s, partial(self._kill, kill))
        for one in self._scenario.preemptions:
            self._at(one.at_s, partial(self._preempt, one))
        while self._agenda and (self._outcome.left or self._coordinates):
            self._clock.now, _, action = heapq.heappop(self._agenda)
            action()
            if self._look is not None and self._items - len(self._outcome.left) >= self._look[0]:
                (_, look), self._look = self._look, None
                look(self._clock)
        return self._conclude()

    def _go_on_coordinating(self, life: Iterator[float]) -> None:
        with self._on_host("coordinator"):
            at_s = next(life, None)
        self._coordinates = at_s is not None
        if at_s is not None:
            self._at(max(at_s, self._clock.now), lambda: self._go_on_coordinating(life))

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        self._entries += 1  # actions due at the same time run in the order of their entry
        heapq.heappush(self._agenda, (at_s, self._entries, action))

    @contextmanager
    def _on_host(self, host: str) -> Iterator[None]:
        """Count what is done to files until the end of the block for a host."""
        if self._server is not None:
            self._server.host = host
        try:
            yield
        finally:
            if self._server is not None:
                self._server.host = ""

    def _start(self, place: _Place) -> None:
        if place.worker is not None or self._leaving is not None:
            return
        host = host_of(place.number, self._scenario)
        name = f"{host}-{place.number:05d}-{self._scenario.seed}.{place.births}"
        place.births += 1
        with self._on_host(host):
            place.worker = SimulatedWorker(
                self._site, name, place=place.number, restart=self._restart
            )
        place.life = place.worker.life()
        self._go_on(place)

    def _go_on(self, place: _Place) -> None:
        assert place.life is not None
        place.turn += 1
        turn = place.turn
        with self._on_host(host_of(place.number, self._scenario)):
            at_s = next(place.life, None)
        if at_s is None:
            self._bury(place)
            return
        # Operations on files may have taken longer than it wanted to wait.
        self._at(
            max(at_s, self._clock.now), lambda: self._go_on(place) if place.turn == turn else None
        )

    def _bury(self, place: _Place) -> None:
        worker = place.worker
        assert worker is not None
        worker.end()
        place.alive_s += self._clock.now - worker.born_s
        place.busy_s += worker.busy_s
        place.worker = place.life = None
        place.turn += 1
        self._requeue()

    def _requeue(self) -> None:
        if self._leaving is not None and not any(one.worker for one in self._places):
            self._at(self._clock.now + self._leaving.requeue_s, self._start_again)

    def _start_again(self) -> None:
        self._leaving = None
        self._restart += 1
        for place in self._places:
            self._start(place)

    def _kill(self, kill: Kill) -> None:
        places = self._places[kill.place :] + self._places[: kill.place]
        for place in places:
            if place.worker is None:
                continue
            self._outcome.killed[place.worker.name] = self._clock.now
            self._bury(place)
            if kill.back_s is not None:
                self._at(self._clock.now + kill.back_s, partial(self._start, place))
            return

    def _preempt(self, preemption: Preemption) -> None:
        if self._leaving is not None:
            return
        self._leaving = preemption
        there = [place for place in self._places if place.worker is not None]
        for place in there:
            assert place.worker is not None
            place.worker.drain()
            self._go_on(place)
        if not there:
            self._requeue()

    def _conclude(self) -> Outcome:
        now = self._clock.now
        tail_s = 0.0
        for place in self._places:
            worker = place.worker
            if worker is None:
                continue
            if not worker.busy:
                tail_s += now - worker.idle_since_s
            self._bury(place)
        alive_s = sum(place.alive_s for place in self._places)
        busy_s = sum(place.busy_s for place in self._places)
        outcome = self._outcome
        outcome.makespan_s, outcome.tail_s = now, tail_s
        outcome.dead_s = self._scenario.workers * now - alive_s
        outcome.waiting_s = alive_s - busy_s - tail_s
        return outcome
