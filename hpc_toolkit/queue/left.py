"""What is left of a run, and whether it should pause: for workers that leave, and for jobs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.presence import FINISHED, Presence
from hpc_toolkit.queue.state import ItemState
from hpc_toolkit.queue.wants import STAGES, may_need
from hpc_toolkit.rundir.layout import WITHDRAWN
from hpc_toolkit.system.clock import Clock
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from hpc_toolkit.queue.assignment import Picker
    from hpc_toolkit.queue.view import RunView, StageView

_LOOK_S = 0.5
FIRST_ITEMS = 20
"""A run is paused if this many distinct items fail before any is done."""


class Left(NamedTuple):
    """What is left of a run."""

    items: int
    """Items that are not finished."""
    complete: bool
    """Whether all items are finished and none can be added."""
    elsewhere: int
    """``items - beyond`` if living workers of other jobs hold every one of these; else 0."""
    beyond: int = 0
    """Those of ``items`` that need more than any worker of this job has had."""


def what_is_left(
    view: RunView,
    clock: Clock,
    *,
    job: str | None,
    watch_s: float,
    pause: Callable[[float], None] = time.sleep,
) -> Left:
    """Return what is left of a run, for a process of ``job``; the view is not read again.

    A worker of another job counts as living once its heartbeat was seen to change, by this
    process's own clock: the time that another host wrote into a heartbeat decides nothing. This
    takes up to one and a half heartbeat intervals, and at most ``watch_s``. If workers of other
    jobs hold only a part of the items that workers of this job could hold, none of them is watched
    or counted.
    """
    beyond = _beyond(view, job)
    held = _held(view, beyond)
    items = sum(
        len(one.state.pending(name)) for one in view.stages.values() for name in one.state.open
    )
    within = items - sum(beyond.values())
    others: dict[str, Presence] = {}
    for owner in held:
        presence = view.presence(owner)
        own = presence is not None and job is not None and presence.job == job
        if presence is not None and presence.state != FINISHED and not own:
            others[owner] = presence
    elsewhere = 0
    if within and sum(held[owner] for owner in others) == within:
        living = _watched(view, clock, others, watch_s, pause)
        elsewhere = sum(held[owner] for owner in living)
    return Left(items, view.complete, elsewhere, sum(beyond.values()))


def _beyond(view: RunView, job: str | None) -> Counter[tuple[str, str]]:
    """Stage and unit -> how many pending items need more than any worker of a job has had."""
    beyond: Counter[tuple[str, str]] = Counter()
    stages = [(name, one) for name, one in view.stages.items() if may_need(one.spec)]
    if job is None or not any(one.state.open for _, one in stages):
        return beyond
    from hpc_toolkit.system.needs import unmet  # few runs have needs

    seen = [one for one in view.presences().values() if one is not None and one.job == job]
    had = [one.place["has"] for one in seen if "has" in one.place]
    for name, stage in stages:
        for unit in stage.state.open:
            for one in pending_needs(stage, [unit]):
                if one.needs and unmet(one.needs, had):
                    beyond[name, unit] += one.items
    return beyond


class Rest:
    """What is left of a run, as one worker sees it that found nothing to do.

    ``patience_s``: how long others have to start that can hold what this worker's items follow.
    """

    def __init__(self, picker: Picker, patience_s: float) -> None:
        self._picker, self._patience_s = picker, patience_s
        self._look_at = self._stood_at = float("-inf")

    @property
    def is_for_others(self) -> bool:
        """Whether no item is left, or will come, that this worker can hold."""
        left = [one for one in self._picker.view.stages.values() if not one.complete]
        if not left or any(
            self._picker.holds_some(of, one) for of in left for one in of.state.open
        ):
            return False
        coming = [one for one in left if not one.log.sealed and self._may_get(one)]
        # Somebody may add items to a list at any time.
        return all(one.spec.after for one in coming) and (not coming or self._stands_still())

    def _may_get(self, stage: StageView) -> bool:
        """Whether this worker can hold any item that is still to be added to a stage."""
        name, following = stage.paths.name, self._picker.following
        coming = following[name].wants if name in following else {STAGES: 1}
        return any(count and self._picker.holds(stage.specs[of], 0) for of, count in coming.items())

    def _stands_still(self) -> bool:
        """Whether no living worker can hold anything that is left, at two looks in turn."""
        now = self._picker.clock.monotonic()
        if now < self._look_at:
            return False
        before, self._look_at = now - self._stood_at, now + self._patience_s
        if self._goes_on():
            return False
        self._stood_at = now
        return before < 3 * self._patience_s

    def _goes_on(self) -> bool:
        from hpc_toolkit.system.needs import unmet  # few runs have stages that follow others

        view, liveness = self._picker.view, self._picker.liveness
        needs = [one.needs for stage in view.stages.values() for one in pending_needs(stage)]
        if not needs:
            return True  # what follows is about to be added
        others = (one for one in liveness.names() if one != self._picker.worker)
        living = (view.presence(one) for one in others if liveness.verdict(one).alive)
        places = (one.place.get("has", {}) for one in living if one is not None)
        return any(not unmet(one, [has]) for has in places for one in needs)


class Pending(NamedTuple):
    """What pending items need, also after it grew (rule R18)."""

    needs: dict[str, Any]
    items: int
    """How many items need that; not counted if the stage has no needs."""
    units: int
    """Units with such items."""


def pending_needs(stage: StageView, units: Collection[str] | None = None) -> list[Pending]:
    """What the pending items of a stage, or of open ``units`` of it, need."""
    if not may_need(stage.spec):
        return [Pending({}, 0, len(stage.state.open))] if stage.state.open else []
    from hpc_toolkit.system.needs import needs_after

    state, found = stage.state, dict[str, Pending]()
    for name in state.open if units is None else units:
        unit, spec = state.units[name], stage.specs.of(stage.unit(name))
        pending = state.pending(name)
        grown = Counter(state.growth(unit, one) for one in pending if spec.retry)
        for growth, items in (grown or {0: len(pending)}).items():
            needs = needs_after(spec, growth)
            before = found.get(str(needs), Pending({}, 0, 0))
            found[str(needs)] = Pending(needs, before.items + items, before.units + 1)
    return [found[text] for text in sorted(found)]


def _held(view: RunView, beyond: Counter[tuple[str, str]]) -> Counter[str]:
    """How many pending items, less those ``beyond``, are in units that each worker holds."""
    held: Counter[str] = Counter()
    for of, stage in view.stages.items():
        for name in stage.state.open:
            for owner in stage.holders([name]):
                held[owner] += len(stage.state.pending(name)) - beyond[of, name]
    return held


def _watched(
    view: RunView,
    clock: Clock,
    others: dict[str, Presence],
    watch_s: float,
    pause: Callable[[float], None],
) -> set[str]:
    """Those of ``others`` whose heartbeats change."""
    living: set[str] = set()
    longest = max(1.5 * one.interval_s for one in others.values())
    ends = clock.monotonic() + min(watch_s, longest)
    while len(living) < len(others) and (rest_s := ends - clock.monotonic()) > 0:
        pause(min(_LOOK_S, rest_s))
        for owner, before in others.items():
            now = view.presence(owner)
            if now is not None and now.heartbeat != before.heartbeat:
                living.add(owner)
    return living


def parse_max_failures(text: str) -> tuple[float, bool]:
    """Parse ``N`` or ``P%`` into (number, whether it is a percentage); else ConfigError."""
    number, percent = str(text).removesuffix("%"), str(text).endswith("%")
    try:
        value = float(number) if percent else int(number)
    except ValueError:
        value = -1
    if not 0 <= value <= (100 if percent else math.inf):
        message = f"--max-failures {text!r} is neither a count nor a share"
        raise ConfigError(message, hint="such as 50 or 5%; 100% never pauses")
    return value, percent


def pause_reason(stage: StageView) -> str:
    """Why a stage should be paused, by the journals read so far; "" if it should go on."""
    done, hurt, failed, total = _count(stage)
    limit = stage.spec.max_failures
    if limit is None:
        if done == 0 and hurt >= FIRST_ITEMS:
            return f"the first {hurt} items of stage {stage.paths.name!r} all failed"
        return ""
    number, percent = parse_max_failures(limit)
    if failed > (number * total / 100 if percent else number):
        return (
            f"{counted(failed, 'item')} of stage {stage.paths.name!r} failed; the limit is {limit}"
        )
    return ""


def _count(stage: StageView) -> tuple[int, int, int, int]:
    """(done, items with a failure that counts and no result, failed, total)."""
    state, done, hurt, failed, total = stage.state, 0, 0, 0, 0
    for unit in state.units.values():
        total += unit.unit.count
        if unit.clean is not None:
            done += unit.unit.count
            continue
        for item, history in unit.histories.items():
            found = state.item_state(unit, item)
            done += found is ItemState.DONE
            failed += found is ItemState.FAILED
            if any(ref.worker.startswith(WITHDRAWN) for ref in history.failures.values()):
                failed -= found is ItemState.FAILED
                continue
            floor = state.floor(unit.unit.entry, item)
            hurt += found is not ItemState.DONE and history.attempts(floor) > 0
    return done, hurt, failed, total
