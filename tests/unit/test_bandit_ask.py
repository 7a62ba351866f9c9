"""What every policy promises of ask and tell, whatever its rule."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.bandit import Arm, ArmTable, Observation, make_policy
from hpc_toolkit.bandit.registry import RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.bandit import Policy

POLICIES = sorted(RULES)
NAMES = ("log1p_step", "layer")
every_policy = pytest.mark.parametrize("name", POLICIES)


def grid(steps: int, layers: int) -> ArmTable:
    """A regular grid, where symmetric arms make many exact ties."""
    arms = [
        Arm(f"s{step}/l{layer}", f"s{step}", (float(step), float(layer)))
        for step in range(steps)
        for layer in range(layers)
    ]
    return ArmTable(tuple(arms), NAMES)


def observe(table: ArmTable, arm: str, scale: int) -> Observation:
    """A score that depends on the arm alone, with ties; every seventh arm fails."""
    index = table.index(arm)
    if (index + scale) % 7 == 6:
        return Observation(arm, failed=("x", "y"))
    score = ((index * scale) % 11) / 11
    return Observation(arm, {"x": score, "y": score / 3}, {"x": 0.01})


def names_of(policy: Policy, n: int, pending: Sequence[str] = ()) -> list[str]:
    return [proposal.arm for proposal in policy.ask(n, pending)]


def told(name: str, table: ArmTable, seed: int, tells: Sequence[Observation]) -> Policy:
    policy = make_policy(name, table, seed)
    for observation in tells:
        policy.tell(observation)
    return policy


tables = st.builds(grid, st.integers(1, 5), st.integers(1, 5))
seeds = st.integers(0, 2**64)
campaigns = settings(max_examples=40, deadline=None)


@every_policy
@campaigns
@given(table=tables, seed=seeds, batch=st.integers(1, 6), data=st.data())
def test_campaign_asks_each_arm_at_most_once(
    name: str, table: ArmTable, seed: int, batch: int, data: st.DataObject
) -> None:
    """Asks of any size with results that come back in any order and number."""
    policy = make_policy(name, table, seed)
    asked: list[str] = []
    pending: list[str] = []
    while new := names_of(policy, batch, pending):
        assert len(new) <= batch
        asked += new
        pending += new
        back = data.draw(st.lists(st.sampled_from(pending), unique=True))
        for arm in back:
            policy.tell(observe(table, arm, batch))
            pending.remove(arm)

    assert len(set(asked)) == len(asked)
    assert len(asked) == len(table.arms)


@every_policy
@campaigns
@given(table=tables, seed=seeds, data=st.data())
def test_ask_depends_on_what_is_known_and_on_no_order(
    name: str, table: ArmTable, seed: int, data: st.DataObject
) -> None:
    """The order of tells and of pending arms, repeats, and earlier asks change nothing."""
    shuffled = data.draw(st.permutations(table.ids))
    cut = data.draw(st.integers(0, len(shuffled)))
    end = data.draw(st.integers(cut, len(shuffled)))
    tells = [observe(table, arm, 5) for arm in shuffled[:cut]]
    pending = shuffled[cut:end]
    first = told(name, table, seed, tells)
    second = told(name, table, seed, tells[::-1])

    expected = first.ask(3, pending)

    assert first.ask(3, pending) == expected
    second.ask(2)
    assert second.ask(3, pending[::-1] + pending) == expected
    assert second.ask(3, [*pending, *shuffled[:cut]]) == expected
    assert second.best() == first.best()
    assert {proposal.arm for proposal in expected}.isdisjoint(shuffled[:end])


@every_policy
@campaigns
@given(table=tables, seed=seeds, batch=st.integers(1, 4), lag=st.integers(0, 5))
def test_replay_of_a_log_gives_every_recorded_ask_again(
    name: str, table: ArmTable, seed: int, batch: int, lag: int
) -> None:
    """A log of asks, each with the tells taken in before it and the arms pending then."""
    policy = make_policy(name, table, seed)
    log: list[tuple[list[Observation], list[str], list[str]]] = []
    pending: list[str] = []
    while True:
        late = len(pending) - lag
        tells = [observe(table, arm, 4) for arm in pending[: max(late, 0)]]
        for observation in tells:
            policy.tell(observation)
            pending.remove(observation.arm)
        asked = names_of(policy, batch, pending)
        if not asked:
            break
        log.append((tells, list(pending), asked))
        pending += asked

    replayed = make_policy(name, table, seed)
    for tells, waiting, asked in log:
        for observation in reversed(tells):
            replayed.tell(observation)
        assert names_of(replayed, batch, waiting) == asked


@every_policy
@pytest.mark.parametrize("every", [4, 17])
def test_ask_of_several_equals_asks_of_one_with_the_others_pending(name: str, every: int) -> None:
    """With more tells than gp-ucb has initial arms, and with fewer."""
    table = grid(6, 5)
    tells = [observe(table, arm, 5) for arm in table.ids[::every]]
    policy = told(name, table, 3, tells)
    one_by_one: list[str] = []

    for _ in range(6):
        one_by_one += names_of(policy, 1, one_by_one)

    assert names_of(policy, 6) == one_by_one


@every_policy
def test_ask_of_nothing_is_empty(name: str) -> None:
    assert make_policy(name, grid(2, 2), 0).ask(0) == []


@every_policy
def test_ask_with_all_arms_pending_is_empty(name: str) -> None:
    table = grid(3, 3)

    assert make_policy(name, table, 0).ask(2, table.ids) == []


@every_policy
def test_ask_without_tells_varies_with_the_seed(name: str) -> None:
    table = grid(6, 5)

    firsts = {names_of(make_policy(name, table, seed), 1)[0] for seed in range(30)}

    assert len(firsts) > 10


@every_policy
def test_ask_works_without_features_and_with_one_arm(name: str) -> None:
    table = ArmTable((Arm("only", "g", ()),), ())

    assert names_of(make_policy(name, table, 0), 5) == ["only"]


def test_ask_acquisition_is_json() -> None:
    table = grid(4, 4)
    for name in POLICIES:
        policy = told(name, table, 0, [observe(table, arm, 5) for arm in table.ids[:9]])

        values = [proposal.acquisition for proposal in policy.ask(4)]

        json.dumps(values, allow_nan=False)
        assert not any(isinstance(value, np.generic) for value in values)
