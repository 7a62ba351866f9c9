"""The items left of a run, and their durations, drawn from those of the finished ones.

The logarithm of an item's seconds is a common mean, plus the effects of its kind, of its sibling
groups and its group (or of its part of a list without groups), plus a residual. Each draw gives the
finished items random weights (Bayesian bootstrap), takes these means, and gives every item left the
residual of a finished item. The mean of few items shrinks towards the mean of all, and has noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hpc_toolkit.queue.affinity import group_key, siblings_key
from hpc_toolkit.queue.items import Item

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Chance = np.random.Generator


@dataclass(frozen=True, slots=True)
class Seen:
    """One item that has a result, and how long it took."""

    item: Item
    group: str
    """Key of its group; "" without groups."""
    seconds: float
    worker: str = ""
    load: int = 0
    """Number of contexts that its worker had loaded by then."""
    place: int = 0
    """Its place in the list of the stage."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Items that one worker runs in a row: the rest of a unit."""

    group: str
    """Key of the first item's group; "" without groups."""
    first: int
    """Index of its first item in :attr:`StageWork.left`; the others follow."""
    count: int
    loads: int = 1
    """Number of groups to load."""
    holder: str = ""
    """The living worker that holds it now; "" if it waits."""
    age_s: float = 0.0
    """Seconds that the holder has spent on its first item, at least."""
    loading: bool = False
    """Whether these seconds may have gone into loading the group."""
    place: int = 0
    """Place of the first item in the list of the stage; the others follow, nearly without gaps."""
    round: int = 0
    """The round of a search in which it will come, from 1; 0: the search has requested it."""


@dataclass(slots=True, kw_only=True)
class StageWork:
    """One stage: the items left, and the finished items."""

    name: str
    group_by: str | None = None
    """The key of an item that names its group."""
    kind_by: str = ""
    """The key that names the task of an item of a search; "" in a list."""
    left: Sequence[Item] = ()
    """Items without a result."""
    batches: Sequence[Batch] = ()
    """The items left, in the order of the queue."""
    coming: int = 0
    """How many of these items, the last ones, a campaign has not requested yet."""
    most_workers: int | None = None
    """The most workers that a search keeps busy; None: not limited."""
    seen: Sequence[Seen] = field(default_factory=list)
    loads_s: Sequence[float] = field(default_factory=list)
    """Times that workers spent in unit runs besides their items, to load a group."""
    overheads_s: Sequence[float] = field(default_factory=list)
    """For each unit run that loaded nothing, its seconds besides its items."""
    attempts: int = 0
    """Number of ended attempts, successful or not."""
    retried: int = 0
    """Number of these attempts that failed and can be repeated."""

    def group_of(self, item: Item) -> str:
        return "" if self.group_by is None else group_key(item.get(self.group_by)) or ""

    def with_rounds(self, rounds: Sequence[Sequence[Item]]) -> StageWork:
        """Return the stage with items added that a campaign has not requested yet, one a batch."""
        left, batches = list(self.left), list(self.batches)
        for number, items in enumerate(rounds, 1):
            for item in sorted(items, key=self.group_of):
                batches.append(Batch(self.group_of(item), len(left), 1, round=number))
                left.append(item)
        return replace(self, left=left, batches=batches, coming=len(left) - len(self.left))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The rest of a run at one moment."""

    run: str
    """The run's path as it was given; "" for a run that does not exist yet."""
    at: float
    """When the run was read: epoch seconds of this machine."""
    stages: tuple[StageWork, ...]
    """The stages with items left."""
    workers: dict[str, str] = field(default_factory=dict)
    """Living workers, with the stage and group that each has loaded, as from :func:`context`."""
    done: int = 0
    """Number of items that have a result or failed for good."""
    sealed: bool = True
    """Whether no further items can come; items that a campaign may request are in the stages."""
    assumed: tuple[str, ...] = ()
    """Assumptions about items to come, in sentences."""

    @property
    def left(self) -> int:
        return sum(len(stage.left) for stage in self.stages)

    @property
    def most_workers(self) -> int | None:
        """The most workers that find work in the tasks of a campaign; None: not limited."""
        return next((one.most_workers for one in self.stages if one.most_workers), None)

    @property
    def coming(self) -> int:
        """Items left that a campaign has not requested yet."""
        return sum(stage.coming for stage in self.stages)


def context(stage: str, group: str) -> str:
    """Return the name of the context that a worker has loaded."""
    return f"{stage}/{group}"


_KINDS_SD, _GROUPS_SD, _PARTS_SD = 0.7, 0.15, 0.2
"""How much kinds and sets of sibling groups, sibling groups, and parts of a list are expected to
differ, as standard deviations of a logarithm."""
_FREE = 2
"""Number of classes that this expectation counts for, where the spread of classes is drawn."""
_LONGER = 0.5
"""How much longer than its age a running item takes that is older than all finished ones: mean of
an exponential logarithm, so twice as long in the mean."""
_SURPRISE, _SURPRISE_SD = 0.5, 1.3
"""Mean weight of kinds of items of which none has ended, in finished items, and how much longer
these take: the absolute value of a normal logarithm. Half of the lists in which 1 of 50 items takes
8 times as long show none of them among the first 35."""
_FARTHEST = 20.0
"""No item is drawn longer than this many times the longest finished item."""
_LEAST_S = 1e-4
_FEWEST = 12
"""Number of items that must have ended in a list before the first items of workers count apart."""
_EACH, _MOST_PARTS = 4, 16
"""Fewest finished items in a part of a list, and the most parts."""
_CHOICE_SD = 0.3
"""How much longer the next arms of a search may be than earlier ones: standard deviation of a
logarithm."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw of the durations of a stage."""

    batches: Floats
    """Seconds of each batch once its group is loaded."""
    load_s: Floats
    """Seconds to load the groups of each batch."""
    longest_s: float
    """Seconds of the longest item."""
    items_s: float
    """Sum of the seconds of the items, without failed attempts and without what units add."""
    squares: float
    """Sum of the squared seconds of the items."""


class LearnedDurations:
    """Draws durations by a model of the finished items, of which there must be at least one."""

    def __init__(self, stage: StageWork) -> None:
        self._stage, seen = stage, len(stage.seen)
        self._z = np.log(np.maximum([one.seconds for one in stage.seen], _LEAST_S))
        self._divisions = _divisions(stage)
        # Those whose holders are known to have spent time on the first item.
        running = [one for one in stage.batches if one.holder and not one.loading and one.age_s > 0]
        self._running = np.array([seen + one.first for one in running], dtype=np.int64)
        self._ages = np.log([max(one.age_s, _LEAST_S) for one in running])
        self._starts = [batch.first for batch in stage.batches]
        self._loads = np.array([batch.loads for batch in stage.batches])

    def draw(self, chance: Chance, drift: float) -> Draw:
        stage, seen = self._stage, len(self._z)
        of = np.append(np.arange(seen), self._running)
        z, weight = np.append(self._z, self._ages), chance.exponential(size=len(of))
        middle, rest = self._fit(of[:seen], z[:seen], weight[:seen], chance)
        if len(self._running):
            # Long items still run while short ones have ended: fit again, with the running ones.
            z[seen:] = self._longer(middle, rest, weight[:seen], chance)
            middle, rest = self._fit(of, z, weight, chance)
            z[seen:] = self._longer(middle, rest, weight, chance)
        logs = middle[seen:] + chance.choice(rest, len(stage.left), p=weight / weight.sum())
        # Some items may be of a kind that has not been seen yet.
        surprise = chance.gamma(_SURPRISE)
        is_new = chance.random(len(logs)) * (weight.sum() + surprise) < surprise
        logs += is_new * abs(chance.normal(0.0, _SURPRISE_SD))
        logs[self._running - seen] = z[seen:]
        seconds = drift * np.exp(np.minimum(logs, math.log(_FARTHEST) + z.max()))
        if stage.coming and stage.most_workers:
            seconds[-stage.coming :] *= math.exp(chance.normal(0.0, _CHOICE_SD))
        longest_s, items_s, squares = seconds.max(), seconds.sum(), np.sum(seconds**2)
        if stage.retried:
            # A failed item runs again, each time with the failure rate so far.
            rate = chance.beta(stage.retried + 0.5, stage.attempts - stage.retried + 0.5)
            seconds *= chance.geometric(1.0 - min(rate, 0.9), size=len(seconds))
        overhead_s = np.mean(stage.overheads_s) if stage.overheads_s else 0.0
        batches = np.add.reduceat(seconds, self._starts) + drift * overhead_s
        load_s = np.zeros(len(batches))
        if stage.loads_s:
            weight = chance.exponential(size=len(stage.loads_s))
            load_s = drift * self._loads * np.average(stage.loads_s, weights=weight)
        return Draw(batches, load_s, float(longest_s), float(items_s), float(squares))

    def _fit(self, of: Ints, z: Floats, weight: Floats, chance: Chance) -> tuple[Floats, Floats]:
        """Return the expected logarithm of every item, and the residuals of the items ``of``."""
        mean = float(np.average(z, weights=weight))
        middle, rest = np.full(len(self._z) + len(self._stage.left), mean), z - mean
        for division in self._divisions:
            known, drawn = division.effects(rest, of, weight, chance)
            middle += drawn[division.of]
            rest = rest - known[division.of[of]]
        return middle, rest

    def _longer(self, middle: Floats, rest: Floats, weight: Floats, chance: Chance) -> Floats:
        """Draw the logarithms of running items: all are longer than the items have run so far."""
        logs = middle[self._running]
        for number, age in enumerate(self._ages - logs):
            able = np.flatnonzero(rest > age)
            if len(able):
                value = rest[chance.choice(able, p=weight[able] / weight[able].sum())]
            else:
                value = age + chance.exponential(_LONGER)
            logs[number] += value
        return logs


@dataclass(frozen=True, slots=True)
class _Division:
    """Something that divides the items, finished ones first, into classes of different lengths."""

    of: Ints
    """The class of each item."""
    count: int
    sd: float
    """How much the classes are expected to differ."""
    has_repeats: bool = False
    """Whether a class with an odd number has the first items of a kind after a load, and the one
    before it the repeats, which may reuse the work of the firsts."""

    def effects(
        self, rest: Floats, items: Ints, weight: Floats, chance: Chance
    ) -> tuple[Floats, Floats]:
        """Return the mean of each class, shrunk towards 0 as far as chance may explain it, and a
        draw from what it may truly be. Classes without a finished item differ like the others.
        """
        of = self.of[items]
        mass = np.bincount(of, weight, self.count)
        number = np.bincount(of, minlength=self.count)
        means = np.bincount(of, weight * rest, self.count) / np.maximum(mass, 1e-12)
        seen = number > 0
        known = int(seen.sum())
        within = float(np.average((rest - means[of]) ** 2, weights=weight))
        noise = within * len(of) / max(len(of) - known, 1) / np.maximum(number, 1)
        between = float(np.sum(means[seen] ** 2 - noise[seen])) if known > 1 else 0.0
        # How much classes differ is uncertain itself, the more so the fewer were seen.
        variance = (max(between, 0.0) + self.sd**2) / known
        variance *= (known + _FREE) / chance.chisquare(known + _FREE)
        belief = variance / (variance + noise)
        mean = np.where(seen, means * belief, 0.0)
        # The seen classes may happen to be short, and then all others are longer together.
        shift = chance.normal(0.0, math.sqrt(variance / known))
        sd = np.sqrt(np.where(seen, noise * belief, variance))
        drawn = chance.normal(np.where(seen, mean, shift), sd)
        if self.has_repeats:
            new = ~seen[::2] & seen[1::2]
            both = seen[::2] & seen[1::2]
            # Unseen repeats are shorter than their firsts like other repeats, else by any share.
            less = (
                np.mean((drawn[::2] - drawn[1::2])[both]) if both.any() else -chance.exponential()
            )
            drawn[::2][new] = drawn[1::2][new] + chance.normal(
                less, _KINDS_SD * both.any(), new.sum()
            )
        return mean, drawn


def _divisions(stage: StageWork) -> list[_Division]:
    """Return what the lengths of items follow."""
    found: list[_Division] = []
    if stage.group_by is not None or len(stage.seen) >= _FEWEST:
        items = [*(one.item for one in stage.seen), *stage.left]
        kinds, count = _numbered([item.get(stage.kind_by) for item in items])
        # In a group, the first item of a kind may do work that its repeats reuse.
        of, has_repeats = 2 * kinds + _firsts(stage, kinds), stage.group_by is not None
        found.append(_Division(of, 2 * count, _KINDS_SD, has_repeats=has_repeats))
    if stage.group_by is None:
        return [*found, _parts(stage)]
    names = [*(one.group for one in stage.seen), *map(stage.group_of, stage.left)]
    of, count = _numbered(names)
    family, families = _numbered([siblings_key(name) for name in names])
    # Sets of siblings differ more than their groups do, where there are both.
    found += [_Division(family, families, _KINDS_SD)] if families > 1 else []
    sd = _GROUPS_SD if families < count and families > 1 else _KINDS_SD
    found += [_Division(of, count, sd)] if families < count else []
    return found


def _parts(stage: StageWork) -> _Division:
    """Divide a list into parts with a few finished items each. Items may take longer towards its
    end.
    """
    places = [one.place for one in stage.seen]
    seen = sorted(places)
    for one in stage.batches:
        places += range(one.place, one.place + one.count)
    least, begun, cuts = (max(places) + 1) / _MOST_PARTS, 0, [0]
    for number, place in enumerate(seen):
        is_wide = place - cuts[-1] >= least
        if is_wide and min(number - begun, len(seen) - number) >= _EACH:
            cuts.append(place)
            begun = number
    of = np.searchsorted(cuts, places, side="right") - 1
    return _Division(of, len(cuts), _PARTS_SD)


def _numbered(values: Sequence[object]) -> tuple[Ints, int]:
    """Return a number from 0 for each value, equal for equal values, and how many there are."""
    number = {value: n for n, value in enumerate(dict.fromkeys(values))}
    return np.array([number[value] for value in values], dtype=np.int64), len(number)


def _firsts(stage: StageWork, kinds: Ints) -> Ints:
    """Return 1 for each item that is the first of its kind since its group was loaded.

    A waiting item is a repeat if a living worker has done its kind since it loaded the group.
    """
    seen, found = len(stage.seen), np.zeros_like(kinds)
    had: set[tuple[object, ...]] = set()
    for number, (one, kind) in enumerate(zip(stage.seen, kinds.tolist(), strict=False)):
        mark = (one.worker, one.load, one.group, kind)
        found[number] = mark not in had
        had.add(mark)
    last = {one.worker: one.load for one in stage.seen}
    living = {(batch.holder, last.get(batch.holder)) for batch in stage.batches if batch.holder}
    had = {(0, *mark[2:]) for mark in had if mark[:2] in living}
    for batch in stage.batches:
        loads = batch.round if stage.group_by else 0  # a worker loads again in another round
        for item in range(batch.first, batch.first + batch.count):
            key = (loads, stage.group_of(stage.left[item]), int(kinds[seen + item]))
            found[seen + item] = key not in had
            had.add(key)
    return found
