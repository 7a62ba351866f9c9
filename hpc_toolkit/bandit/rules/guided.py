"""Base class of the rules that learn from features, and the initial arms."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.features import FEATURES, columns
from hpc_toolkit.bandit.policy import Proposal
from hpc_toolkit.bandit.rule import Rule, Stream, first_best, number_option, word_option

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.rule import History


def space_filling_order(points: NDArray[np.float64], seed: int, n: int) -> list[int]:
    """Return the indices of ``n`` points, each as far as possible from all before it.

    Greedy maximin design, known as farthest-point traversal (Gonzalez 1985, "Clustering to
    minimize the maximum intercluster distance"). The seed draws the first point; equal distances
    go to the lowest index. ``points`` has shape (n_points, n_columns). A larger ``n`` gives a
    longer list with the same beginning, up to all points.
    """
    count = min(n, len(points))
    if count == 0:
        return []
    order = [int(np.random.default_rng([seed, Stream.FIRST_ARM]).integers(len(points)))]
    nearest = np.full(len(points), np.inf)
    while len(order) < count:
        newest = order[-1]
        nearest = np.minimum(nearest, ((points - points[newest]) ** 2).sum(axis=1))
        # Below every distance, even the distance 0 of a point with equal features.
        nearest[order] = -1.0
        order.append(first_best(nearest))
    return order


@dataclass(frozen=True, slots=True)
class Guided(Rule):
    """A rule that chooses its first arms by features alone, and then lets a model choose."""

    initial: int = number_option(5, low=1)
    """Number of arms chosen in space-filling order before the model decides."""
    features: str = word_option("geometry", FEATURES)
    """The model's features: "geometry", "metrics" or "all" (see ``features.columns``)."""

    def choose(self, history: History, n: int) -> list[Proposal]:
        wanted = min(n, len(history.table.arms) - len(history.taken))
        points = columns(history.table, self.features)
        opening = self._opening(history, points, wanted)
        ids = history.table.ids
        proposals = [Proposal(ids[i], None, "space-filling initial arm") for i in opening]
        if len(opening) < wanted:
            proposals += self._climb(history, points, opening, wanted - len(opening))
        return proposals

    def _opening(self, history: History, points: NDArray[np.float64], n: int) -> list[int]:
        """Return the initial arms that are due; all ``n`` while there is no reward."""
        if history.scored:
            n = min(n, max(0, self.initial - len(history.scored) - len(history.pending)))
        if n == 0:
            return []
        order = space_filling_order(points, history.seed, n + len(history.taken))
        return [index for index in order if index not in history.taken][:n]

    @abstractmethod
    def _climb(
        self, history: History, points: NDArray[np.float64], opening: list[int], n: int
    ) -> list[Proposal]:
        """Choose by a model ``n`` of the arms that are neither taken nor in ``opening``.

        The caller makes sure that there are at least ``n`` of these arms.
        """


@dataclass(frozen=True, slots=True)
class Scale:
    """Rewards as models see them: with mean 0 and standard deviation 1."""

    centre: float
    spread: float

    @classmethod
    def of(cls, rewards: NDArray[np.float64]) -> Scale:
        centre, spread = float(rewards.mean()), float(rewards.std())
        # The spread of one reward, or of equal rewards, is rounding error.
        return cls(centre, 1.0 if spread <= 1e-12 * max(1.0, abs(centre)) else spread)

    def to_model(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        return (rewards - self.centre) / self.spread

    def to_reward(self, value: float) -> float:
        return self.centre + self.spread * float(value)

    def expects(self, mean: float, sd: float) -> str:
        """Describe the model's prediction for one arm to users."""
        return f"expects {self.to_reward(mean):.4g} +- {self.spread * float(sd):.2g}"


def free_arms(history: History, opening: list[int]) -> NDArray[np.bool_]:
    """Return shape (n_arms,): True for arms that may still be proposed."""
    free = np.ones(len(history.table.arms), dtype=np.bool_)
    free[[*history.taken, *opening]] = False
    return free


def first_best_of(values: NDArray[np.float64], free: NDArray[np.bool_]) -> int:
    """Return the lowest index of the highest value, to 12 decimals, among free arms."""
    allowed = np.flatnonzero(free)
    return int(allowed[first_best(values[allowed])])
