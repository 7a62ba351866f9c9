"""Arms, their features and their metrics."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.bandit import Arm, ArmTable, make_policy
from hpc_toolkit.bandit.arms import with_metrics
from hpc_toolkit.errors import ConfigError

NAN = math.nan

TABLE = ArmTable(tuple(Arm(word, "g", (float(i),)) for i, word in enumerate("abcd")), ("layer",))


def table_of(*rows: tuple[float, ...], names: tuple[str, ...] = ("x", "y")) -> ArmTable:
    arms = [Arm(f"arm{i}", f"group{i % 2}", row) for i, row in enumerate(rows)]
    return ArmTable(tuple(arms), names)


def test_table_gap_becomes_the_median_and_an_indicator() -> None:
    made = table_of((1.0, 0.0), (2.0, NAN), (9.0, 4.0), (5.0, 1.0)).standardised

    assert made.names == ("x", "y", "y_missing")
    for column, filled in ((1, [0.0, 1.0, 4.0, 1.0]), (2, [0.0, 1.0, 0.0, 0.0])):
        standardised = (np.array(filled) - np.mean(filled)) / np.std(filled)
        np.testing.assert_allclose(made.values[:, column], standardised, atol=1e-12)


@given(st.lists(st.tuples(*[st.floats(-1e90, 1e90) | st.just(NAN)] * 2), min_size=1, max_size=8))
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
