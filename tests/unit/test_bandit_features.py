from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.bandit import Arm, ArmTable, Observation, make_policy
from hpc_toolkit.bandit.features import columns, with_metrics
from hpc_toolkit.errors import ConfigError

TABLE = ArmTable(tuple(Arm(word, "g", (float(i),)) for i, word in enumerate("abcd")), ("layer",))


def test_feature_that_is_called_as_a_metric_and_is_none_is_refused() -> None:
    arms = (Arm("a", "g", (1.0, 2.0)),)

    with pytest.raises(ConfigError, match="feature 'metric:x' is called as a metric") as told:
        ArmTable(arms, ("metric:x", "layer"))

    assert "with_metrics" in str(told.value.hint)


def test_table_with_metrics_takes_more_metrics() -> None:
    rows = {arm: {"x": float(i), "y": 2.0 * i * i} for i, arm in enumerate("abcd")}

    once = with_metrics(TABLE, rows, ["x"])
    twice = with_metrics(once, rows, ["y"])

    assert twice.feature_names == ("layer", "metric:x", "metric:y")


def test_with_metrics_adds_a_named_column_per_metric_after_the_features() -> None:
    rows = {arm: {"entropy": 10.0 + i, "curvature": -i} for i, arm in enumerate("abcd")}

    table = with_metrics(TABLE, rows, ["entropy", "curvature"])

    assert table.feature_names == ("layer", "metric:entropy", "metric:curvature")
    assert table.features.tolist() == [[i, 10.0 + i, -i] for i in range(4)]
    assert (table.ids, table.groups) == (TABLE.ids, TABLE.groups)
    assert table.digest != TABLE.digest


def test_with_metrics_gaps_become_nan_and_a_column_that_says_so() -> None:
    table = with_metrics(TABLE, {"a": {"x": 1.0}, "b": {"x": None}, "d": {"x": 5.0}}, ["x"])

    np.testing.assert_array_equal(table.features[:, 1], [1.0, math.nan, math.nan, 5.0])
    assert table.standardised.names == ("layer", "metric:x", "metric:x_missing")
    assert columns(table, "metrics").shape == (4, 2)


def test_with_metrics_leaves_out_what_most_arms_lack() -> None:
    rows: dict[str, dict[str, float | None]] = {
        "a": {"x": 1.0, "y": 2.0, "z": None},
        "b": {"y": 2.0},
    }

    table = with_metrics(TABLE, rows, ["x", "y", "z"])

    assert table.feature_names == ("layer", "metric:y")


def test_columns_are_geometry_metrics_or_both() -> None:
    table = with_metrics(TABLE, {arm: {"x": float(ord(arm))} for arm in "abcd"}, ["x"])

    np.testing.assert_array_equal(columns(table, "all"), table.standardised.values)
    np.testing.assert_array_equal(columns(table, "geometry"), TABLE.standardised.values)
    np.testing.assert_array_equal(columns(table, "metrics"), table.standardised.values[:, 1:])


def test_columns_of_metrics_that_a_table_lacks_are_refused() -> None:
    policy = make_policy("gp-ucb", TABLE, 0, features="metrics")

    with pytest.raises(ConfigError, match="the arms have no metrics as features"):
        policy.ask(1)


def test_with_metrics_of_an_unknown_metric_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no arm has a metric 'entrpy'") as caught:
        with_metrics(TABLE, {"a": {"entropy": 1.0}}, ["entrpy"])

    assert caught.value.hint == "did you mean 'entropy'?"


def test_with_metrics_of_an_unknown_arm_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown arm 'e'"):
        with_metrics(TABLE, {"e": {"x": 1.0}}, ["x"])


def test_with_metrics_twice_is_refused() -> None:
    rows = {arm: {"x": 1.0} for arm in "abcd"}

    with pytest.raises(ConfigError, match="feature name 'metric:x' occurs 2 times"):
        with_metrics(with_metrics(TABLE, rows, ["x"]), rows, ["x"])


def test_with_metrics_of_an_infinite_value_is_refused() -> None:
    rows = {"a": {"x": math.inf}, "b": {"x": 1.0}, "c": {"x": 1.0}}

    with pytest.raises(ConfigError, match="arm 'a': feature 'metric:x' is inf"):
        with_metrics(TABLE, rows, ["x"])


def wide_table(count: int) -> ArmTable:
    """Arms in a line, and a metric that orders them otherwise."""
    arms = tuple(Arm(str(i), "g", (float(i),)) for i in range(count))
    rows = {arm.id: {"x": float(int(arm.id) * 17 % count)} for arm in arms}
    return with_metrics(ArmTable(arms, ("layer",)), rows, ["x"])


@pytest.mark.parametrize(
    "options", [{"features": "metrics"}, {"features": "all", "mean": "linear"}]
)
@pytest.mark.parametrize("name", ["gp-ucb", "gp-ei"])
def test_policies_follow_a_metric_where_they_are_told_to_look_at_it(
    name: str, options: dict[str, Any]
) -> None:
    """The score is a line in the metric and a jumble in the geometry."""
    table = wide_table(101)
    found = {}
    asked: list[dict[str, Any]] = [{}, options]
    for features in asked:
        policy = make_policy(name, table, 2, **features)
        for _ in range(12):
            arm = policy.ask(1)[0].arm
            policy.tell(Observation(arm, {"task": (int(arm) * 17 % 101) / 100}))
        best = policy.best()
        assert best is not None
        found[bool(features)] = best.mean

    assert found[True] >= 0.99
    assert found[False] < found[True]


def test_policies_on_geometry_ask_the_same_whether_or_not_there_are_metrics() -> None:
    table = wide_table(31)
    bare = ArmTable(tuple(Arm(a.id, a.group, a.features[:1]) for a in table.arms), ("layer",))
    for name in ("gp-ucb", "gp-ei", "gp-ts", "top-two", "optuna-tpe"):
        asked = []
        for arms in (table, bare):
            policy = make_policy(name, arms, 4)
            for i in range(0, 30, 5):
                policy.tell(Observation(str(i), {"task": math.sin(i)}))
            asked.append([proposal.arm for proposal in policy.ask(3)])

        assert asked[0] == asked[1]
