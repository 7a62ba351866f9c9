"""Linear bandits in which all arms share one parameter vector."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.policy import Proposal
from hpc_toolkit.bandit.regression import Ridge, design
from hpc_toolkit.bandit.rule import Stream, drawn, number_option
from hpc_toolkit.bandit.rules.guided import Guided, Scale, first_best_of, free_arms

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.rule import History


@dataclass(frozen=True, slots=True)
class LinearRule(Guided):
    """A rule whose model is a polynomial of the features, with one parameter vector for all arms.

    Standardised rewards are regressed on standardised terms.
    """

    degree: int = number_option(2, low=1, high=2, hint="1 or 2")
    """1: only the features. 2: their squares and products as well, without which no middle layer
    can be the best."""
    ridge: float = number_option(1.0, low=1e-6)
    """Prior precision of every parameter, in units of the noise precision."""
    believes: ClassVar[bool] = True

    def _climb(
        self, history: History, points: NDArray[np.float64], opening: list[int], n: int
    ) -> list[Proposal]:
        scale = Scale.of(history.rewards)
        terms = design(points, self.degree)
        ridge = Ridge(terms[list(history.scored)], scale.to_model(history.rewards), self.ridge)
        if self.believes:
            for index in sorted((*history.pending, *opening)):
                ridge.believe(terms[index])
        mean, free = terms @ ridge.theta, free_arms(history, opening)
        proposals = []
        for place in range(n):
            generator = drawn(history, Stream.WEIGHT_SAMPLE, len(opening) + place)
            values = self._values(terms, ridge, generator)
            index = first_best_of(values, free)
            reason = scale.expects(mean[index], ridge.sd(terms[index : index + 1])[0])
            acquisition = scale.to_reward(values[index])
            proposals.append(Proposal(history.table.ids[index], acquisition, reason))
            free[index] = False
            if self.believes:
                ridge.believe(terms[index])
        return proposals

    @abstractmethod
    def _values(
        self, terms: NDArray[np.float64], ridge: Ridge, generator: np.random.Generator
    ) -> NDArray[np.float64]:
        """Return shape (n_arms,): the values to maximise."""


@dataclass(frozen=True, slots=True)
class LinUcb(LinearRule):
    """Propose the arm with the highest x' theta + alpha sqrt(x' A^-1 x), with theta shared by all.

    Sources: Li et al. 2010; Abbasi-Yadkori et al. 2011. Pending arms, and arms chosen earlier in an
    ask, count in A but leave theta unchanged.
    """

    name: ClassVar[str] = "linucb"
    alpha: float = number_option(1.0)
    """Standard deviations added to the mean, in units of the standardised rewards' noise."""

    def _values(
        self, terms: NDArray[np.float64], ridge: Ridge, generator: np.random.Generator
    ) -> NDArray[np.float64]:
        return np.asarray(terms @ ridge.theta + self.alpha * ridge.sd(terms))


@dataclass(frozen=True, slots=True)
class LinTs(LinearRule):
    """Propose the best arm for a theta drawn from N(theta, width^2 A^-1), drawn for each proposal.

    Source: Agrawal and Goyal 2013. Pending arms do not change the posterior: draws differ by
    themselves.
    """

    name: ClassVar[str] = "lints"
    width: float = number_option(1.0)
    """Standard deviation of the noise, in units of the standardised rewards; 0 never explores."""
    believes: ClassVar[bool] = False

    def _values(
        self, terms: NDArray[np.float64], ridge: Ridge, generator: np.random.Generator
    ) -> NDArray[np.float64]:
        return np.asarray(terms @ ridge.draw(self.width, generator))
