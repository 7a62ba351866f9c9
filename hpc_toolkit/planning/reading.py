"""Read from the files of a run what is left and what was seen of it; write nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from zlib import crc32

from hpc_toolkit.bandit import Pull
from hpc_toolkit.campaign.decisions import EXHAUSTIVE, Decision, left_over, read_decisions
from hpc_toolkit.campaign.search import as_decided
from hpc_toolkit.campaign.settings import METRICS, PREPARE, TASKS, Campaign, read_settings
from hpc_toolkit.planning.work import Batch, Seen, StageWork, Work, context
from hpc_toolkit.queue.graph import following
from hpc_toolkit.queue.items import Item
from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.queue.units import Unit, UnitReader
from hpc_toolkit.queue.view import RunView, StageView
from hpc_toolkit.results.workers import ATTEMPTS, living_workers, records_of
from hpc_toolkit.system.clock import Clock
from hpc_toolkit.system.quantities import HOUR_S, counted
from hpc_toolkit.system.ranks import boot_id, host_name

_ALL = "The campaign evaluates all arms in the end; all of them are counted."
_UNBOUNDED = "Nothing says how many arms the search will request: those to come are left out."


class _Stage:
    """A stage while journals are read, and its items by ``reader``."""

    def __init__(self, view: StageView, reader: UnitReader) -> None:
        self.view, self._reader = view, reader
        self.seen, self.loads_s, self.overheads_s = list[Seen](), list[float](), list[float]()
        self.work = StageWork(
            name=view.spec.name,
            group_by=view.spec.group_by,
            seen=self.seen,
            loads_s=self.loads_s,
            overheads_s=self.overheads_s,
        )
        segments = view.log.segments
        counts = accumulate((one.count for one in segments.values()), initial=0)
        self.starts = dict(zip(segments, counts, strict=False))
        """The place of the first item of each log entry in the list of the stage."""
        self._units: dict[str, list[Item]] = {}

    def items(self, unit: Unit) -> list[Item]:
        if unit.name not in self._units:
            segment = self.view.log.segments[unit.entry]
            self._units[unit.name] = self._reader.read(segment, unit)[1]
        return self._units[unit.name]

    def groups(self, items: Sequence[Item]) -> int:
        return len(set(map(self.work.group_of, items)))

    def context(self, unit: Unit) -> str:
        return context(self.view.spec.name, self.view.group_of(unit) or "")


@dataclass(slots=True)
class _Journal:
    """The state of one worker while its journal is read."""

    worker: str = ""
    loaded: str = ""
    """Its loaded context (:func:`hpc_toolkit.planning.work.context`); "" before its first unit."""
    loads: int = 0
    at: float = 0.0
    """Epoch seconds of its last line, by its own clock."""
    unit: str = ""
    """The unit of its last line, unless that line released the unit."""
    loads_now: bool = False
    """Whether it loaded the context of this unit."""
    spent_s: float = 0.0
    """Seconds spent on the items of this unit."""

    def read(self, view: RunView, stages: dict[str, _Stage]) -> None:
        for record in records_of(view, self.worker):
            name, _, unit_name = record["unit"].partition("/")
            stage = stages.get(name)
            known = None if stage is None else stage.view.state.units.get(unit_name)
            if stage is None or known is None or known.lacks(record):
                continue
            self.at = record["at"]
            if record["type"] in ATTEMPTS:
                self._attempt(stage, stage.view.unit(unit_name), record)
            elif record["type"] == "release":
                if self.unit == record["unit"]:
                    self._release(stage, stage.view.unit(unit_name), record["seconds"])
                self.unit = ""

    def _attempt(self, stage: _Stage, unit: Unit, record: dict[str, Any]) -> None:
        if self.unit != record["unit"]:
            self.unit, self.spent_s = record["unit"], 0.0
            self.loads_now = stage.context(unit) != self.loaded
            self.loads, self.loaded = self.loads + self.loads_now, stage.context(unit)
        seconds = record["seconds"]
        self.spent_s += seconds
        stage.work.attempts += 1
        stage.work.retried += record["type"] == "failed"
        if record["type"] == "done":
            item = stage.items(unit)[record["item"] - unit.first]
            place = stage.starts[unit.entry] + record["item"]
            group = stage.work.group_of(item)
            stage.seen.append(Seen(item, group, seconds, self.worker, self.loads, place))

    def _release(self, stage: _Stage, unit: Unit, seconds: float) -> None:
        beside_s = max(0.0, seconds - self.spent_s)
        if self.loads_now:
            groups = stage.groups(stage.items(unit))
            stage.loads_s += [beside_s / groups] * groups
        else:
            stage.overheads_s.append(beside_s)


def read_work(
    view: RunView,
    clock: Clock,
    *,
    given: str,
    campaign: dict[str, Any] | None = None,
    alive: set[str] | None = None,
) -> Work:
    """Bring the view up to date and read what is left of a run, and all journals.

    The clock dates the last actions of workers on this host; ``given`` is the run's path as
    messages name it, and ``campaign`` the settings of a campaign in run.json. ``alive`` are the
    living workers; None: look.
    """
    view.poll_claims()
    alive = living_workers(view, clock) if alive is None else alive
    view.poll()
    with closing(UnitReader()) as reader:
        stages = {name: _Stage(stage, reader) for name, stage in view.stages.items()}
        seen = view.presences()
        journals = {name: _Journal(name) for name in {*view.readers, *alive}}
        for worker in sorted(view.readers):
            journals[worker].read(view, stages)
        ages = {name: _age_s(clock, seen.get(name), journals[name]) for name in alive}
        total = sum(
            unit.unit.count for s in view.stages.values() for unit in s.state.units.values()
        )
        known = _with_following(view, [_work(stage, journals, ages) for stage in stages.values()])
        work = Work(
            run=given,
            at=clock.wall(),
            stages=known,
            workers={name: journals[name].loaded for name in sorted(alive)},
            done=total - sum(len(stage.left) - stage.coming for stage in known),
            sealed=campaign is not None
            or all(stage.log.sealed or stage.spec.after for stage in view.stages.values()),
        )
        if campaign is not None:
            work = _with_rest(work, view, campaign)
        return replace(work, stages=tuple(stage for stage in work.stages if stage.left))


def _age_s(clock: Clock, presence: Presence | None, journal: _Journal) -> float:
    """Return the seconds since a worker's last line or its start, using only its host's clock."""
    if presence is None:
        return 0.0
    near = (presence.host, presence.boot) == (host_name(), boot_id())
    now = clock.wall() if near else presence.at
    return max(0.0, now - max(journal.at, presence.started))


def _work(stage: _Stage, journals: dict[str, _Journal], ages: dict[str, float]) -> StageWork:
    view = stage.view
    left: list[Item] = []
    batches: list[Batch] = []
    for name in view.state.units:
        order = view.state.running_order(name)
        if not order:
            continue
        unit = view.unit(name)
        items = [stage.items(unit)[position - unit.first] for position in order]
        batch = Batch(
            view.group_of(unit) or "",
            len(left),
            len(order),
            loads=stage.groups(items),
            place=stage.starts[unit.entry] + order[0],
        )
        generation = view.claims.generation(name)
        holder = view.owner(name, generation) if generation else None
        if holder in ages and not view.is_released(name):
            journal = journals[holder]
            begun = journal.unit == f"{view.spec.name}/{name}"
            loading = not begun and stage.context(unit) != journal.loaded
            batch = replace(batch, holder=holder, age_s=ages[holder], loading=loading)
        batches.append(batch)
        left += items
    return replace(stage.work, left=left, batches=batches)


def _with_following(view: RunView, stages: list[StageWork]) -> tuple[StageWork, ...]:
    """Add the items that items left will make, one each; how many others make is not known."""
    found: dict[str, StageWork] = {}
    for stage in stages:
        spec = view.stages[stage.name].spec
        made = stage
        if spec.after == (stage.name,):
            made = stage.with_rounds(following(view)[stage.name].rounds())
        elif spec.after and spec.by is None and (before := found[spec.after[0]]).left:
            made = stage.with_rounds([[{**item} for item in before.left]])
        found[stage.name] = made
    return tuple(found.values())


def _with_rest(work: Work, view: RunView, settings: dict[str, Any]) -> Work:
    """Add the items that the rest of a campaign will request.

    The log of the view must have been read. ``settings`` are those of the campaign in run.json.
    """
    campaign = read_settings(view.paths, settings)
    decisions = read_decisions(view.stages[TASKS].log.segments.values())
    campaign = as_decided(campaign, decisions)
    search, names = campaign.search, campaign.tasks.names
    whole: dict[str, list[Item]] = {}
    if METRICS in view.stages:
        whole[METRICS] = [arm.item() for arm in campaign.arms()]
    if campaign.prepare is not None:
        whole[PREPARE] = list(campaign.prepare.items)
    rounds = {
        name: [items]
        for name, items in whole.items()
        if not view.stages[name].log.sealed and not view.stages[name].state.units
    }
    facts: dict[str, Any] = {"kind_by": "task"}
    if not view.stages[TASKS].log.sealed and all(one.why != EXHAUSTIVE for one in decisions):
        found, rest, said = _pulls(campaign, decisions)
        arms = {arm.id: arm for arm in campaign.arms()}
        size = search.most_pending if search.in_rounds else len(found) or 1
        parts = [found[first : first + size] for first in range(0, len(found), size)]
        rounds[TASKS] = [
            [{**arms[one.arm].item(), "task": task} for one in part for task in one.tasks or names]
            for part in (*parts, rest)
            if part
        ]
        work = replace(work, assumed=(said,))
        if not search.exhaustive:  # else every arm is evaluated, whatever the search chooses
            facts["most_workers"] = search.most_pending * len(names)
    stages = [stage.with_rounds(rounds.get(stage.name, [])) for stage in work.stages]
    return replace(work, stages=(*stages[:-1], replace(stages[-1], **facts)))


def _pulls(campaign: Campaign, decisions: Sequence[Decision]) -> tuple[list[Pull], list[Pull], str]:
    """Return the pulls that the search may still request, those that follow the search if all arms
    are evaluated in the end, and the assumption behind them.
    """
    search, names = campaign.search, campaign.tasks.names
    asked = [pull for one in decisions for pull in one.pulls]
    open_pulls = left_over(asked, [arm.id for arm in campaign.arms()], names)
    bounds = _bounds(campaign, decisions, asked)
    if not bounds and search.exhaustive:
        return [], open_pulls, _ALL
    if not bounds:
        return [], [], _UNBOUNDED
    fresh = [pull for pull in open_pulls if not pull.tasks]
    count = min(*bounds, len(fresh))
    # In an order that mixes models and sizes, as a search does.
    taken = [fresh[number * len(fresh) // count] for number in range(count)]
    taken.sort(key=lambda pull: crc32(pull.arm.encode()))
    if search.exhaustive:
        early = {pull.arm for pull in taken}
        return taken, [pull for pull in open_pulls if pull.arm not in early], _ALL
    together = "a round begins when the one before is done" if search.in_rounds else "no rounds"
    if not count:
        return [], [], "The search has no budget left for more arms."
    arms, tasks = counted(count, "more arm"), counted(len(names), "task")
    said = (
        f"The search may request {arms} on {tasks}, at most"
        f" {search.most_pending} at once ({together}); it is taken to request all of them, spread"
        " evenly over those that are left."
    )
    return taken, [], said


def _bounds(campaign: Campaign, decisions: Sequence[Decision], asked: Sequence[Pull]) -> list[int]:
    """Return the most arms that each of the search's budgets leaves."""
    search, names = campaign.search, campaign.tasks.names
    bounds = []
    if search.budget is not None:
        bounds.append(max(0, search.budget - len({pull.arm for pull in asked})))
    if search.evaluations is not None:
        made = sum(len(pull.tasks or names) for pull in asked)
        bounds.append(max(0, search.evaluations - made) // len(names))
    told = [second for one in decisions for tell in one.tells for second in tell.seconds.values()]
    if search.gpu_hours is not None and sum(told) > 0:
        left_s = search.gpu_hours * HOUR_S - sum(told)
        bounds.append(max(0, int(left_s / (sum(told) / len(told)) / len(names))))
    return bounds
