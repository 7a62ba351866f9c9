"""Optuna's tree-structured Parzen estimator, asked for one of a finite number of arms."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpc_toolkit.bandit.draws import Stream, drawn
from hpc_toolkit.bandit.guided import Guided, first_best_of, free_arms
from hpc_toolkit.bandit.policy import Proposal
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from hpc_toolkit.bandit.history import History


@dataclass(frozen=True, slots=True)
class OptunaTpe(Guided):
    """The free arm nearest to what Optuna's TPESampler suggests (Bergstra et al. 2011).

    Each feature with more than one value is an integer parameter: the rank of its value among
    those that the table has. A suggestion that is no arm, or a taken one, goes to the nearest free
    arm by ranks scaled to [0, 1]. Needs the extra ``optuna``.

    A new study is told everything for each proposal, so that an ask depends on nothing else:
    about 4 ms, and 0.1 ms more per arm told. Pending arms are running ones (constant liar). All
    told arms weigh the same, since their order is not known; Optuna would forget the oldest.
    """

    name: ClassVar[str] = "optuna-tpe"

    def __post_init__(self) -> None:
        Guided.__post_init__(self)
        if find_spec("optuna") is None:
            message = f"{self.name} needs optuna, which is not installed"
            raise ConfigError(message, hint="pip install 'hpc-toolkit[optuna]'")

    def _climb(
        self, history: History, points: NDArray[np.float64], opening: list[int], n: int
    ) -> list[Proposal]:
        ranks = _ranks(points)
        places = ranks / np.maximum(ranks.max(axis=0), 1)
        free = free_arms(history, opening)
        running = [*history.pending, *opening]
        proposals = []
        for chosen in range(len(opening), len(opening) + n):
            generator = drawn(history, Stream.OPTUNA, chosen)
            # The order of what runs must not tell in how many asks it was asked.
            suggested = self._suggestion(history, ranks, sorted(running), generator)
            away = ((suggested / np.maximum(ranks.max(axis=0), 1) - places) ** 2).sum(axis=1)
            index = first_best_of(-away, free)
            reason = "what TPE suggests" if away[index] == 0.0 else "nearest to what TPE suggests"
            proposals.append(Proposal(history.table.ids[index], None, reason))
            free[index] = False
            running.append(index)
        return proposals

    def _suggestion(
        self,
        history: History,
        ranks: NDArray[np.intp],
        running: Sequence[int],
        generator: np.random.Generator,
    ) -> NDArray[np.float64]:
        """Shape (n_columns,): a rank for each column."""
        import optuna

        highest = [int(rank) for rank in ranks.max(axis=0)]
        space: dict[str, optuna.distributions.BaseDistribution] = {
            str(column): optuna.distributions.IntDistribution(0, high)
            for column, high in enumerate(highest)
            if high
        }

        def told(arm: int, **outcome: Any) -> optuna.trial.FrozenTrial:
            params = {name: int(ranks[arm, int(name)]) for name in space}
            return optuna.trial.create_trial(params=params, distributions=space, **outcome)

        with _quiet():
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
            params = study.ask(space).params
        return np.array([params.get(str(column), 0) for column in range(len(highest))], np.float64)


def _ranks(points: NDArray[np.float64]) -> NDArray[np.intp]:
    """Shape of ``points``: where a value stands among the different ones of its column."""
    ranks = [np.unique(np.round(column, 12), return_inverse=True)[1] for column in points.T]
    return np.array(ranks, dtype=np.intp).reshape(-1, len(points)).T


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's log lines, and its warnings that an argument may change one day."""
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
