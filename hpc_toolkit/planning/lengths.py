"""Durations of the items left: many draws, each from a model fitted to another resampling.

The logarithm of an item's seconds is a mean, plus the effects of a word and a number of the item,
plus the effects of its kin and its group, plus a residual. Each draw gives the seen items new
weights (Bayesian bootstrap), fits the model, and gives every item left the residual of a seen item.
Decision 0030 explains the reasons, and what the intervals promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_toolkit.planning.fit import Fit
from hpc_toolkit.planning.traits import traits

if TYPE_CHECKING:
    from hpc_toolkit.planning.work import StageWork

    Floats = np.ndarray[Any, np.dtype[np.float64]]

_LEAST_S = 1e-4
_FARTHEST = 20.0
"""No item is drawn longer than this many times the longest seen item."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """One draw of the durations of a stage."""

    seconds: Floats
    """Seconds of each item left."""
    load_s: dict[str, float]
    """Seconds to load each group, by its key."""
    first: float
    """Factor on the duration of the first item after a load."""


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
    """Draws durations from a guess."""

    keys: tuple[str, ...] = ()

    def __init__(self, stage: StageWork, guess: Guess) -> None:
        self._stage, self._guess = stage, guess
        self._groups = {batch.group for batch in stage.batches}
        self._groups |= {stage.group_of(item) for item in stage.left}

    def draw(self, chance: np.random.Generator) -> Lengths:
        """One draw."""
        guess = self._guess
        off = np.exp(chance.normal(0.0, np.log(guess.factor) / 1.645, 2))
        middle = np.log(guess.seconds_per_item * off[0]) - guess.spread**2 / 2
        seconds = np.exp(middle + guess.spread * chance.standard_normal(len(self._stage.left)))
        load_s = float(guess.load_s * off[1])
        return Lengths(seconds, dict.fromkeys(self._groups, load_s), 1.0)


class LearnedLengths:
    """Draws durations from a model of the seen items, of which there must be at least one."""

    def __init__(self, stage: StageWork) -> None:
        self._stage = stage
        self._z = np.log(np.maximum([one.seconds for one in stage.seen], _LEAST_S))
        self._traits = traits(stage, self._z)
        self._left = np.arange(len(self._z), len(self._traits))
        self._running = [
            (len(self._z) + batch.first, max(batch.age_s, _LEAST_S))
            for batch, _ in stage.running
            if not batch.loading and batch.age_s > 0
        ]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of items that were found to matter."""
        return self._traits.keys

    def draw(self, chance: np.random.Generator) -> Lengths:
        """One draw."""
        seen = np.arange(len(self._z))
        fit = Fit(self._traits, seen, self._z, chance)
        running = np.array([index for index, _ in self._running], dtype=np.int64)
        ages = np.log([age for _, age in self._running])
        if len(running):
            # Running items are known to take longer; a fit to ended items alone is too short.
            z = np.concatenate([self._z, fit.beyond(running, ages)])
            fit = Fit(self._traits, np.concatenate([seen, running]), z, chance)
        logs = fit.sample(self._left)
        if len(running):
            logs[running - len(self._z)] = fit.beyond(running, ages)
        longest = np.log(_FARTHEST) + max(self._z.max(), ages.max(initial=-np.inf))
        seconds = np.exp(np.minimum(logs, longest))
        return Lengths(seconds, self._loads(chance), float(np.exp(fit.first)))

    def _loads(self, chance: np.random.Generator) -> dict[str, float]:
        """Return mean seconds to load each group: the mean of its kin, else of all groups."""
        traits_ = self._traits
        place = {key: number for number, key in enumerate(traits_.groups)}
        loads = [load for load in self._stage.loads if load.group in place]
        if not loads:
            return dict.fromkeys(traits_.groups, 0.0)
        weight = chance.exponential(size=len(loads))
        seconds = np.array([load.seconds for load in loads])
        family = traits_.kin[[place[load.group] for load in loads]]
        total = np.bincount(family, weight * seconds, traits_.kins)
        count = np.bincount(family, weight, traits_.kins)
        mean = float(np.average(seconds, weights=weight))
        means = np.full(traits_.kins, mean)
        means[count > 0] = total[count > 0] / count[count > 0]
        return {key: float(means[traits_.kin[number]]) for key, number in place.items()}
