"""Optuna's tree-structured Parzen estimator, applied to a finite set of arms."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpc_toolkit.bandit.policy import Bools, Floats, Indices, Proposal
from hpc_toolkit.bandit.rule import Stream, drawn
from hpc_toolkit.bandit.rules.gp import Guided, first_best_of, free_arms
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.installation import how_to_add

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import optuna

    from hpc_toolkit.bandit.rule import History


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
        self, history: History, points: Floats, opening: list[int], n: int
    ) -> list[Proposal]:
        ranks = _ranks(points)
        free = free_arms(history, opening)
        running = [*history.pending, *opening]
        proposals = []
        for chosen in range(len(opening), len(opening) + n):
            generator = drawn(history, Stream.OPTUNA, chosen)
            with _quiet():
                # Sorted, so that the study does not depend on how arms were split into asks.
                study = self._study(history, ranks, sorted(running), generator)
                index, reason = _nearest_free(study, ranks, free)
            proposals.append(Proposal(history.table.ids[index], None, reason))
            free[index] = False
            running.append(index)
        return proposals

    def _study(
        self,
        history: History,
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


def _nearest_free(study: optuna.Study, ranks: Indices, free: Bools) -> tuple[int, str]:
    """Return the arm to propose, and how it was found."""
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
            reason = "what TPE suggests" if away[nearest] == 0.0 else "nearest to what TPE suggests"
            return nearest, reason
        # The sampler learns nothing from a failed trial.
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return first_best_of(-away, free), "nearest to what TPE suggests"


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
