"""What a worker does next: a fresh unit, or one that died or was given back (rules R3, R15)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.queue.affinity import FreshUnits

if TYPE_CHECKING:
    from hpc_toolkit.clock import Clock
    from hpc_toolkit.queue.leases import Liveness, Verdict
    from hpc_toolkit.queue.units import Unit
    from hpc_toolkit.queue.view import RunView, StageView

_LISTING_S = 0.5


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

    def __init__(self, view: RunView, liveness: Liveness, clock: Clock, worker: str) -> None:
        self._view = view
        self._liveness = liveness
        self._clock = clock
        self._worker = worker
        self._random = random.Random(worker)
        self._fresh = {name: FreshUnits(worker) for name in view.stages}
        self._known = dict.fromkeys(view.stages, 0)
        self._listed_at = float("-inf")
        self._gone: set[str] = set()
        self.living = 0
        """Workers that lived when deaths were last looked for."""

    def fresh(self, loaded: tuple[str, str | None]) -> Assignment | None:
        """Claim a unit that nobody claimed before; ``loaded`` is the (stage, group) at hand."""
        for name, stage in self._view.stages.items():
            self._take_in(name, stage)
            group = loaded[1] if loaded[0] == name else None
            units = self._fresh[name]
            while (unit := units.choose(group, stage.durations.seconds_of)) is not None:
                if stage.claims.generation(unit.name):
                    continue
                if stage.claims.create(unit.name, 1, self._worker):
                    return Assignment(stage, unit, 1)
                self._list_claims()
        return None

    def _take_in(self, name: str, stage: StageView) -> None:
        stage.poll_log()
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

    def notice_deaths(self) -> bool:
        """Whether a worker died since the last call; counts those that live."""
        died, self.living = False, 0
        for worker in self._liveness.names():
            verdict = self._liveness.verdict(worker)
            self.living += verdict.alive
            if verdict.alive:
                self._gone.discard(worker)  # it was silent, and not dead
            elif not verdict.finished and worker not in self._gone:
                self._gone.add(worker)
                died = True
        return died

    def takeover(self) -> Assignment | None:
        """Claim the next generation of a unit that is free and has a pending item."""
        self._view.poll_claims()
        self._view.poll()
        for stage in self._view.stages.values():
            names = [name for name in stage.state.open if stage.claims.generation(name) > 0]
            self._random.shuffle(names)
            for name in names:
                assignment = self._try_takeover(stage, name)
                if assignment is not None:
                    return assignment
        return None

    def again(self, last: Assignment) -> Assignment | None:
        """Claim the next generation of a unit that this worker just gave back."""
        self._view.poll_journal(self._worker)
        if last.unit.name not in last.stage.state.open:
            return None
        return self._try_takeover(last.stage, last.unit.name)

    def _try_takeover(self, stage: StageView, name: str) -> Assignment | None:
        generation = stage.claims.generation(name)
        unit = stage.unit(name)
        released = generation in stage.state.units[name].released
        owner = "" if released else self._owner(stage, name, generation)
        if owner == self._worker:
            # Ours by a lost reply, or the pass was never begun: work on it or nobody can.
            return Assignment(stage, unit, generation)
        verdict = None if released else self._liveness.verdict(owner)
        if verdict is not None and verdict.alive:
            return None
        if verdict is not None:
            # What it wrote last may have come between our reading and its end.
            self._view.poll_journal(owner)
            if name not in stage.state.open:
                return None
            if generation in stage.state.units[name].released:
                verdict = None  # it died later, and not of an item of this unit
        if not stage.claims.create(name, generation + 1, self._worker):
            return None
        died = (owner, verdict) if verdict is not None and not verdict.finished else None
        return Assignment(stage, unit, generation + 1, died)

    @staticmethod
    def _owner(stage: StageView, name: str, generation: int) -> str:
        try:
            return stage.claims.owner(name, generation)
        except OSError:
            # Timed like a silent owner, from the moment it was first seen.
            return f"unreadable-{stage.paths.name}-{name}.{generation}"
