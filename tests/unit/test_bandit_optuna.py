from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hpc_toolkit.bandit import Arm, ArmTable, Observation, make_policy
from hpc_toolkit.bandit.rules import optuna_tpe
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from hpc_toolkit.bandit import Policy


def square(side: int) -> ArmTable:
    arms = [
        Arm(f"{i:02}{j:02}", f"{i}", (math.exp(i), float(j), 7.0))
        for i in range(side)
        for j in range(side)
    ]
    return ArmTable(tuple(arms), ("a", "b", "same"))


def peak(arm: str) -> float:
    return -((int(arm[:2]) - 9) ** 2) - (int(arm[2:]) - 4) ** 2


def searched(policy: Policy, pulls: int) -> list[float]:
    values = []
    for _ in range(pulls):
        arm = policy.ask(1)[0].arm
        values.append(peak(arm))
        policy.tell(Observation(arm, {"task": values[-1]}))
    return values


def test_optuna_tpe_searches_near_what_was_good() -> None:
    """Ranks, not values, are what it sees: one feature is exponential in the other's units."""
    table = square(15)
    tpe = [searched(make_policy("optuna-tpe", table, seed), 30) for seed in range(4)]
    chance = [searched(make_policy("random", table, seed), 30) for seed in range(4)]

    assert np.mean([values[15:] for values in tpe]) > np.mean(chance) / 2


def test_optuna_tpe_tells_a_new_study_all_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    optuna = pytest.importorskip("optuna")
    studies: list[Any] = []
    create, sampler = optuna.create_study, optuna.samplers.TPESampler

    def recording(**given: Any) -> Any:
        studies.append(create(**given))
        return studies[-1]

    def sampling(**given: Any) -> Any:
        # Equal weights, also beyond the 25 trials after which Optuna forgets by default.
        assert given["weights"](40).tolist() == [1.0] * 40
        return sampler(**given)

    monkeypatch.setattr(optuna, "create_study", recording)
    monkeypatch.setattr(optuna.samplers, "TPESampler", sampling)
    table = square(6)
    policy = make_policy("optuna-tpe", table, 0)
    for arm in table.ids[:30]:
        policy.tell(Observation(arm, {"task": peak(arm)}))
    policy.tell(Observation(table.ids[30], failed=("task",)))

    first, _ = policy.ask(2, table.ids[31:33])

    states = optuna.trial.TrialState
    for study, running in zip(studies, [2, 3], strict=True):
        told = study.get_trials(states=[states.COMPLETE])
        assert [trial.value for trial in told] == [peak(arm) for arm in table.ids[:30]]
        assert [trial.params for trial in told] == [
            {"0": int(arm[:2]), "1": int(arm[2:])} for arm in table.ids[:30]
        ]
        # What was asked of the study runs as well.
        assert len(study.get_trials(states=[states.RUNNING])) in (running, running + 1)
    places = [trial.params for trial in studies[1].get_trials(states=[states.RUNNING])]
    assert {"0": int(first.arm[:2]), "1": int(first.arm[2:])} in places


def test_optuna_tpe_without_optuna_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec("optuna") is not None
    monkeypatch.setattr(optuna_tpe, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="optuna-tpe needs optuna") as caught:
        make_policy("optuna-tpe", square(2), 0)

    assert "hpctk[optuna]" in str(caught.value.hint)
