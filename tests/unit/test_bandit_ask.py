"""What rules for whole arms promise at the edges; test_bandit_pulls.py has what all policies do."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hpc_toolkit.bandit import Arm, ArmTable, Observation, make_policy
from hpc_toolkit.bandit.asktell import RULES

every_policy = pytest.mark.parametrize("name", sorted(RULES))
GRID = ArmTable(
    tuple(
        Arm(f"s{step}/l{layer}", f"s{step}", (float(step), float(layer)))
        for step in range(6)
        for layer in range(5)
    ),
    ("log1p_step", "layer"),
)


@every_policy
def test_ask_of_nothing_or_with_all_arms_pending_is_empty(name: str) -> None:
    policy = make_policy(name, GRID, 0)

    assert policy.ask(0) == []
    assert policy.ask(2, GRID.ids) == []


@every_policy
def test_ask_without_tells_varies_with_the_seed(name: str) -> None:
    firsts = {make_policy(name, GRID, seed).ask(1)[0].arm for seed in range(30)}

    assert len(firsts) > 10


@every_policy
def test_ask_works_without_features_and_with_one_arm(name: str) -> None:
    table = ArmTable((Arm("only", "g", ()),), ())

    assert [proposal.arm for proposal in make_policy(name, table, 0).ask(5)] == ["only"]


@every_policy
def test_ask_acquisition_is_json(name: str) -> None:
    policy = make_policy(name, GRID, 0)
    for place, arm in enumerate(GRID.ids[:9]):
        policy.tell(Observation(arm, {"task": (place * 5 % 11) / 11}))

    values = [proposal.acquisition for proposal in policy.ask(4)]

    json.dumps(values, allow_nan=False)
    assert not any(isinstance(value, np.generic) for value in values)
