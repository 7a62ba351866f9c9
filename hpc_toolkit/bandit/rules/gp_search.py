"""Base class of the Gaussian process rules: options, fit, and the state of one ask."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.draws import drawn
from hpc_toolkit.bandit.durations import arm_seconds
from hpc_toolkit.bandit.features import columns_of
from hpc_toolkit.bandit.gp.evidence import fit
from hpc_toolkit.bandit.gp.regression import Posterior
from hpc_toolkit.bandit.gp.surfaces import Surfaces
from hpc_toolkit.bandit.options import check_word
from hpc_toolkit.bandit.policy import Proposal
from hpc_toolkit.bandit.rules.guided import Guided, Scale, free_arms

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.draws import Stream
    from hpc_toolkit.bandit.history import History

KERNELS = ("iso", "ard")
"""One length scale for all features, or one for each."""

MEANS = ("zero", "linear")
"""Prior means: the expected reward far from every observation."""


@dataclass(eq=False)
class Ask:
    """The state of one ask: the model of every arm, in units of standardised rewards."""

    history: History

    points: NDArray[np.float64]
    """Shape (n_arms, n_columns): the features that the rule uses."""

    posterior: Posterior

    scale: Scale

    free: NDArray[np.bool_]
    """Shape (n_arms,): True for arms that are neither taken nor chosen."""

    chosen: int
    """How many arms this ask has chosen already."""

    def generator(self, stream: Stream) -> np.random.Generator:
        """Return the generator for the next choice."""
        return drawn(self.history, stream, self.chosen)

    @cached_property
    def surfaces(self) -> Surfaces:
        """Draws over the arms without results, from the posterior at the first use."""
        untold = np.ones(len(self.free), dtype=np.bool_)
        untold[[*self.history.scored, *self.history.failed]] = False
        return Surfaces(self.posterior, untold)

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """Shape (n_arms,): expected duration of each arm in seconds."""
        return arm_seconds(self.history, self.points)

    def known(self) -> NDArray[np.bool_]:
        """Return shape (n_arms,): True for arms told with a reward, pending, or chosen."""
        known = ~self.free
        known[list(self.history.failed)] = False
        return known


@dataclass(frozen=True, slots=True)
class GpRule(Guided):
    """A rule that chooses by a Gaussian process over the arms' features.

    Every reward is evidence about the neighbours of its arm in feature space. So a reward that is
    smooth in the features needs far fewer pulls than arms. Arms without a reward are no evidence.
    """

    kernel: str = "iso"
    """"iso": one length scale for all features. "ard": one for each, fitted to the rewards."""

    mean: str = "zero"
    """"zero", or "linear": a linear mean over all features that the rule uses. The process then
    models the rest over the geometry among them, or over all if there is none."""

    believes: ClassVar[bool] = True
    """Whether pending arms, and those chosen earlier in an ask, lower the uncertainty around them
    (kriging believer)."""

    def __post_init__(self) -> None:
        Guided.__post_init__(self)
        check_word(self.name, "kernel", self.kernel, KERNELS)
        check_word(self.name, "mean", self.mean, MEANS)

    def _climb(
        self, history: History, points: NDArray[np.float64], opening: list[int], n: int
    ) -> list[Proposal]:
        scale = Scale.of(history.rewards)
        x, y = points[list(history.scored)], scale.to_model(history.rewards)
        linear = self.mean == "linear"
        smooth = self._smooth(history) if linear else None
        hyper = fit(x, y, smooth=smooth, own_scales=self.kernel == "ard", linear=linear)
        posterior = Posterior(x, y, points, hyper)
        if self.believes:
            for index in sorted((*history.pending, *opening)):
                posterior.believe(index)
        ask = Ask(history, points, posterior, scale, free_arms(history, opening), len(opening))
        proposals = []
        for _ in range(n):
            index, acquisition = self._pick(ask)
            reason = scale.expects(posterior.mean[index], posterior.sd[index])
            proposals.append(Proposal(history.table.ids[index], acquisition, reason))
            ask.free[index] = False
            ask.chosen += 1
            if self.believes:
                posterior.believe(index)
        return proposals

    def _smooth(self, history: History) -> tuple[int, ...] | None:
        """Return which of the rule's columns the process covers with a linear mean; None: all."""
        used = columns_of(history.table, self.features)
        geometry = set(columns_of(history.table, "geometry"))
        return tuple(i for i, column in enumerate(used) if column in geometry) or None

    @abstractmethod
    def _pick(self, ask: Ask) -> tuple[int, float]:
        """Return the free arm to propose, and its acquisition in units of the reward."""
