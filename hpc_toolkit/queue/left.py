"""What is left of a run, for the decision whether a job starts again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.queue.presence import FINISHED, Presence
from hpc_toolkit.queue.wants import may_need
from hpc_toolkit.system.clock import Clock

if TYPE_CHECKING:
    from hpc_toolkit.queue.view import RunView, StageView

_LOOK_S = 0.5


class Left(NamedTuple):
    """What is left of a run."""

    items: int
    """Items that are not finished."""
    complete: bool
    """Whether all items are finished and none can be added."""
    elsewhere: int
    """``items`` if living workers of other jobs hold every one of them; else 0."""
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
    jobs hold only a part of the items, none of them is watched or counted.
    """
    held = _held(view)
    items = sum(
        len(one.state.pending(name)) for one in view.stages.values() for name in one.state.open
    )
    others: dict[str, Presence] = {}
    for owner in held:
        presence = view.presence(owner)
        own = presence is not None and job is not None and presence.job == job
        if presence is not None and presence.state != FINISHED and not own:
            others[owner] = presence
    elsewhere = 0
    if items and sum(held[owner] for owner in others) == items:
        living = _watched(view, clock, others, watch_s, pause)
        elsewhere = sum(held[owner] for owner in living)
    beyond = _beyond(view, job) if items else 0
    return Left(items, complete=view.complete, elsewhere=elsewhere, beyond=beyond)


def _beyond(view: RunView, job: str | None) -> int:
    """How many pending items need more than any worker of a job has had."""
    left = [one for stage in view.stages.values() for one in pending_needs(stage)]
    if job is None or not left:
        return 0
    from hpc_toolkit.system.needs import unmet  # few runs have needs

    seen = [one for one in view.presences().values() if one is not None and one.job == job]
    had = [one.place["has"] for one in seen if "has" in one.place]
    return sum(items for needs, items in left if unmet(needs, had))


def pending_needs(stage: StageView) -> list[tuple[dict[str, Any], int]]:
    """What pending items need, also after it grew (rule R18), and how many items need that."""
    if not may_need(stage.spec):
        return []
    from hpc_toolkit.system.needs import needs_after

    state, counts = stage.state, Counter[tuple[int, str]]()
    for unit in (state.units[name] for name in state.open):
        want, pending = stage.specs.want(unit.unit), state.pending(unit.unit.name)
        if stage.spec.retry:
            counts.update((state.growth(unit, item), want) for item in pending)
        else:
            counts[0, want] += len(pending)
    found: dict[str, tuple[dict[str, Any], int]] = {}
    for (growth, want), items in sorted(counts.items()):
        needs = needs_after(stage.specs[want], growth)
        found[str(needs)] = needs, items + found.get(str(needs), ({}, 0))[1]
    return [*found.values()]


def _held(view: RunView) -> Counter[str]:
    """How many pending items are in units that each worker holds."""
    held: Counter[str] = Counter()
    for stage in view.stages.values():
        for name in stage.state.open:
            for owner in stage.holders([name]):
                held[owner] += len(stage.state.pending(name))
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
