"""Durations of the items left: many draws, each from a model fitted to another resampling.

Each draw gives the seen items new weights (Bayesian bootstrap), fits the model
(:mod:`hpc_toolkit.planning.fit`), and gives every item left the residual of a seen item.
docs/decisions/forecasts.md explains the reasons, and what the intervals promise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.planning.fit import Fit
from hpc_toolkit.planning.traits import traits

if TYPE_CHECKING:
    from hpc_toolkit.planning.repeats import Floats, Ints, Repeats
    from hpc_toolkit.planning.work import Batch, StageWork


_NEWEST = 3
"""The last rounds of a search, whose arms show what it prefers."""

_CHOICE, _FIRST_CHOICE = 0.1, 0.3
"""How much longer or shorter a search's next arms may be than its last ones: standard deviation of
a logarithm after many rounds, and what is added after the first one."""
_LEAST_S = 1e-4
_FEWEST_WARM = 6
"""Fewest items from which to forecast without the first ones of all workers."""
_FARTHEST = 20.0
"""No item is drawn longer than this many times the longest seen item."""


@dataclass(frozen=True, slots=True)
class Lengths:
    batches: Floats
    """Seconds of each batch, its items as repeats of their kinds unless they run and are known not
    to be."""
    load_s: dict[str, float]
    """Seconds to load each group, by its key."""
    longest_s: float
    """Seconds of the longest item."""
    squares: float
    """Sum of the squared seconds of the items."""
    seconds: Floats = field(default_factory=lambda: np.empty(0))
    """Seconds of each item left; empty if a guess draws batches, whose items are then equal."""
    more_s: Floats | None = None
    """Extra seconds of each item as the first of its kind; None: first items take no longer."""
    repeats: Repeats | None = None

    @classmethod
    def of_items(cls, seconds: Floats, stage: StageWork, load_s: dict[str, float]) -> Lengths:
        batches = np.add.reduceat(seconds, [batch.first for batch in stage.batches])
        return cls(batches, load_s, float(seconds.max()), float(np.sum(seconds**2)), seconds)

    def times(self, factor: float) -> Lengths:
        return replace(
            self,
            batches=self.batches * factor,
            load_s={key: seconds * factor for key, seconds in self.load_s.items()},
            longest_s=self.longest_s * factor,
            squares=self.squares * factor**2,
            seconds=self.seconds * factor,
            more_s=None if self.more_s is None else self.more_s * factor,
        )

    def item_s(self, item: int, number: int, batch: Batch) -> float:
        """Return the seconds of an item of the batch with this number."""
        if not len(self.seconds):
            return float(self.batches[number]) / batch.count
        return float(self.seconds[item])


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
        self._guess = guess
        self._groups = {batch.group for batch in stage.batches}
        self._counts = np.array([batch.count for batch in stage.batches])

    def draw(self, chance: np.random.Generator) -> Lengths:
        """Draw the batches as sums of log-normal items, which are nearly log-normal, because a list
        may have millions of items.
        """
        guess, counts = self._guess, self._counts
        off = np.exp(chance.normal(0.0, np.log(guess.factor) / 1.645, 2))
        item_s = float(guess.seconds_per_item * off[0])
        variance = math.expm1(guess.spread**2)
        sd = np.sqrt(np.log1p(variance / counts))
        batches = counts * item_s * np.exp(sd * chance.standard_normal(len(sd)) - sd**2 / 2)
        longest_s = float(batches[counts == 1].max(initial=0.0))
        if others := int(counts[counts > 1].sum()):
            chance_of_less = min(chance.random() ** (1 / others), 1 - 1e-12)
            sigmas = NormalDist().inv_cdf(max(chance_of_less, 1e-12))
            middle_s = item_s * math.exp(-(guess.spread**2) / 2)
            longest_s = max(longest_s, middle_s * math.exp(guess.spread * sigmas))
        return Lengths(
            batches,
            dict.fromkeys(self._groups, float(guess.load_s * off[1])),
            longest_s=longest_s,
            squares=float(np.sum(batches**2 * (1.0 + variance * (1.0 - 1.0 / counts)) / counts)),
        )


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
        load_s = self._loads(chance)
        more_s = np.exp(np.minimum(firsts, longest)) - seconds
        begun = running[self._traits.repeats.first[running] == 1]
        more_s[begun - len(self._z)] = 0.0  # their seconds are those of firsts
        if self._stage.coming and self._stage.rounds:
            coming = slice(-self._stage.coming, None)
            recent_s = float(np.exp(fit.plain[self._recent]).mean())
            factor = self._preference(recent_s, float(seconds[coming].mean()), chance)
            seconds[coming] *= factor
            more_s[coming] *= factor
        found = Lengths.of_items(seconds, self._stage, load_s)
        if not fit.first.any():
            return found
        return replace(found, more_s=np.maximum(more_s, 0.0), repeats=self._traits.repeats)

    def _preference(self, recent_s: float, mean_s: float, chance: np.random.Generator) -> float:
        """Return a factor for the items to come of a search, which does not choose evenly: it goes
        on as in its last rounds, or as if it chose evenly, or something in between.
        """
        width = _CHOICE + _FIRST_CHOICE / math.sqrt(self._stage.rounds)
        ratio = recent_s / max(mean_s, 1e-9)
        return float(ratio ** chance.random() * np.exp(chance.normal(0.0, width)))

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
