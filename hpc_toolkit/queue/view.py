"""One process's view of a run: its logs, claims and journals, read together.

Nothing is written, except that a hinted poll may bring a stage's ``head`` up to date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from hpc_toolkit.queue.affinity import Durations, group_key
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.pacing import PER_LOOK, READINGS_PER_S, pause_local_s
from hpc_toolkit.queue.presence import (
    DIRECT,
    JOURNAL,
    Presence,
    Probes,
    ProbeTimeoutError,
    presence_of,
)
from hpc_toolkit.queue.state import ItemState, Ref, StageState, UnitState
from hpc_toolkit.queue.units import Claims, Unit
from hpc_toolkit.queue.wants import Specs
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalReader, Line, UnitRun, read_lines
from hpc_toolkit.rundir.layout import Manifest, RunPaths, StageSpec

_PACE = 16
_INTERVALS = 240
_LONGEST_S = 30 * 86400.0
_LOOK_S, _FIRST_S, _SOONEST_S = 1.0, 0.25, 0.05
"""Seconds between two looks; in the first second of a wait, in which short items may end: as long
as was waited so far, between the other two."""
_LEAST_OTHERS = 4
_SOON, _MOST_PER_S = 0.25, 500.0
"""All holders are read within this part of the time waited so far, but not more files a second."""
_MOST_FAILURES = 4000
"""Lines of failures in memory; a status shows at most half as many."""


class StageView:
    """One stage as this process sees it."""

    def __init__(
        self, run: RunPaths, spec: StageSpec, *, local: bool = False, probes: Probes = DIRECT
    ) -> None:
        self.spec = spec
        self.paths = run.stage(spec.name)
        self.log = StageLog(self.paths, probes)
        self.claims = Claims(self.paths, local=local)
        self.durations = Durations()
        self._taken, own = 0, f"{spec.name}/"
        self.specs = Specs(spec, self.log)
        self.state = StageState(
            max_attempts=spec.max_attempts,
            floors=self.log.floors,
            expand=lambda worker, start, end: read_lines(run.journal(worker), start, end, of=own),
            short=spec.retry["on"] if spec.retry else "",
            steps=self.specs.steps,
        )

    def poll_log(self, *, hinted: bool = False) -> None:
        """Read new log entries; ``hinted``: as in :meth:`StageLog.poll`."""
        self.log.poll(hinted=hinted)
        self._take_in()

    def _take_in(self) -> None:
        """Update the state from log entries that are new, read by a poll or by an append."""
        if self._taken == self.log.length:
            return
        segments = [entry for entry in self.log.segments if entry > self._taken]
        table = self.log.table is not None and self.log.table[0] > self._taken
        retried = self.log.last_retry > self._taken
        # Before any change: if the table is damaged, this raises and the next call tries again.
        failed = self.log.table_header()[1] if table else None
        self._taken = self.log.length
        for entry in segments:
            self.state.add_units(self.log.segments[entry].units)
        if failed is not None:
            assert self.log.table is not None
            number, at = self.log.table[0], self.log.retried_at
            self.state.publish(failed, lambda entry, item: at.get((entry, item), 0) > number)
        if retried:
            self.state.refresh_floors()

    def add(self, worker: str, name: str, found: Line | UnitRun) -> None:
        """Add what a worker's journal says of a unit of this stage."""
        unit, record = self.state.add(worker, name, found), found.record
        if unit is not None and record["type"] == "release":
            self.durations.add(self.group_of(unit), record["done"], record["seconds"])

    def group_of(self, unit: Unit) -> str | None:
        """Key of the group of a unit's first item; None without groups."""
        return group_key(self.log.segments[unit.entry].group_of(unit)) if unit.group >= 0 else None

    def kind_of(self, unit: Unit) -> int:
        return self.log.segments[unit.entry].kind_of(unit)

    @property
    def complete(self) -> bool:
        """Whether the stage is complete (rule R9); once true in any view, true until a retry."""
        self._take_in()
        return self.log.sealed and not self.state.open

    def unit(self, name: str) -> Unit:
        return self.state.units[name].unit

    def is_released(self, name: str) -> bool:
        return self.claims.generation(name) in self.state.units[name].released

    def owner(self, name: str, generation: int) -> str:
        """The worker that a claim names, or a made-up name if the claim cannot be read.

        An owner with a made-up name is timed like a silent worker, from when it was first seen.
        """
        made_up = f"unreadable-{self.paths.name}-{name}.{generation}"
        return self.claims.owner(name, generation) or made_up

    def holders(self, names: Iterable[str]) -> set[str]:
        """Workers that hold one of these units: a unit that is open, claimed and not released."""
        open_units = self.state.open
        return {
            self.owner(name, self.claims.generation(name))
            for name in names
            if name in open_units and self.claims.generation(name) and not self.is_released(name)
        }

    def states(self, unit: UnitState) -> Iterator[tuple[int, ItemState]]:
        for item in unit.unit.items:
            yield item, self.state.item_state(unit, item)


class Throughput:
    """Items done over time, in at most 240 intervals of equal length."""

    def __init__(self) -> None:
        self.width_s = 1.0
        self._done: dict[int, float] = {}
        self.since, self.until = float("inf"), 0.0
        """When the first attempt began and the last one ended, in epoch seconds."""

    def add(self, at: float, seconds: float, done: int) -> None:
        """Count items that were done evenly during the seconds before ``at``."""
        begin = at - min(seconds, _LONGEST_S)
        if begin < self.since or at > self.until:
            self.since, self.until = min(self.since, begin), max(self.until, at)
            while self._interval(self.until) - self._interval(self.since) >= _INTERVALS:
                wider: dict[int, float] = {}
                for number, count in self._done.items():
                    wider[number // 2] = wider.get(number // 2, 0.0) + count
                self._done, self.width_s = wider, 2 * self.width_s
        first, last = int(begin // self.width_s), int(at // self.width_s)
        share = done / (last - first + 1)
        for number in range(first, last + 1):
            self._done[number] = self._done.get(number, 0.0) + share

    def _interval(self, at: float) -> int:
        return int(at // self.width_s)

    def counts(self) -> tuple[float, list[float]]:
        """Return when the first interval began, in epoch seconds, and the items of each."""
        if not self._done:
            return 0.0, []
        first, last = self._interval(self.since), self._interval(self.until)
        counts = [self._done.get(number, 0.0) for number in range(first, last + 1)]
        return first * self.width_s, counts


class RunView:
    """All stages and all journals of a run."""

    def __init__(
        self,
        paths: RunPaths,
        manifest: Manifest,
        *,
        local: bool = False,
        limit_s: float | None = None,
    ) -> None:
        """``local``: the run is on a filesystem of this kernel alone, where claims are cheaper.

        ``limit_s``: maximum seconds for a look at another worker's file; None: no limit.
        """
        self.paths = paths
        self.probes = Probes(limit_s)
        self.stages = {
            spec.name: StageView(paths, spec, local=local, probes=self.probes)
            for spec in manifest.stages
        }
        self.readers: dict[str, JournalReader] = {}
        self.pace: dict[str, deque[tuple[int, float]]] = {}
        """Worker -> (items done, seconds) of the last unit runs or lines read."""
        self.throughput = Throughput()
        self._progress: dict[str, object] = {}
        self._moving: set[str] = set()
        self._failures: dict[Ref, dict[str, Any]] = {}
        self.unreadable: dict[str, OSError] = {}
        """Worker -> error from its journal, or from a file that its lines need; it is skipped."""

    def poll(self) -> None:
        """Read everything that is new: logs first, so that journal lines find their units."""
        self.poll_logs()
        self.poll_journals()

    def poll_logs(self) -> None:
        for stage in self.stages.values():
            stage.poll_log()

    def poll_claims(self) -> None:
        for stage in self.stages.values():
            stage.claims.refresh()

    def poll_journals(self) -> None:
        """Read what all workers wrote since the last call."""
        for name in files.list_names(self.paths.journals):
            if name.endswith(".jsonl"):
                self.poll_journal(name.removesuffix(".jsonl"))

    def poll_journal(self, worker: str) -> None:
        """Read what one worker wrote since the last call.

        A journal that cannot be read now counts as shorter, which only costs repeated work.
        """
        try:
            self._read_journal(worker)
        except OSError as error:
            self.unreadable[worker] = error
        else:
            self.unreadable.pop(worker, None)

    def poll_if_moved(self, worker: str, progress: object) -> bool:
        """Read a worker's journal if its ``progress`` changed; return whether it was read.

        The worker's lines precede its heartbeat, but a release may follow it. So the journal is
        read once more after the last change. None: the progress is not known.
        """
        moved = progress is None or progress != self._progress.get(worker)
        read = moved or worker in self._moving
        if read:
            self.poll_journal(worker)
        self._progress[worker] = progress
        (self._moving.add if moved else self._moving.discard)(worker)
        return read

    def await_journals(self) -> None:
        """Read the journals for which the file server has not answered, however long it takes."""
        timeouts = ProbeTimeoutError
        while unanswered := [w for w, e in self.unreadable.items() if isinstance(e, timeouts)]:
            self.probes.wait()
            for worker in unanswered:
                self.poll_journal(worker)

    def line(self, ref: Ref) -> dict[str, Any] | None:
        """Read one journal line back; None if it is damaged now, OSError if it cannot be read."""
        lines = read_lines(self.paths.journal(ref.worker), ref.start, ref.end)
        return next((line.record for line in lines), None)

    def failure(self, ref: Ref) -> dict[str, Any] | None:
        """As :meth:`line`, for views that show the same failures again and again: reads it once."""
        found = self._failures.get(ref) or self.line(ref)
        if found is not None:
            if len(self._failures) >= _MOST_FAILURES:
                self._failures.clear()
            self._failures[ref] = found
        return found

    def read_size(self, worker: str) -> int:
        """Bytes of a worker's journal when last read; -1 while the file server does not answer."""
        if isinstance(self.unreadable.get(worker), ProbeTimeoutError):
            return -1
        reader = self.readers.get(worker)
        return 0 if reader is None else reader.size

    def presence(self, worker: str) -> Presence | None:
        """Read a worker's presence file; None if that fails or takes too long."""
        return presence_of(self.paths, worker, self.probes)

    def presences(self) -> dict[str, Presence | None]:
        listed = sorted(files.list_names(self.paths.workers))
        names = [name.removesuffix(".json") for name in listed if name.endswith(".json")]
        return {name: self.presence(name) for name in names}

    def reported_sizes(self) -> dict[str, int]:
        found = self.presences().items()
        return {name: presence.journal for name, presence in found if presence is not None}

    def behind(self, reported: dict[str, int]) -> list[str]:
        """Workers whose journals are shorter, as last read, than the sizes they ``reported``."""
        sizes = sorted(reported.items())
        return [worker for worker, size in sizes if size > self.read_size(worker)]

    def _read_journal(self, worker: str) -> None:
        if worker not in self.readers:
            self.readers[worker] = JournalReader(self.paths.journal(worker))
        reader, look = self.readers[worker], self.probes.look
        pace = self.pace.setdefault(worker, deque(maxlen=_PACE))
        for found in reader.poll(lambda: look(JOURNAL, worker, reader.open)):
            record = found.record
            stage_name, _, unit = record["unit"].partition("/")
            stage = self.stages.get(stage_name)
            if stage is None:
                continue
            stage.add(worker, unit, found)
            if isinstance(found, UnitRun):
                done = record["done"]
            elif record["type"] in ("done", "failed", "permanent"):
                if (known := stage.state.units.get(unit)) and known.lacks(record):
                    continue
                done = int(record["type"] == "done")
            else:
                continue
            seconds = record["seconds"]
            if done or isinstance(found, UnitRun):
                pace.append((done, seconds))
            self.throughput.add(record["at"], seconds, done)

    @property
    def complete(self) -> bool:
        return all(stage.complete for stage in self.stages.values())


class Follower:
    """Sees the results of awaited units soon, and eventually those of all units.

    On a shared filesystem it reads the journals of the workers that hold awaited units, when their
    files in ``workers/`` show progress, which takes until their next heartbeat. In the first second
    of a wait it reads these journals at once. It reads all other journals a few at a time, in turn:
    a listing of claims may be a minute old, and a worker's file need not show all progress.
    """

    def __init__(self, view: RunView, *, local: bool) -> None:
        self._view = view
        self._local = local
        self._looks = 0
        self._asked: dict[str, int] = {}
        self._others: list[str] = []

    def look(self, stage: StageView, units: Collection[str], waited_s: float = 0.0) -> float:
        """Read what is new about these units of a stage; return the seconds until the next look.

        ``waited_s`` is how long the caller has waited for the units.
        """
        self._looks += 1
        if self._local or self._looks == 1:
            self._view.poll()
            return pause_local_s(waited_s) if self._local else _LOOK_S
        stage.poll_log(hinted=True)
        stage.claims.refresh()
        holders, first = stage.holders(units), waited_s < _LOOK_S
        soonest = min(_FIRST_S, max(_SOONEST_S, waited_s))
        pause_s, least = (soonest, 1) if first else (_LOOK_S, _LEAST_OTHERS)
        soon = PER_LOOK * len(holders) / max(_LOOK_S, _SOON * waited_s)
        per_s = max(READINGS_PER_S, min(soon, _MOST_PER_S))
        asked = 3 + self._read_holders(stage.state, holders, per_s * pause_s, at_once=first)
        asked += self._read_others(max(least, int(READINGS_PER_S * pause_s) - asked))
        return pause_s if first else max(pause_s, asked / per_s)

    def _read_holders(
        self, state: StageState, holders: Collection[str], most: float, *, at_once: bool
    ) -> int:
        """Read what holders wrote, least recently read first; return the number of files read.

        Files that show a unit as finished do not count: units finish only once.
        """
        asked = 0
        order = sorted(holders, key=lambda one: (self._asked.get(one, 0), one))
        for owner in order[: int(_MOST_PER_S * _LOOK_S)]:
            if asked >= most:
                break
            self._asked[owner] = self._looks
            read, before = 1, len(state.open)
            if at_once:
                self._view.poll_journal(owner)
            else:
                presence = self._view.presence(owner)
                progress = None if presence is None else presence.progress
                read += self._view.poll_if_moved(owner, progress)
            asked += read if len(state.open) == before else 0
        return asked

    def _read_others(self, count: int) -> int:
        if not self._others:
            names = files.list_names(self._view.paths.journals)
            self._others = sorted((one for one in names if one.endswith(".jsonl")), reverse=True)
        for _ in range(min(count, len(self._others))):
            self._view.poll_journal(self._others.pop().removesuffix(".jsonl"))
        return count
