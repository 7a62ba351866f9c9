"""Arms and their features, and searches that ask and are told task by task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.bandit import (
    Arm,
    ArmTable,
    Observation,
    Policy,
    Pull,
    TaskSet,
    make_policy,
)
from hpc_toolkit.bandit.arms import with_metrics
from hpc_toolkit.bandit.asktell import RULES
from hpc_toolkit.errors import ConfigError
from tests.unit.test_bandit_policy import best_of

TASKS = TaskSet(("slow", "quick", "middle", "long", "short"), (9.0, 1.0, 4.0, 16.0, 2.0))
UNTIMED = TaskSet(TASKS.names)

VARIANTS: dict[str, dict[str, Any]] = {
    "random": {},
    "gp-ucb": {},
    "gp-ei": {},
    "racing": {},
    "racing in blocks": {"c": 1.0, "first": 2, "block": 2},
    "racing untimed": {"tasks": UNTIMED},
}
"""Every kind of policy, and what it is made with."""

every_variant = pytest.mark.parametrize("variant", VARIANTS)
campaigns = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 2**64)
some_tasks = st.just(list(TASKS.names)) | st.lists(st.sampled_from(TASKS.names), min_size=1)


def grid(steps: int, layers: int) -> ArmTable:
    arms = [
        Arm(f"s{step}/l{layer}", f"s{step}", (float(step), float(layer)))
        for step in range(steps)
        for layer in range(layers)
    ]
    return ArmTable(tuple(arms), ("log1p_step", "layer"))


tables = st.builds(grid, st.integers(1, 4), st.integers(1, 4))


def made(variant: str, table: ArmTable, seed: int) -> Policy:
    name = variant.partition(" ")[0]
    return make_policy(name, table, seed, **{"tasks": TASKS, **VARIANTS[variant]})


def whole(table: ArmTable, arm: str) -> Observation:
    """A result that depends on the arm alone: with ties, failed tasks, and arms that fail."""
    index = table.index(arm)
    names = TASKS.names
    failed = {task for i, task in enumerate(names) if (3 * index + i) % 8 == 7 or index % 9 == 8}
    scores = {
        task: ((5 * index) % 7) / 7 + 0.05 * ((index * i) % 5)
        for i, task in enumerate(names)
        if task not in failed
    }
    seconds = {task: (1 + index % 3) * TASKS.seconds[i] for i, task in enumerate(names)}
    return Observation(arm, scores, dict.fromkeys(scores, 0.01), seconds, tuple(failed))


def part(seen: Observation, tasks: Sequence[str]) -> Observation:
    """What an observation says of some tasks."""
    wanted = set(tasks)
    return Observation(
        seen.arm,
        {task: value for task, value in seen.scores.items() if task in wanted},
        {task: value for task, value in seen.stderrs.items() if task in wanted},
        {task: value for task, value in seen.seconds.items() if task in wanted},
        tuple(wanted.intersection(seen.failed)),
    )


def evaluations(table: ArmTable, told: Sequence[Pull], pull: Pull) -> list[tuple[str, str]]:
    """The (arm, task) pairs that a pull stands for, after these."""
    before = {(one.arm, task) for one in told for task in one.tasks or TASKS.names}
    if pull.tasks:
        return [(pull.arm, task) for task in pull.tasks]
    return [(pull.arm, task) for task in TASKS.names if (pull.arm, task) not in before]


@every_variant
@campaigns
@given(table=tables, seed=seeds, batch=st.integers(1, 6), data=st.data())
def test_campaign_evaluates_each_task_of_an_arm_at_most_once_and_ends(
    variant: str, table: ArmTable, seed: int, batch: int, data: st.DataObject
) -> None:
    """Asks of any size with results that come back in any order and number."""
    policy = made(variant, table, seed)
    asked: list[Pull] = []
    done: list[tuple[str, str]] = []
    pending: list[Pull] = []
    while True:
        new = policy.ask(batch, pending)
        assert len(new) <= batch
        for pull in new:
            done += evaluations(table, asked, pull)
            asked.append(pull)
        pending += new
        if not new and not pending:
            break
        # A policy that waits must be told something.
        least = 0 if new else 1
        back = data.draw(st.lists(st.sampled_from(pending), unique=True, min_size=least))
        for pull in back:
            policy.tell(part(whole(table, pull.arm), pull.tasks or TASKS.names))
            pending.remove(pull)

    assert len(set(done)) == len(done)
    assert {arm for arm, _ in done} == set(table.ids)
    if variant in RULES:
        assert len(done) == len(table.ids) * len(TASKS.names)


@every_variant
@campaigns
@given(table=tables, seed=seeds, data=st.data())
def test_ask_depends_on_what_is_known_and_not_on_how_it_was_told(
    variant: str, table: ArmTable, seed: int, data: st.DataObject
) -> None:
    """Whole tells, tells of one task each in another order, repeats and lost asks are the same."""
    tells = [
        part(whole(table, arm), data.draw(some_tasks))
        for arm in data.draw(st.lists(st.sampled_from(table.ids), unique=True))
    ]
    pending = [
        Pull(arm, tuple(data.draw(st.lists(st.sampled_from(TASKS.names), unique=True))))
        for arm in data.draw(st.lists(st.sampled_from(table.ids), max_size=4))
    ]
    first, second = made(variant, table, seed), made(variant, table, seed)
    for seen in tells:
        first.tell(seen)
    pieces = [part(seen, [task]) for seen in tells for task in {*seen.scores, *seen.failed}]
    for piece in data.draw(st.permutations(pieces)):
        second.ask(2)
        second.tell(piece)
        second.tell(piece)

    expected = first.ask(4, pending)

    assert second.ask(4, pending[::-1] + pending) == expected
    assert second.best() == first.best()
    assert second.stop(pending) == first.stop(pending)
    taken = {(pull.arm, task) for pull in pending for task in pull.tasks or TASKS.names}
    taken |= {(seen.arm, task) for seen in tells for task in (*seen.scores, *seen.failed)}
    assert taken.isdisjoint((p.arm, task) for p in expected for task in p.tasks)


@every_variant
@pytest.mark.parametrize("told", [0, 7, 16])
def test_ask_of_several_equals_asks_of_one_with_the_others_pending(variant: str, told: int) -> None:
    table = grid(4, 4)
    policy = made(variant, table, 5)
    for arm in table.ids[:told]:
        tasks = TASKS.names[:3] if told < 16 else ("quick", "short")
        policy.tell(part(whole(table, arm), TASKS.names if variant in RULES else tasks))
    one_by_one: list[Pull] = []

    for _ in range(9):
        one_by_one += policy.ask(1, one_by_one)

    assert policy.ask(9) == one_by_one


def test_best_compares_partly_told_arms_over_tasks_that_all_of_them_have() -> None:
    """The first arm has the highest score, of another task than the other two."""
    policy = make_policy("random", grid(1, 4), 0, tasks=TASKS)
    policy.tell(Observation("s0/l0", {"quick": 0.9}))
    policy.tell(Observation("s0/l1", {"slow": 0.2}))

    alone = best_of(policy)
    policy.tell(Observation("s0/l2", {"slow": 0.3}))
    both = best_of(policy)

    assert (alone.arm, alone.tasks) == ("s0/l0", ("quick",))
    assert (both.arm, both.tasks) == ("s0/l2", ("slow",))


@every_variant
@campaigns
@given(seed=seeds, data=st.data())
def test_best_is_known_as_soon_as_an_arm_has_as_many_scores_as_failures(
    variant: str, seed: int, data: st.DataObject
) -> None:
    table = grid(2, 3)
    policy = made(variant, table, seed)
    outcomes = st.sampled_from(("score", "failed", "failed", "not told"))
    for arm in table.ids:
        found = {task: data.draw(outcomes) for task in TASKS.names}
        scores = {task: 0.5 for task, what in found.items() if what == "score"}
        failed = tuple(task for task, what in found.items() if what == "failed")
        if scores or failed:
            policy.tell(Observation(arm, scores, failed=failed))
        if scores and len(scores) >= len(failed):
            assert policy.best() is not None


@pytest.mark.parametrize(
    "other",
    [
        Observation("s0/l0", {"quick": 0.6}),
        Observation("s0/l0", {"quick": 0.5}, {"quick": 0.1}),
        Observation("s0/l0", {"quick": 0.5}, seconds={"quick": 2.0}),
        Observation("s0/l0", failed=("quick",)),
    ],
)
def test_tell_of_another_result_of_a_task_is_refused_and_changes_nothing(
    other: Observation,
) -> None:
    policy = make_policy("random", grid(1, 1), 0, tasks=TASKS)
    policy.tell(Observation("s0/l0", {"quick": 0.5}))
    before = policy.best()

    with pytest.raises(ConfigError, match="arm 's0/l0' has another result of"):
        policy.tell(other)

    assert policy.best() == before


NAN = math.nan

TABLE = ArmTable(tuple(Arm(word, "g", (float(i),)) for i, word in enumerate("abcd")), ("layer",))


def table_of(*rows: tuple[float, ...], names: tuple[str, ...] = ("x", "y")) -> ArmTable:
    arms = [Arm(f"arm{i}", f"group{i % 2}", row) for i, row in enumerate(rows)]
    return ArmTable(tuple(arms), names)


def test_table_gap_becomes_the_median_and_an_indicator() -> None:
    values, names = table_of((1.0, 0.0), (2.0, NAN), (9.0, 4.0), (5.0, 1.0)).standardised

    assert names == ("x", "y", "y_missing")
    for column, filled in ((1, [0.0, 1.0, 4.0, 1.0]), (2, [0.0, 1.0, 0.0, 0.0])):
        standardised = (np.array(filled) - np.mean(filled)) / np.std(filled)
        np.testing.assert_allclose(values[:, column], standardised, atol=1e-12)


@given(st.lists(st.tuples(*[st.floats(-1e90, 1e90) | st.just(NAN)] * 2), min_size=1, max_size=8))
def test_standardised_features_have_no_gaps(rows: list[tuple[float, float]]) -> None:
    table = table_of(*rows)

    assert np.isfinite(table.standardised[0]).all()


METRIC = {arm: {"x": 1.0} for arm in "abcd"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ArmTable((), ("x",)), "there are no arms"),
        (lambda: ArmTable((Arm("a", "g", (1.0,)),) * 2, ("x",)), "arm id 'a' occurs 2 times"),
        (lambda: table_of((1.0, 2.0), names=("x", "x")), "feature name 'x' occurs 2 times"),
        (lambda: table_of((1.0, 2.0), (1.0,)), "arm 'arm1' has 1 features, but 2 are named"),
        (lambda: table_of((1.0, math.inf)), "arm 'arm0': feature 'y' is inf"),
        (lambda: table_of((1.0, -1e200)), r"arm 'arm0': feature 'y' is -1e\+200"),
        (lambda: table_of(("deep", 1.0)), r"arm 'arm0': features .* are not numbers"),  # type: ignore[arg-type]
        (lambda: with_metrics(TABLE, {"e": {"x": 1.0}}, ["x"]), "unknown arm 'e'"),
        (
            lambda: with_metrics(with_metrics(TABLE, METRIC, ["x"]), METRIC, ["x"]),
            "feature name 'metric:x' occurs 2 times",
        ),
    ],
)
def test_arms_that_cannot_be_are_refused(make: Callable[[], ArmTable], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_with_metrics_adds_a_named_column_per_metric_that_most_arms_have() -> None:
    rows: dict[str, dict[str, float | None]] = {
        arm: {"entropy": 10.0 + i, "curvature": -i} for i, arm in enumerate("abcd")
    }
    few: dict[str, dict[str, float | None]] = {"a": {"x": 1, "y": 2, "z": None}, "b": {"y": 2}}

    table = with_metrics(TABLE, rows, ["entropy", "curvature"])

    assert table.feature_names == ("layer", "metric:entropy", "metric:curvature")
    assert table.features.tolist() == [[i, 10.0 + i, -i] for i in range(4)]
    assert table.ids == TABLE.ids
    assert with_metrics(TABLE, few, ["x", "y", "z"]).feature_names == ("layer", "metric:y")


def test_columns_of_metrics_that_a_table_lacks_are_refused() -> None:
    policy = make_policy("gp-ucb", TABLE, 0, features="metrics")

    with pytest.raises(ConfigError, match="the arms have no metrics as features"):
        policy.ask(1)
