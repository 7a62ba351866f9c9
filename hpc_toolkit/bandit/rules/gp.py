"""Rules that learn from features: the initial arms, then a Gaussian process or Optuna's TPE."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpc_toolkit.bandit import rule
from hpc_toolkit.bandit.arms import FEATURES, columns
from hpc_toolkit.bandit.policy import Bools, Floats, Indices, Proposal
from hpc_toolkit.bandit.regression import Posterior, column_scales, fit
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.installation import how_to_add

if TYPE_CHECKING:
    import optuna


EACH = "each"
SCALES = ("one", EACH)
"""What has a length scale of its own: all columns together, or each."""


def space_filling_order(points: Floats, seed: int, n: int) -> list[int]:
    """Return the indices of ``n`` points, each as far as possible from all before it.

    Greedy maximin design, known as farthest-point traversal (Gonzalez 1985, "Clustering to
    minimize the maximum intercluster distance"). The seed draws the first point; equal distances
    go to the lowest index. ``points`` has shape (n_points, n_columns). A larger ``n`` gives a
    longer list with the same beginning, up to all points.
    """
    count = min(n, len(points))
    if count == 0:
        return []
    order = [int(np.random.default_rng([seed, rule.Stream.FIRST_ARM]).integers(len(points)))]
    nearest = np.full(len(points), np.inf)
    while len(order) < count:
        newest = order[-1]
        nearest = np.minimum(nearest, ((points - points[newest]) ** 2).sum(axis=1))
        # Below every distance, even the distance 0 of a point with equal features.
        nearest[order] = -1.0
        order.append(rule.first_best(nearest))
    return order


@dataclass(frozen=True, slots=True)
class Guided(rule.Rule):
    """A rule that chooses its first arms by features alone, and then lets a model choose."""

    initial: int = rule.number_option(5, low=1)
    """Number of arms chosen in space-filling order before the model decides."""
    features: str = rule.word_option("geometry", FEATURES)
    """The model's features: "geometry", "metrics" or "all" (see ``arms.columns``)."""

    def choose(self, history: rule.History, n: int) -> list[Proposal]:
        wanted = min(n, len(history.table.arms) - len(history.taken))
        points = columns(history.table, self.features)
        opening = self._opening(history, points, wanted)
        ids = history.table.ids
        proposals = [Proposal(ids[i]) for i in opening]
        if len(opening) < wanted:
            proposals += self._climb(history, points, opening, wanted - len(opening))
        return proposals

    def _opening(self, history: rule.History, points: Floats, n: int) -> list[int]:
        """Return the initial arms that are due; all ``n`` while there is no reward."""
        if history.scored:
            n = min(n, max(0, self.initial - len(history.scored) - len(history.pending)))
        if n == 0:
            return []
        order = space_filling_order(points, history.seed, n + len(history.taken))
        return [index for index in order if index not in history.taken][:n]

    @abstractmethod
    def _climb(
        self, history: rule.History, points: Floats, opening: list[int], n: int
    ) -> list[Proposal]:
        """Choose by a model ``n`` of the arms that are neither taken nor in ``opening``.

        The caller makes sure that there are at least ``n`` of these arms.
        """


def free_arms(history: rule.History, opening: list[int]) -> Bools:
    """Return shape (n_arms,): True for arms that may still be proposed."""
    free = np.ones(len(history.table.arms), dtype=np.bool_)
    free[[*history.taken, *opening]] = False
    return free


def first_best_of(values: Floats, free: Bools) -> int:
    """Return the lowest index of the highest value, to 12 decimals, among free arms."""
    allowed = np.flatnonzero(free)
    return int(allowed[rule.first_best(values[allowed])])


SMALLEST_SD = 1e-9
"""Replaces smaller standard deviations: an exactly known reward would divide by 0."""

FAR_BELOW = -30.0
"""Below this z, erfc is about to underflow, and the series is exact to rounding."""

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@dataclass(eq=False)
class Ask:
    """The state of one ask: the model of every arm, in units of standardised rewards."""

    history: rule.History
    posterior: Posterior
    free: Bools
    """Shape (n_arms,): True for arms that are neither taken nor chosen."""
    chosen: int
    """How many arms this ask has chosen already."""


@dataclass(frozen=True, slots=True)
class GpRule(Guided):
    """A rule that chooses by a Gaussian process over the arms' features.

    Every reward is evidence about the neighbours of its arm in feature space. So a reward that is
    smooth in the features needs far fewer pulls than arms. Arms without a reward are no evidence.
    """

    scales: str = rule.word_option("one", SCALES)
    """Whether one length scale is fitted for all columns, or "each" column counts for itself."""

    def _climb(
        self, history: rule.History, points: Floats, opening: list[int], n: int
    ) -> list[Proposal]:
        posterior = self._fitted(history, points)
        # Pending and chosen arms lower the uncertainty around them (kriging believer).
        for index in sorted((*history.pending, *opening)):
            posterior.believe(index)
        ask = Ask(history, posterior, free_arms(history, opening), len(opening))
        proposals = []
        for _ in range(n):
            index = self._pick(ask)
            proposals.append(Proposal(history.table.ids[index]))
            ask.free[index] = False
            ask.chosen += 1
            posterior.believe(index)
        return proposals

    def _fitted(self, history: rule.History, points: Floats) -> Posterior:
        """The model of every arm, in units of standardised rewards."""
        centre, spread = float(history.rewards.mean()), float(history.rewards.std())
        # The spread of one reward, or of equal rewards, is rounding error.
        spread = 1.0 if spread <= 1e-12 * max(1.0, abs(centre)) else spread
        x, y = points[list(history.scored)], (history.rewards - centre) / spread
        if self.scales == EACH:
            scales = column_scales(x, y)
            x, points = x * scales, points * scales
        return Posterior(x, y, points, fit(x, y))

    @abstractmethod
    def _pick(self, ask: Ask) -> int:
        """Return the free arm to propose."""


@dataclass(frozen=True, slots=True)
class GpUcb(GpRule):
    """Propose the arm with the highest mean plus ``beta`` standard deviations.

    Source: Srinivas et al. 2010. Pending arms, and arms chosen earlier in the same ask, only lower
    the uncertainty around them (kriging believer).
    """

    name: ClassVar[str] = "gp-ucb"
    beta: float = rule.number_option(2.0)
    """Standard deviations added to the mean; 0 never explores."""

    def _pick(self, ask: Ask) -> int:
        return first_best_of(ask.posterior.mean + self.beta * ask.posterior.sd, ask.free)


def log_expected_improvement(mean: Floats, sd: Floats, best: float) -> Floats:
    """Return log E[max(f - best, 0)] for f ~ N(mean, sd^2); ``mean`` and ``sd`` have one shape.

    The closed form is sd (phi(z) + z Phi(z)) with z = (mean - best) / sd (Jones, Schonlau and Welch
    1998). The logarithm still ranks arms far below the best, whose improvement underflows to 0.
    """
    sd = np.maximum(sd, SMALLEST_SD)
    z = np.asarray((mean - best) / sd, dtype=np.float64)
    log_density = -0.5 * z**2 - 0.5 * math.log(2.0 * math.pi)
    near = np.maximum(z, FAR_BELOW)
    direct = np.exp(-0.5 * near**2) / math.sqrt(2.0 * math.pi) + near * 0.5 * _erfc(
        -near / math.sqrt(2.0)
    )
    far = np.minimum(z, FAR_BELOW) ** -2
    # phi(z) + z Phi(z) = phi(z) z^-2 (1 - 3 z^-2 + 15 z^-4 - ...): Phi's asymptotic series.
    series = log_density + np.log(far * (1.0 - 3.0 * far + 15.0 * far**2))
    return np.asarray(np.where(z > FAR_BELOW, np.log(direct), series) + np.log(sd))


@dataclass(frozen=True, slots=True)
class GpEi(GpRule):
    """Propose the arm with the highest expected improvement (Jones, Schonlau and Welch 1998).

    The improvement is over the highest posterior mean among told and pending arms, so that noise in
    one score does not raise the bar. Pending arms count as observed at their mean (kriging
    believer).
    """

    name: ClassVar[str] = "gp-ei"

    def _pick(self, ask: Ask) -> int:
        known = ~ask.free  # told with a reward, pending, or chosen
        known[list(ask.history.failed)] = False
        best = float(ask.posterior.mean[known].max())
        improvement = log_expected_improvement(ask.posterior.mean, ask.posterior.sd, best)
        return first_best_of(improvement, ask.free)


MOST_DRAWS = 8
"""The most suggestions to draw for a proposal while the arm nearest to each is taken."""


@dataclass(frozen=True, slots=True)
class OptunaTpe(Guided):
    """Propose the arm nearest to a suggestion of Optuna's TPESampler (Bergstra et al. 2011).

    Each feature with more than one value is an integer parameter: the rank of its value in the
    table. If the nearest arm is taken, Optuna is asked again, up to eight times; then the nearest
    free arm is proposed. Each proposal makes a new study from the history, which takes 0.1 ms per
    told arm. Pending arms are running trials (constant liar), and all told arms weigh the same.
    """

    name: ClassVar[str] = "optuna-tpe"

    def __post_init__(self) -> None:
        Guided.__post_init__(self)
        if find_spec("optuna") is None:
            message = f"{self.name} needs optuna, which is not installed"
            raise ConfigError(message, hint=how_to_add(extra="optuna"))

    def _climb(
        self, history: rule.History, points: Floats, opening: list[int], n: int
    ) -> list[Proposal]:
        ranks = _ranks(points)
        free = free_arms(history, opening)
        running = [*history.pending, *opening]
        proposals = []
        for chosen in range(len(opening), len(opening) + n):
            generator = rule.drawn(history, rule.Stream.OPTUNA, chosen)
            with _quiet():
                # Sorted, so that the study does not depend on how arms were split into asks.
                study = self._study(history, ranks, sorted(running), generator)
                index = _nearest_free(study, ranks, free)
            proposals.append(Proposal(history.table.ids[index]))
            free[index] = False
            running.append(index)
        return proposals

    def _study(
        self,
        history: rule.History,
        ranks: Indices,
        running: Sequence[int],
        generator: np.random.Generator,
    ) -> optuna.Study:
        """Create a study with the scored arms as trials, and ``running`` as running trials."""
        import optuna

        space = _space(ranks)

        def told(arm: int, **outcome: Any) -> optuna.trial.FrozenTrial:
            params = {name: int(ranks[arm, int(name)]) for name in space}
            return optuna.trial.create_trial(params=params, distributions=space, **outcome)

        sampler = optuna.samplers.TPESampler(
            n_startup_trials=self.initial,
            weights=np.ones,
            constant_liar=True,
            seed=int(generator.integers(2**32)),
        )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for arm, reward in zip(history.scored, history.rewards, strict=True):
            study.add_trial(told(arm, value=float(reward)))
        for arm in running:
            study.add_trial(told(arm, state=optuna.trial.TrialState.RUNNING))
        return study


def _nearest_free(study: optuna.Study, ranks: Indices, free: Bools) -> int:
    """Return the arm to propose."""
    import optuna

    space, most = _space(ranks), np.maximum(ranks.max(axis=0), 1)
    anywhere = np.ones(len(ranks), dtype=np.bool_)
    away = np.zeros(len(ranks))
    for _ in range(MOST_DRAWS):
        trial = study.ask(space)
        suggested = np.array([trial.params.get(str(i), 0) for i in range(ranks.shape[1])])
        away = (((suggested - ranks) / most) ** 2).sum(axis=1)
        nearest = first_best_of(-away, anywhere)
        if free[nearest]:
            return nearest
        # The sampler learns nothing from a failed trial.
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return first_best_of(-away, free)


def _space(ranks: Indices) -> dict[str, optuna.distributions.BaseDistribution]:
    """Return one parameter for each column with more than one value."""
    import optuna

    highest = ranks.max(axis=0).tolist()
    return {
        str(column): optuna.distributions.IntDistribution(0, high)
        for column, high in enumerate(highest)
        if high
    }


def _ranks(points: Floats) -> Indices:
    ranks = [np.unique(np.round(column, 12), return_inverse=True)[1] for column in points.T]
    return np.array(ranks, dtype=np.intp).reshape(-1, len(points)).T


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Optuna's log lines, and its warnings about arguments that may change."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
