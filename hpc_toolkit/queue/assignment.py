"""Pick a worker's next unit: fresh, released, or left by a dead worker (rules R3, R15)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hpc_toolkit.queue.affinity import FreshUnits
from hpc_toolkit.queue.pacing import PER_LOOK
from hpc_toolkit.queue.wants import STAGES
from hpc_toolkit.queue.watch import LeftUnits, Watch
from hpc_toolkit.system.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from hpc_toolkit.queue.control import FreeUnit
    from hpc_toolkit.queue.following import Following
    from hpc_toolkit.queue.leases import Liveness, Verdict
    from hpc_toolkit.queue.pacing import Pacing
    from hpc_toolkit.queue.units import Unit
    from hpc_toolkit.queue.view import RunView, StageView
    from hpc_toolkit.rundir.layout import StageSpec
    from hpc_toolkit.system.clock import Clock

_LISTING_S = 0.5
_FEW = 64
_FORMERS = 50
"""Names of this worker with journals that are read before it takes a unit back."""
_FULL_EVERY = 16
"""One scan in this many reads every journal; a smaller part if there are many journals."""


class Assignment(Record):
    """A generation of a unit that this worker owns."""

    stage: StageView
    unit: Unit
    generation: int
    died: tuple[str, Verdict] | None = None
    """The previous generation's owner, if it died without releasing the unit."""

    @property
    def name(self) -> str:
        return f"{self.stage.paths.name}/{self.unit.name}"


class Picker(Record, frozen=False, stateful=True):
    """Decides which unit one worker claims next, and claims it.

    ``shared``: other hosts use the filesystem, so that reading a journal is expensive.
    ``restarted``: the worker's job ran before, so that units were probably left half done.
    """

    view: RunView
    liveness: Liveness
    clock: Clock
    worker: str
    shared: bool = False
    rank: int = 0
    world_size: int = 1
    restarted: bool = False
    holds: Callable[[StageSpec, int], bool] = lambda _spec, _growth: True
    """Whether the worker has what items need whose needs grew this number of times."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.worker)
        self._fresh: dict[tuple[str, str], FreshUnits] = {}
        """The units of each stage and want, those that come first at the beginning."""
        for name in self.view.stages:
            self._units_of(name, STAGES)
        self._known = dict.fromkeys(self.view.stages, 0)
        self.following: dict[str, Following] = {}
        """The stages whose items are made of results of others."""
        if any(stage.spec.after for stage in self.view.stages.values()):
            from hpc_toolkit.queue.graph import following  # few runs have such stages

            self.following = following(self.view)
        self._listed_at = float("-inf")
        self.watch = Watch(self.liveness, self.worker, self.clock)
        self.left = LeftUnits(self.view, self.watch)
        self._scans = 0
        self._left_read = False
        self._owners: dict[str, Verdict] = {}
        self.help_first = False
        """Whether to look for units of others before claiming new ones.

        Set when the unit of a dead worker is not known, or when a host asks other
        hosts to try its items.
        """
        self.polled = 0
        """Number of logs that the last look for items polled."""
        self.operations = 0
        """Metadata operations of the last scan, approximately."""

    def next(self, loaded: tuple[str, str | None], pacing: Pacing) -> Assignment | None:
        """Claim a unit; None if none can be found now. ``loaded``: the loaded (stage, group)."""
        found = None
        if self.left.due or self.help_first or self.restarted:
            found = self._half_done(loaded, pacing)
        return found or self._fresh_or_free(loaded, pacing)

    def _half_done(self, loaded: tuple[str, str | None], pacing: Pacing) -> Assignment | None:
        # All workers count a half-done group as begun, and would leave it until the very end.
        found = self.fresh(loaded, news=self.restarted, elsewhere=False)
        if found is None and self.restarted:
            # Units that the job had begun when it was interrupted; no worker remembers them.
            found = self.left_behind(pacing.looks_at_start)
            self.restarted = found is not None
        if found is None and self.left.due:
            found = self._take_told()
        if found is None and self.help_first:
            found = self.takeover()
            self.help_first = found is not None  # it may have held more units
        return found

    def _take_told(self) -> Assignment | None:
        """Claim a unit whose owner is dead, as this or another worker saw."""
        self._owners.clear()
        for stage, unit in self.left.choose():
            found = self._try_takeover(stage, unit) if self.holds_some(stage, unit) else None
            if found is not None:
                return found
        return None

    def _fresh_or_free(self, loaded: tuple[str, str | None], pacing: Pacing) -> Assignment | None:
        if pacing.poll_due:
            self.look_for_items(pacing)
        found = self.fresh(loaded, news=False)
        if found is None and not pacing.local:
            found = self.take_released()
        if found is not None or self.reported_complete or not pacing.scan_due():
            return found
        found = self.takeover()
        pacing.scanned(found=found is not None, operations=self.operations)
        return found

    @property
    def entries(self) -> int:
        """Entries of the logs that this worker has read, and reports that nothing is left."""
        logs = [stage.log for stage in self.view.stages.values()]
        return sum(log.length + log.reported_complete for log in logs)

    def look_for_items(self, pacing: Pacing) -> None:
        """Read what was added to the logs."""
        self.polled = 0
        for name, stage in self.view.stages.items():
            self._take_in(name, stage, news=True)
        growing = any(not stage.log.sealed for stage in self.view.stages.values())
        pacing.polled(self.polled, growing=growing)

    def fresh(
        self, loaded: tuple[str, str | None], *, news: bool = True, elsewhere: bool = True
    ) -> Assignment | None:
        """Claim a unit that no worker claimed before; ``loaded`` is the loaded (stage, group).

        Without ``news``, consider only units that are known; without ``elsewhere``, only units of
        the loaded group.
        """
        self.polled = 0
        for name, stage in self.view.stages.items():
            # What this worker added itself is known without a poll.
            self._take_in(name, stage, news=news)
        for (name, want), units in self._fresh.items():
            stage = self.view.stages[name]
            group = loaded[1] if loaded[0] == name else None
            if not self.holds(stage.specs[want], 0):
                continue
            while elsewhere or units.has(group):
                unit = units.choose(group, stage.durations.precedence, stage.kind_of)
                if unit is None:
                    break
                if stage.claims.generation(unit.name):
                    self._prune(name, stage)  # each choice looks at all groups that are left
                    continue
                if stage.claims.create(unit.name, 1, self.worker):
                    return Assignment(stage, unit, 1)
                self._list_claims()
        return None

    @property
    def has_fresh(self) -> bool:
        """Whether it knows of units that no worker seems to have claimed."""
        return any(self._fresh.values())

    def next_group(self, assignment: Assignment) -> str | None:
        """Key of the group to begin after the unit's group; see :meth:`FreshUnits.next_group`."""
        stage, unit = assignment.stage, assignment.unit
        units = self._units_of(stage.paths.name, stage.specs.want(unit))
        return units.next_group(stage.group_of(unit), stage.durations.precedence)

    def _units_of(self, name: str, want: str) -> FreshUnits:
        if (name, want) not in self._fresh:
            self._fresh[name, want] = FreshUnits(self.worker, self.rank, self.world_size)
            self._fresh = dict(sorted(self._fresh.items(), key=lambda one: self._rank(*one[0])))
        return self._fresh[name, want]

    def _rank(self, name: str, want: str) -> tuple[float, ...]:
        """Low for what comes first: a larger priority, then needs that fewer workers fulfil."""
        spec = self.view.stages[name].specs[want]
        needs = spec.needs or {}
        more = (-needs.get(key, 0) for key in ("nodes", "gpus", "memory", "cpus"))
        return (-(spec.priority or 0), *more, -len(needs), [*self.view.stages].index(name))

    def _take_in(self, name: str, stage: StageView, *, news: bool) -> None:
        if stage.complete and (not stage.spec.after or self.view.complete):
            return  # only a retry can follow, and the next scan sees it
        if news:
            self.polled += 1
            stage.poll_log(hinted=self.shared and stage.log.length > 0)
        segments = stage.log.segments
        if len(segments) == self._known[name]:
            return
        new = list(segments.values())[self._known[name] :]
        self._known[name] = len(segments)
        for segment in new:
            for want, units in segment.units_by_want():
                self._units_of(name, want).add(units, stage.group_of)
        self._prune(name, stage)

    def _prune(self, name: str, stage: StageView) -> None:
        for units in (units for (of, _), units in self._fresh.items() if of == name):
            units.prune(lambda unit: stage.claims.generation(unit.name) > 0)

    def _list_claims(self) -> None:
        """List the claims after a lost race, but not once per race."""
        now = self.clock.monotonic()
        if now - self._listed_at < _LISTING_S:
            return
        self._listed_at = now
        for name, stage in self.view.stages.items():
            stage.claims.refresh()
            self._prune(name, stage)

    @property
    def reported_complete(self) -> bool:
        """Whether every stage is complete, as this or another worker saw (rules R9, R17)."""
        stages = self.view.stages.values()
        if not self.following:
            return all(s.complete or s.log.reported_complete for s in stages)
        # A report is of all stages, and only what this worker read shows whether items are to come.
        reported = (s.log.reported_complete or (s.complete and not s.spec.after) for s in stages)
        return all(reported) or (
            self.view.complete and all(one.is_over for one in self.following.values())
        )

    def holds_some(self, stage: StageView, unit: str) -> bool:
        spec = stage.specs.of(stage.unit(unit))
        return any(self.holds(spec, growth) for growth in stage.state.growths(unit))

    def notice_deaths(
        self, at_most: int | None = None, mates: Collection[str] = ()
    ) -> list[FreeUnit]:
        """Look for dead workers, as :meth:`Watch.look`; their units come first. Returns these."""
        found, unknown = self.left.look(at_most, mates)
        # A scan finds what a worker claimed last, but not among the journals of thousands.
        self.help_first |= unknown > 0 and (not self.shared or self.watch.living <= _FEW)
        return found

    def takeover(self) -> Assignment | None:
        """Claim the next generation of a unit that is free and has a pending item."""
        self._owners.clear()
        self.view.poll_claims()
        if self.shared and self._scans % max(_FULL_EVERY, len(self.view.readers) // _FULL_EVERY):
            self.view.poll_logs()
            journals = self._read_owners()
        else:
            self.view.poll()
            journals = len(self.view.readers)
        self._scans += 1
        found = self._take_free()
        self.operations = 4 * len(self.view.stages) + journals + PER_LOOK * len(self._owners)
        return found

    def left_behind(self, at_most: int) -> Assignment | None:
        """Like :meth:`takeover`, after a job restart, but reads only ``at_most`` workers' journals.

        Units that only other journals show as begun are left for other workers to find.
        """
        names = self.liveness.names()
        if len(names) <= at_most:
            return self.takeover()
        self._owners.clear()
        if not self._left_read:
            self._left_read = True
            self.view.poll_logs()
            for name in self._random.sample(names, at_most):
                self.view.poll_journal(name)
        self.view.poll_claims()
        # A unit of which no line was read may be open only because of that.
        return self._take_free(lambda stage: stage.state.begun)

    def take_released(self) -> Assignment | None:
        """Like :meth:`takeover`, but only among units that this worker knows to be released.

        The search reads no files, so a worker that seldom scans still finds its own such units.
        """
        return self._take_free(lambda stage: filter(stage.is_released, stage.state.begun))

    def _read_owners(self) -> int:
        """Read journals of workers that hold open units and made progress; return how many."""
        read = 0
        stages = self.view.stages.values()
        for owner in sorted({one for stage in stages for one in stage.holders(stage.state.open)}):
            self._verdict(owner)
            read += self.view.poll_if_moved(owner, self.liveness.progress(owner))
        return read

    def _verdict(self, owner: str) -> Verdict:
        """Judge an owner, with one look per scan."""
        if owner not in self._owners:
            self._owners[owner] = self.liveness.verdict(owner)
        return self._owners[owner]

    def _take_free(
        self, among: Callable[[StageView], Iterable[str]] = lambda stage: stage.state.open
    ) -> Assignment | None:
        found: dict[tuple[str, str], list[str]] = {}
        for name, stage in self.view.stages.items():
            # Sorted, because the order of a set differs by process; chance must come from the seed.
            units, claimed = stage.state.open, stage.claims.newest
            for unit in sorted(one for one in among(stage) if one in units and one in claimed):
                want = stage.specs.want(stage.unit(unit))
                self._units_of(name, want)
                found.setdefault((name, want), []).append(unit)
        for key in (key for key in self._fresh if key in found):
            stage = self.view.stages[key[0]]
            self._random.shuffle(found[key])
            for unit in found[key]:
                assignment = self._try_takeover(stage, unit)
                if assignment is not None:
                    return assignment
        return None

    def take_back(self, stage_name: str, name: str, formers: list[str]) -> Assignment | None:
        """Claim the next generation of a unit that former names of this worker held.

        None: another worker was faster, or nothing of it is pending.
        """
        stage = self.view.stages[stage_name]
        self._owners.clear()
        stage.poll_log()
        stage.claims.refresh()
        # Names that could not claim anything may have written results of the names before.
        owners = {stage.owner(name, n) for n in range(1, stage.claims.generation(name) + 1)}
        for worker in (*formers[-_FORMERS:], *owners, self.worker):
            self.view.poll_journal(worker)
        return self._try_takeover(stage, name)

    def again(self, last: Assignment) -> Assignment | None:
        self._owners.clear()
        name = last.unit.name
        # Earlier owners may have written meanwhile that an item of this unit kills.
        for generation in range(1, last.generation + 1):
            self.view.poll_journal(last.stage.owner(name, generation))
        return self._try_takeover(last.stage, name)

    def _try_takeover(self, stage: StageView, name: str) -> Assignment | None:
        if name not in stage.state.open or not self.holds_some(stage, name):
            return None
        generation = stage.claims.generation(name)
        unit = stage.unit(name)
        released = generation in stage.state.units[name].released
        owner = "" if released else stage.owner(name, generation)
        if owner == self.worker:
            # Ours by a lost reply, or its run never began: if we skip it, no worker can run it.
            return Assignment(stage, unit, generation)
        verdict = None if released else self._verdict(owner)
        if verdict is not None and verdict.alive:
            return None
        if verdict is not None or self.shared:
            # The owner may have written more between our last reading and its end.
            up_to_date = self._read_holders(stage, name, generation)
            if name not in stage.state.open or not up_to_date:
                return None
            if generation in stage.state.units[name].released:
                verdict = None  # it died after the release, so no item of this unit is suspect
        if not stage.claims.create(name, generation + 1, self.worker):
            return None
        died = (owner, verdict) if verdict is not None and not verdict.finished else None
        return Assignment(stage, unit, generation + 1, died)

    def _read_holders(self, stage: StageView, name: str, generation: int) -> bool:
        """Read the journals of a unit's owners; return whether they show all reported bytes.

        If scans do not read every journal, the owners of all generations are read, else only the
        newest. A copy that is too old would cause their results to be computed again.
        """
        up_to_date = True
        for number in range(1 if self.shared else generation, generation + 1):
            owner = stage.owner(name, number)
            self.view.poll_journal(owner)
            size = self.view.read_size(owner)
            up_to_date &= not self.liveness.is_behind(owner, size)
        return up_to_date
