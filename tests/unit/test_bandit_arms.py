"""Arms, their features and their metrics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.bandit import Arm, ArmTable, Observation, make_policy
from hpc_toolkit.bandit.arms import GEOMETRY_NAMES, columns, geometry_features, with_metrics
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

NAN = math.nan

TABLE = ArmTable(tuple(Arm(word, "g", (float(i),)) for i, word in enumerate("abcd")), ("layer",))


def table_of(*rows: tuple[float, ...], names: tuple[str, ...] = ("x", "y")) -> ArmTable:
    arms = [Arm(f"arm{i}", f"group{i % 2}", row) for i, row in enumerate(rows)]
    return ArmTable(tuple(arms), names)


def test_table_columns_are_standardised() -> None:
    table = table_of((0.0, 10.0), (1.0, 30.0), (2.0, 20.0))

    made = table.standardised

    np.testing.assert_allclose(made.values.mean(axis=0), 0.0, atol=1e-12)
    np.testing.assert_allclose(made.values.std(axis=0), 1.0)
    np.testing.assert_allclose(
        made.values * table.features.std(axis=0),
        table.features - table.features.mean(axis=0),
        atol=1e-12,
    )


def test_table_gap_becomes_the_median_and_an_indicator() -> None:
    made = table_of((1.0, 0.0), (2.0, NAN), (9.0, 4.0), (5.0, 1.0)).standardised

    assert made.names == ("x", "y", "y_missing")
    for column, filled in ((1, [0.0, 1.0, 4.0, 1.0]), (2, [0.0, 1.0, 0.0, 0.0])):
        standardised = (np.array(filled) - np.mean(filled)) / np.std(filled)
        np.testing.assert_allclose(made.values[:, column], standardised, atol=1e-12)


@pytest.mark.parametrize("value", [0.1, NAN, math.log(410e6)])
def test_table_constant_column_becomes_zero(value: float) -> None:
    made = table_of(*[(value, float(i)) for i in range(7)]).standardised

    np.testing.assert_allclose(made.values[:, 0], 0.0, atol=1e-12)


@given(
    st.lists(
        st.tuples(*[st.floats(-1e90, 1e90) | st.just(NAN)] * 2),
        min_size=1,
        max_size=8,
    )
)
def test_standardised_features_have_no_gaps(rows: list[tuple[float, float]]) -> None:
    table = table_of(*rows)

    assert np.isfinite(table.standardised.values).all()


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


def test_table_unknown_arm_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown arm 'arm9'") as caught:
        table_of((1.0, 2.0), (3.0, 4.0)).index("arm9")

    assert "did you mean 'arm" in caught.value.hint


def test_geometry_features_are_log_size_log_step_and_relative_depth() -> None:
    values = geometry_features(size=410e6, step=0, layer=18, layers=24)

    assert len(values) == len(GEOMETRY_NAMES)
    assert values == (math.log(410e6), 0.0, 0.75)
    assert geometry_features(size=1, step=143000, layer=0, layers=6)[1] == math.log(143001)


def test_with_metrics_adds_a_named_column_per_metric_after_the_features() -> None:
    rows = {arm: {"entropy": 10.0 + i, "curvature": -i} for i, arm in enumerate("abcd")}

    table = with_metrics(TABLE, rows, ["entropy", "curvature"])

    assert table.feature_names == ("layer", "metric:entropy", "metric:curvature")
    assert table.features.tolist() == [[i, 10.0 + i, -i] for i in range(4)]
    assert table.ids == TABLE.ids


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


def wide_table(count: int) -> ArmTable:
    """Arms in a line, and a metric that orders them otherwise."""
    arms = tuple(Arm(str(i), "g", (float(i),)) for i in range(count))
    rows = {arm.id: {"x": float(int(arm.id) * 17 % count)} for arm in arms}
    return with_metrics(ArmTable(arms, ("layer",)), rows, ["x"])


def test_policies_on_geometry_ask_the_same_whether_or_not_there_are_metrics() -> None:
    table = wide_table(31)
    bare = ArmTable(tuple(Arm(a.id, a.group, a.features[:1]) for a in table.arms), ("layer",))
    for name in ("gp-ucb", "gp-ei", "gp-ts", "optuna-tpe"):
        asked = []
        for arms in (table, bare):
            policy = make_policy(name, arms, 4)
            for i in range(0, 30, 5):
                policy.tell(Observation(str(i), {"task": math.sin(i)}))
            asked.append([proposal.arm for proposal in policy.ask(3)])

        assert asked[0] == asked[1]
