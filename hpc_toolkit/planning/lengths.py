"""Durations of the items left: many draws, each from a model fitted to another resampling.

Each draw gives the seen items new weights (Bayesian bootstrap), fits the model
(:mod:`hpc_toolkit.planning.fit`), and gives every item left the residual of a seen item.
Decision 0030 explains the reasons, and what the intervals promise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.planning.fit import Fit
from hpc_toolkit.planning.traits import traits

if TYPE_CHECKING:
    from hpc_toolkit.planning.repeats import Floats, Ints, Repeats
    from hpc_toolkit.planning.work import StageWork


_NEWEST = 3
"""The last rounds of a search, whose arms show what it prefers."""

_LEAST_S = 1e-4
_FEWEST_WARM = 6
"""Fewest items from which to forecast without the first ones of all workers."""
_FARTHEST = 20.0
"""No item is drawn longer than this many times the longest seen item."""


@dataclass(frozen=True, slots=True)
class Lengths:
    seconds: Floats
    """Seconds of each item left, as a repeat of its kind unless it runs and is known not to be."""
    load_s: dict[str, float]
    """Seconds to load each group, by its key."""
    more_s: Floats | None = None
    """Extra seconds of each item as the first of its kind; None: first items take no longer."""
    repeats: Repeats | None = None
    recent_s: float | None = None
    """Mean seconds, as repeats, of the items that a search requested last."""

    def times(self, factor: float) -> Lengths:
        return replace(
            self,
            seconds=self.seconds * factor,
            load_s={key: seconds * factor for key, seconds in self.load_s.items()},
            more_s=None if self.more_s is None else self.more_s * factor,
            recent_s=None if self.recent_s is None else self.recent_s * factor,
        )


@dataclass(frozen=True, slots=True)
class Guess:
    """The user's guess where nothing is known."""

    seconds_per_item: float
    load_s: float = 0.0
    factor: float = 1.5
    """In 9 of 10 cases the true means are within this factor, up or down; at least 1."""
    spread: float = 0.5
    """How much items differ: standard deviation of the logarithms of their seconds."""


class GuessedLengths:
    keys: tuple[str, ...] = ()

    def __init__(self, stage: StageWork, guess: Guess) -> None:
        self._stage, self._guess = stage, guess
        self._groups = {batch.group for batch in stage.batches}
        self._groups |= {stage.group_of(item) for item in stage.left}

    def draw(self, chance: np.random.Generator) -> Lengths:
        guess = self._guess
        off = np.exp(chance.normal(0.0, np.log(guess.factor) / 1.645, 2))
        middle = np.log(guess.seconds_per_item * off[0]) - guess.spread**2 / 2
        seconds = np.exp(middle + guess.spread * chance.standard_normal(len(self._stage.left)))
        load_s = float(guess.load_s * off[1])
        return Lengths(seconds, dict.fromkeys(self._groups, load_s))


def _warm(stage: StageWork) -> Ints:
    """Return the indices of the seen items without the first one of each worker, which also imports
    packages and reads data; all indices if too few others were seen.
    """
    had, warm = set(), []
    for number, one in enumerate(stage.seen):
        if not one.worker or one.worker in had:
            warm.append(number)
        had.add(one.worker)
    enough = len(warm) >= max(_FEWEST_WARM, 2 * (len(stage.seen) - len(warm)))
    return np.array(warm if enough else range(len(stage.seen)), dtype=np.int64)


class LearnedLengths:
    """Draws durations from a model of the seen items, of which there must be at least one."""

    def __init__(self, stage: StageWork) -> None:
        self._stage = stage
        self._z = np.log(np.maximum([one.seconds for one in stage.seen], _LEAST_S))
        self._traits = traits(stage, self._z)
        self._left = np.arange(len(self._z), len(self._traits))
        self._warm = _warm(stage)
        entries = np.array([stage.seen[item].entry for item in self._warm])
        self._recent = np.flatnonzero(np.isin(entries, np.unique(entries)[-_NEWEST:]))
        self.keys = self._traits.keys
        running = [one for one in stage.batches if one.is_running]
        self._running = np.array([len(self._z) + one.first for one in running], dtype=np.int64)
        self._ages = np.log([max(one.age_s, _LEAST_S) for one in running])

    def draw(self, chance: np.random.Generator) -> Lengths:
        warm, running, ages = self._warm, self._running, self._ages
        fit = Fit(self._traits, warm, self._z[warm], chance)
        if len(running):
            # Running items are known to take longer; a fit to ended items alone is too short.
            z = np.concatenate([self._z[warm], fit.beyond(running, ages)])
            fit = Fit(self._traits, np.concatenate([warm, running]), z, chance)
        logs, firsts = fit.sample(self._left)
        if len(running):
            logs[running - len(self._z)] = fit.beyond(running, ages)
        longest = np.log(_FARTHEST) + max(self._z.max(), ages.max(initial=-np.inf))
        seconds = np.exp(np.minimum(logs, longest))
        recent_s = float(np.exp(fit.plain[self._recent]).mean())
        found = Lengths(seconds, self._loads(chance), recent_s=recent_s)
        if not fit.first.any():
            return found
        more_s = np.exp(np.minimum(firsts, longest)) - seconds
        begun = running[self._traits.repeats.first[running] == 1]
        more_s[begun - len(self._z)] = 0.0  # their seconds are those of firsts
        return replace(found, more_s=np.maximum(more_s, 0.0), repeats=self._traits.repeats)

    def _loads(self, chance: np.random.Generator) -> dict[str, float]:
        """Return mean seconds to load each group: of its sibling groups, else of all groups."""
        traits_ = self._traits
        place = {key: number for number, key in enumerate(traits_.groups)}
        loads = [load for load in self._stage.loads if load.group in place]
        if not loads:
            return dict.fromkeys(traits_.groups, 0.0)
        weight = chance.exponential(size=len(loads))
        seconds = np.array([load.seconds for load in loads])
        family = traits_.siblings[[place[load.group] for load in loads]]
        total = np.bincount(family, weight * seconds, traits_.kins)
        count = np.bincount(family, weight, traits_.kins)
        mean = float(np.average(seconds, weights=weight))
        means = np.full(traits_.kins, mean)
        means[count > 0] = total[count > 0] / count[count > 0]
        return {key: float(means[traits_.siblings[number]]) for key, number in place.items()}
