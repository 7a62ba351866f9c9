from __future__ import annotations

import importlib.util
import logging
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hpc_toolkit.bandit import Arm, ArmTable, Observation, make_policy, optuna_tpe
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


def test_optuna_tpe_begins_with_the_space_filling_arms_of_the_others() -> None:
    table = square(6)

    first = [make_policy(name, table, 3).ask(5) for name in ("optuna-tpe", "gp-ucb")]

    assert first[0] == first[1]


def test_optuna_tpe_says_nothing_on_its_own(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    optuna = pytest.importorskip("optuna")
    before = optuna.logging.get_verbosity()

    with caplog.at_level(logging.DEBUG):
        searched(make_policy("optuna-tpe", square(4), 0), 8)

    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert optuna.logging.get_verbosity() == before


def test_optuna_tpe_without_optuna_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec("optuna") is not None
    monkeypatch.setattr(optuna_tpe, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="optuna-tpe needs optuna") as caught:
        make_policy("optuna-tpe", square(2), 0)

    assert "hpc-toolkit[optuna]" in str(caught.value.hint)
