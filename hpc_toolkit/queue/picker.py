"""What a worker does next: a fresh unit, or one that died or was given back (rules R3, R15)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.queue.affinity import FreshUnits
from hpc_toolkit.queue.pacing import PER_LOOK

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_toolkit.queue.leases import Liveness, Verdict
    from hpc_toolkit.queue.units import Unit
    from hpc_toolkit.queue.view import RunView, StageView
    from hpc_toolkit.system.clock import Clock

_LISTING_S = 0.5
_FULL_EVERY = 16
"""Scans from one that reads every journal to the next, or as many as make it a small part."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A generation of a unit that is ours."""

    stage: StageView
    unit: Unit
    generation: int
    died: tuple[str, Verdict] | None = None
    """The owner of the generation before, if it died without giving the unit back."""

    @property
    def name(self) -> str:
        return f"{self.stage.paths.name}/{self.unit.name}"


class Picker:
    """Chooses and claims units for one worker."""

    def __init__(
        self,
        view: RunView,
        liveness: Liveness,
        clock: Clock,
        worker: str,
        *,
        shared: bool = False,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        self._view = view
        self._shared = shared
        self._liveness = liveness
        self._clock = clock
        self._worker = worker
        self._random = random.Random(worker)
        self._fresh = {name: FreshUnits(worker, place) for name in view.stages}
        self._known = dict.fromkeys(view.stages, 0)
        self._listed_at = float("-inf")
        self._gone: set[str] = set()
        self._watched: dict[str, int | None] = {}
        self._scans = 0
        self._left_read = False
        self._owners: dict[str, Verdict] = {}
        self._progress: dict[str, object] = {}
        self._moving: set[str] = set()
        self.living = 0
        """Workers that lived when deaths were last looked for."""
        self.polled = 0
        """Logs that were asked for news when a fresh unit was last wanted."""
        self.operations = 0
        """Metadata operations of the last scan, about."""

    def fresh(
        self, loaded: tuple[str, str | None], *, news: bool = True, elsewhere: bool = True
    ) -> Assignment | None:
        """Claim a unit that nobody claimed before; ``loaded`` is the (stage, group) at hand.

        Without ``news`` only among the units that are known, and without ``elsewhere`` only among
        those of that group.
        """
        self.polled = 0
        for name, stage in self._view.stages.items():
            if news:
                self._take_in(name, stage)
            group = loaded[1] if loaded[0] == name else None
            units = self._fresh[name]
            while elsewhere or units.has(group):
                unit = units.choose(group, stage.durations.precedence, stage.kind_of)
                if unit is None:
                    break
                if stage.claims.generation(unit.name):
                    continue
                if stage.claims.create(unit.name, 1, self._worker):
                    return Assignment(stage, unit, 1)
                self._list_claims()
        return None

    def ahead(self, assignment: Assignment) -> str | None:
        """Key of the group that this worker means to begin when that of the unit is at its end, as
        far as it knows without looking; None where others are as likely to begin it."""
        stage = assignment.stage
        units = self._fresh[stage.paths.name]
        return units.ahead(stage.group_of(assignment.unit), stage.durations.precedence)

    def _take_in(self, name: str, stage: StageView) -> None:
        if self._shared and stage.complete:
            return  # a retry alone can follow, which the next scan sees
        self.polled += 1
        stage.poll_log(hinted=self._shared and stage.log.length > 0)
        segments = stage.log.segments
        if len(segments) == self._known[name]:
            return
        if self._known[name] == 0:
            stage.claims.refresh()
        new = list(segments.values())[self._known[name] :]
        self._known[name] = len(segments)
        for segment in new:
            self._fresh[name].add(segment.units, stage.group_of)
        self._prune(name, stage)

    def _prune(self, name: str, stage: StageView) -> None:
        self._fresh[name].prune(lambda unit: stage.claims.generation(unit.name) > 0)

    def _list_claims(self) -> None:
        """After a lost race: see what else is taken, without listing once per race."""
        now = self._clock.monotonic()
        if now - self._listed_at < _LISTING_S:
            return
        self._listed_at = now
        for name, stage in self._view.stages.items():
            stage.claims.refresh()
            self._prune(name, stage)

    @property
    def told_complete(self) -> bool:
        """Whether every stage is complete, as this worker saw or another one told it (rule R9)."""
        return all(s.complete or s.log.told_complete for s in self._view.stages.values())

    def notice_deaths(self, at_most: int | None = None) -> bool:
        """Whether a worker died since the last call; counts those that live.

        Args:
            at_most: look at so many; whoever was silent at the last look is looked at again, so
                that all workers together see every death without looking at everybody each.
        """
        died = False
        names = self._liveness.names()
        looked = names if at_most is None or at_most >= len(names) else self._some(names, at_most)
        alive = 0
        for worker in looked:
            verdict = self._liveness.verdict(worker)
            alive += verdict.alive
            if verdict.alive:
                self._gone.discard(worker)  # it was silent, and not dead
            elif not verdict.finished and worker not in self._gone:
                self._gone.add(worker)
                died = True
        if len(looked) == len(names):
            self.living = alive
        else:
            left = sum(name not in self._gone for name in names if not self._final(name))
            self.living = round(left * (alive + 1) / (len(looked) + 1))
        return died

    def _final(self, worker: str) -> bool:
        return self._liveness.is_final(worker)

    def _some(self, names: list[str], count: int) -> list[str]:
        """Those that did not beat between the last two looks, and others at random."""
        heartbeat = self._liveness.heartbeat
        kept = {
            name: heartbeat(name)
            for name, beat in self._watched.items()
            # Who was looked at once alone has not been silent, nor has it beaten.
            if name not in self._gone and not self._final(name) and beat in (None, heartbeat(name))
        }
        others = [name for name in names if name not in self._watched and not self._final(name)]
        new = self._random.sample(others, min(len(others), max(0, count - len(kept))))
        self._watched = dict(list(kept.items())[:count]) | dict.fromkeys(new)
        return list(self._watched)

    def takeover(self) -> Assignment | None:
        """Claim the next generation of a unit that is free and has a pending item."""
        self._owners.clear()
        self._view.poll_claims()
        if self._shared and self._scans % max(_FULL_EVERY, len(self._view.readers) // _FULL_EVERY):
            self._view.poll_logs()
            journals = self._read_owners()
        else:
            self._view.poll()
            journals = len(self._view.readers)
        self._scans += 1
        found = self._take_free()
        self.operations = 4 * len(self._view.stages) + journals + PER_LOOK * len(self._owners)
        return found

    def left_behind(self, at_most: int) -> Assignment | None:
        """Like :meth:`takeover`, after a restart of the job, among what at most so many workers of
        the run left half done; the later ones are others' to find."""
        names = self._liveness.names()
        if len(names) <= at_most:
            return self.takeover()
        self._owners.clear()
        if not self._left_read:
            self._left_read = True
            self._view.poll_logs()
            for name in self._random.sample(names, at_most):
                self._view.poll_journal(name)
        self._view.poll_claims()
        return self._take_free(_is_begun)

    def take_released(self) -> Assignment | None:
        """Like :meth:`takeover`, among what this worker knows to be given back; it reads nothing of
        others, and so finds what it gave back itself, however seldom it scans."""
        return self._take_free(lambda stage, name: stage.is_released(name))

    def _read_owners(self) -> int:
        """Read the journals of those who hold open units and wrote something; how many it were.

        A worker beats after it wrote, and may release the unit after it beat: so once more.
        """
        read = 0
        for owner in sorted(self._holders()):
            self._verdict(owner)
            progress = self._liveness.progress(owner)
            moved = progress is None or progress != self._progress.get(owner)
            if moved or owner in self._moving:
                self._view.poll_journal(owner)
                read += 1
            self._progress[owner] = progress
            (self._moving.add if moved else self._moving.discard)(owner)
        return read

    def _holders(self) -> set[str]:
        """Who holds an open unit of any stage."""
        stages = self._view.stages.values()
        return {owner for stage in stages for owner in stage.holders(stage.state.open)}

    def _verdict(self, owner: str) -> Verdict:
        """One look at each owner in each scan."""
        if owner not in self._owners:
            self._owners[owner] = self._liveness.verdict(owner)
        return self._owners[owner]

    def _take_free(
        self, among: Callable[[StageView, str], bool] = lambda _stage, _name: True
    ) -> Assignment | None:
        for stage in self._view.stages.values():
            # Sorted, because a set has another order in every process: chance comes from the name.
            names = sorted(name for name in stage.state.open if stage.claims.generation(name) > 0)
            names = [name for name in names if among(stage, name)]
            self._random.shuffle(names)
            for name in names:
                assignment = self._try_takeover(stage, name)
                if assignment is not None:
                    return assignment
        return None

    def again(self, last: Assignment) -> Assignment | None:
        """Claim the next generation of a unit that this worker just gave back."""
        self._owners.clear()
        name = last.unit.name
        # Who held it before may have written meanwhile that an item of it kills.
        for generation in range(1, last.generation + 1):
            self._view.poll_journal(last.stage.owner(name, generation))
        if name not in last.stage.state.open:
            return None
        return self._try_takeover(last.stage, name)

    def _try_takeover(self, stage: StageView, name: str) -> Assignment | None:
        generation = stage.claims.generation(name)
        unit = stage.unit(name)
        released = generation in stage.state.units[name].released
        owner = "" if released else stage.owner(name, generation)
        if owner == self._worker:
            # Ours by a lost reply, or the pass was never begun: work on it or nobody can.
            return Assignment(stage, unit, generation)
        verdict = None if released else self._verdict(owner)
        if verdict is not None and verdict.alive:
            return None
        if verdict is not None or self._shared:
            # What it wrote last may have come between our reading and its end.
            up_to_date = self._read_holders(stage, name, generation)
            if name not in stage.state.open or not up_to_date:
                return None
            if generation in stage.state.units[name].released:
                verdict = None  # it died later, and not of an item of this unit
        if not stage.claims.create(name, generation + 1, self._worker):
            return None
        died = (owner, verdict) if verdict is not None and not verdict.finished else None
        return Assignment(stage, unit, generation + 1, died)

    def _read_holders(self, stage: StageView, name: str, generation: int) -> bool:
        """Read what the owners of a unit wrote: of the newest generation, or where not every
        journal is read, of all. Whether all that they told of is there: a copy that is too old
        would have their results made again."""
        up_to_date = True
        for number in range(1 if self._shared else generation, generation + 1):
            owner = stage.owner(name, number)
            self._view.poll_journal(owner)
            size = self._view.read_size(owner)
            up_to_date &= not self._liveness.is_behind(owner, size)
        return up_to_date


def _is_begun(stage: StageView, name: str) -> bool:
    """Whether a line of a unit was read, so that it is not open for want of reading alone."""
    unit = stage.state.units[name]
    return bool(unit.histories or unit.released)
