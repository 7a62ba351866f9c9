"""A worker on a virtual clock: the queue's own view, liveness, choice and journal, no executor."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.queue.assignment import Assignment, Picker
from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.leases import DEFAULT_LEASE_S, Liveness
from hpc_toolkit.queue.pacing import Pacing
from hpc_toolkit.queue.presence import FINISHED, Presence, PresenceFile
from hpc_toolkit.queue.state import is_killer
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.queue.wants import STAGES
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalWriter, encode_line
from hpc_toolkit.worker.membership import _UPDATE_S, ShownUnit, beat_s
from hpc_toolkit.worker.node import Node, watch_if_due
from hpc_toolkit.worker.unitlines import UnitLines
from simulation.sharing import SharedFresh, share

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from hpc_toolkit.queue.affinity import FreshUnits
    from hpc_toolkit.queue.log import StageLog
    from hpc_toolkit.queue.units import Segment, Unit
    from hpc_toolkit.rundir.layout import Manifest, RunPaths
    from simulation.scenario import Outcome, Scenario

    Steps = Generator[float, None, bool]

STAGE = "items"


class VirtualClock:
    """A clock that the simulation advances."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start of the simulation."""

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Site:
    """The data that all workers of one simulation share."""

    scenario: Scenario
    paths: RunPaths
    manifest: Manifest
    clock: VirtualClock
    outcome: Outcome
    log: StageLog
    """The stage's log, read once: segments are immutable and large."""
    places: list[tuple[int, int]]
    """For each item of the segment, its group and its index in the group."""
    units: dict[str, Unit]
    """By name; a coordinator adds those of its segments."""
    segments: dict[str, Segment]
    """Those of a coordinator, by what the log says of them, once a worker has read them."""
    fresh: FreshUnits
    """All of them, to be shared."""
    nodes: dict[str, list[SimulatedNode]]
    """The workers of each host; the first one watches others."""
    slow: bool
    """Whether operations on files take time."""


class SimulatedNode(Node):
    """As :class:`hpc_toolkit.worker.node.Node`, without sockets: messages are lists."""

    def __init__(self, site: Site, host: str, name: str) -> None:
        self._clock, self._worker = site.clock, name
        self._there = site.nodes.setdefault(host, [])
        self._there.append(self)
        self.met = set()
        for one in self._there:
            one.met.add(name)
        self._news = not self.observes
        self._sees_end = self.ended = self._more = self.added = self._waits = False
        self.workers = self.entries = 0
        self._since = 0.0

    @property
    def observes(self) -> bool:
        return self._there[0] is self

    @property
    def mates(self) -> set[str]:
        return {one._worker for one in self._there if one is not self}

    def tick(self) -> bool:
        news, self._news = self._news, False
        self.ended, self._sees_end = self._sees_end, False
        self.added, self._more = self._more, False
        return news

    def say_whether_waiting(self, waits: bool) -> None:
        if waits and not self._waits:
            self._since = self._clock.monotonic()
        self._waits = waits

    @property
    def has_others(self) -> bool:
        return len(self._there) > 1

    @property
    def others_wait_since(self) -> float | None:
        if not self.observes:
            return None
        return max((one._since for one in self._there[1:] if one._waits), default=None)

    def tell(self, workers: int, *, news: bool) -> None:
        for one in self._there[1:]:
            one.workers, one._news = workers, one._news or news
            one._more |= self.entries > one.entries
            one.entries = self.entries

    def show(self, entries: int) -> None:
        if entries > self.entries:
            self.entries = entries
            if self.observes:
                self.tell(self.workers, news=False)

    def close(self) -> None:
        """Leave; the observer sees that, and all others that an observer leaves."""
        wakes = slice(None) if self.observes else slice(1)
        self._there.remove(self)
        for one in self._there[wakes]:
            one._news = one._sees_end = True


class SiteView(RunView):
    """A worker's own view of the run."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.paths, site.manifest)
        stage = self.stages[STAGE]
        stage.log.segments = dict(site.log.segments)
        stage.log.sealed, stage.log.length = site.log.sealed, site.log.length
        share(stage, site.units, site.segments)

    def poll_journals(self) -> None:
        """Poll the journals in order of names. The order of a directory depends on the filesystem,
        and would change the last digit of sums of seconds.
        """
        for name in sorted(files.list_names(self.paths.journals)):
            self.poll_journal(name.removesuffix(".jsonl"))


def host_of(place: int, scenario: Scenario) -> str:
    return f"n{place // scenario.workers_per_host}"


def _read_run(site: Site) -> None:
    """Read what a worker reads at its start, all of which is at hand here."""
    stage = site.paths.stage(STAGE)
    for path in (site.paths.manifest, site.paths.doctor, stage.head):
        files.read_fresh(path)
    for number in range(1, site.log.length + 1):
        stage.entry(number).readlink()
    for segment in site.log.segments.values():
        files.read_fresh(segment.path)


class SimulatedWorker:
    """One worker from its start to its end; :meth:`life` runs it."""

    def __init__(self, site: Site, name: str, *, place: int, restart: int) -> None:
        self.name = name
        self._site = site
        self._clock = site.clock
        host = host_of(place, site.scenario)
        lease_s = DEFAULT_LEASE_S
        if site.slow:
            _read_run(site)
        self._lock = os.open(site.paths.worker_lock(name), os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        workers = site.scenario.workers  # as a rank of one step knows at its start
        self._node = SimulatedNode(site, host, name)
        self._pacing = Pacing(
            self._clock,
            local=False,
            workers=workers,
            lease_s=lease_s,
            seed=name,
            watchers=site.scenario.hosts if self._node.observes else workers,
        )
        self._beat_s = beat_s(workers, 1, lease_s)
        self._claim, self._unit = "", ShownUnit(self._clock)
        presence = Presence(
            worker=name,
            host=host,
            boot=host,
            pid=place,
            rank=place,
            job="1",
            restart=restart,
            interval_s=self._beat_s,
        )
        self._presence = PresenceFile(site.paths.worker(name), presence, local=not site.slow)
        self._journal = JournalWriter(site.paths.journal(name))
        if site.slow:
            site.paths.worker_log(name).touch()
            for directory in (site.paths.workers, site.paths.journals):
                files.sync_directory(directory)
        self._control = ControlReader(site.paths)
        self._view = SiteView(site)
        self._view.readers[name] = self._journal.reader()
        self._liveness = Liveness(
            site.paths, self._clock, host=host, boot=host, lease_s=lease_s, job="1", restart=restart
        )
        self._picker = Picker(
            self._view,
            self._liveness,
            self._clock,
            name,
            shared=True,
            rank=place,
            world_size=site.scenario.workers,
            restarted=restart > 0,
        )
        if not site.scenario.steps:
            shared = SharedFresh(site.fresh, name, place, site.scenario.workers)
            self._picker._fresh[STAGE, STAGES] = shared
        self._loaded: tuple[str, str | None] = ("", None)
        self._context = -1
        self._forwarded = False
        self._done = 0
        self._stop = False
        self._drain_by = float("inf")
        now = self._clock.now
        self._beat_at = self._update_at = self._looked_at = now
        self._step_began: float | None = None
        self.born_s = self.idle_since_s = now
        self.busy_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a step of an item runs."""
        return self._step_began is not None

    def life(self) -> Iterator[float]:
        """Yield the times at which the worker continues; end when it exits in good order."""
        while True:
            self._tick()
            if self._stop:
                break
            assignment = self._picker.next(self._loaded, self._pacing)
            if assignment is not None:
                self._pacing.worked()
                yield from self._work(assignment)
            elif self._picker.reported_complete:
                self._view.stages[STAGE].log.report_complete()
                break
            else:
                tick_s = self._site.scenario.tick_s
                yield self._clock.now + max(self._pacing.wait_s, tick_s if tick_s > 1.0 else 0.0)
        self._journal.sync()
        self._presence.update(state=FINISHED, done=self._done, journal=self._journal.synced)

    def drain(self) -> None:
        """Receive SIGTERM."""
        self._stop = True
        self._drain_by = self._clock.now + self._site.scenario.grace_s

    def end(self) -> None:
        """Clean up after the worker's process is gone, for whatever reason."""
        if self._step_began is not None:
            self._cut_step()
        self._node.close()
        os.close(self._lock)
        self._journal.close()
        self._presence.close()

    def _tick(self) -> None:
        now = self._clock.now
        shown, claim = self._presence.presence, self._claim
        changed = now >= self._update_at and (self._done, claim) != (shown.done, shown.claim)
        node = self._node.watches_for
        self._beat_s = beat_s(self._pacing.watchers, node, DEFAULT_LEASE_S)
        due = now - self._beat_at >= self._beat_s
        due |= self._unit.is_due(claim)
        due |= bool(node) != bool(shown.node)
        if due:
            self._unit.show(claim)
        if changed or due:
            self._beat_at, self._update_at = now if due else self._beat_at, now + _UPDATE_S
            self._presence.update(
                sync=due,
                done=self._done,
                journal=self._journal.synced,
                at=now,
                claim=claim,
                node=node,
                interval_s=self._beat_s,
            )
        watch_if_due(self._node, self._picker, self._pacing, self._control)

    def _work(self, assignment: Assignment) -> Iterator[float]:
        stage, unit = assignment.stage, assignment.unit
        self._claim = f"{assignment.name}.{assignment.generation}"
        lines = UnitLines(self._journal, self._clock, assignment)
        self._looked_at = self._clock.now
        self._tick()  # as a worker does while it sends the first item to its executor
        if self._site.outcome.steps:
            self._site.outcome.steps[unit.entry - 1].claimed_s.append(self._clock.now)
        for item in self._order(assignment, lines):
            if self._stop:
                break
            if self._clock.now - self._looked_at > self._beat_s:
                self._looked_at = self._clock.now
                if stage.claims.overtaken(unit.name, assignment.generation):
                    self._claim = ""
                    return
            if not (yield from self._attempt(item, assignment, lines)):
                break
            self._tick()
        lines.release()
        self._claim = ""
        self._journal.sync()
        self._loaded = (STAGE, stage.group_of(unit))
        self._view.poll_journal(self.name)

    def _order(self, assignment: Assignment, lines: UnitLines) -> list[int]:
        state, name = assignment.stage.state, assignment.unit.name
        order = state.running_order(name)
        if assignment.died is not None and order:
            died = self._site.outcome.killed.get(assignment.died[0])
            if died is not None:
                self._site.outcome.takeovers_s.append(self._clock.now - died)
            lines.owner_died(order)
            self._view.poll_journal(self.name)
            order = state.running_order(name)
        suspects = state.suspects(name)
        for item in [i for i in order if i in suspects and is_killer(suspects[i])]:
            lines.killer(item, len(suspects[item]), suspects[item][-1])
            self._site.outcome.left.discard(self._number(assignment.unit, item))
            order.remove(item)
        return order

    def _number(self, unit: Unit, item: int) -> int:
        """The number in the run of an item of a segment; all segments are equally long."""
        return (unit.entry - 1) * len(self._site.places) + item

    def _attempt(self, item: int, assignment: Assignment, lines: UnitLines) -> Steps:
        """Run an item; return whether it was done or else cut short."""
        number, place = self._site.places[item]
        group = self._site.scenario.groups[number]
        item_s = group.items_s[place]
        outcome = self._site.outcome
        began = self._clock.now
        if number != self._context:
            self._context, self._forwarded = -1, False
            if not (yield from self._step(group.load_s)):
                return False
            outcome.prepared("load", number, group.load_s)
            self._context = number
            if self._stop:
                return False
            began = self._clock.now  # like an executor, which times the item after loading
        first_s = 0.0 if self._forwarded else group.forward_s
        if not (yield from self._step(first_s + item_s)):
            return False
        if not self._forwarded:
            outcome.prepared("forward", number, group.forward_s)
            self._forwarded = True
        record = {
            "type": "done",
            "unit": assignment.name,
            "generation": assignment.generation,
            "item": item,
            "at": self._clock.now,
            "seconds": self._clock.now - began,
            "value": {},
        }
        lines.append(encode_line(record))
        self._journal.sync()  # items are longer than the half second that lines wait for a sync
        lines.tally.done += 1
        self._done += 1
        outcome.ended(self._number(assignment.unit, item), item_s)
        if outcome.steps:
            outcome.steps[assignment.unit.entry - 1].ended_s.append(self._clock.now)
        return True

    def _step(self, seconds: float) -> Steps:
        """Run a step; return whether the executor reached its end."""
        until, tick_s = self._clock.now + seconds, self._site.scenario.tick_s
        self._step_began = self._clock.now
        while self._clock.now < until:
            if self._clock.now >= self._drain_by:
                self._cut_step()
                return False
            yield min(until, self._clock.now + tick_s, self._drain_by)
            self._tick()
        self._end_step()
        return True

    def _cut_step(self) -> None:
        assert self._step_began is not None
        self._site.outcome.redone_s += self._clock.now - self._step_began
        self._end_step()

    def _end_step(self) -> None:
        assert self._step_began is not None
        self.busy_s += self._clock.now - self._step_began
        self.idle_since_s, self._step_began = self._clock.now, None
