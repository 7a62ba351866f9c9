from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.bandit.arms import Arm, ArmTable
from hpc_toolkit.bandit.features import GEOMETRY_NAMES, geometry_features
from hpc_toolkit.errors import ConfigError

NAN = math.nan


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


def test_table_members_keep_the_order_of_the_arms() -> None:
    table = table_of((0.0, 0.0), (1.0, 1.0), (2.0, 2.0))

    assert table.members == {"group0": (0, 2), "group1": (1,)}
    assert table.groups == ("group0", "group1", "group0")


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


def test_table_digest_ignores_the_number_type_and_sees_every_other_change() -> None:
    table = table_of((1.0, 2.0), (3.0, 4.0))

    assert table_of((1, 2), (3, np.float64(4))).digest == table.digest
    assert table_of((1.0, 2.0), (3.0, 5.0)).digest != table.digest
    assert table_of((1.0, 2.0), (3.0, 4.0), names=("x", "z")).digest != table.digest
    assert table_of((3.0, 4.0), (1.0, 2.0)).digest != table.digest


def test_table_without_arms_is_refused() -> None:
    with pytest.raises(ConfigError, match="arm table is empty"):
        ArmTable((), ("x",))


def test_table_with_a_repeated_id_is_refused() -> None:
    arms = (Arm("a", "g", (1.0,)), Arm("b", "g", (2.0,)), Arm("a", "g", (3.0,)))

    with pytest.raises(ConfigError, match="arm id 'a' occurs 2 times"):
        ArmTable(arms, ("x",))


def test_table_with_a_repeated_feature_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="feature name 'x' occurs 2 times"):
        table_of((1.0, 2.0), names=("x", "x"))


def test_table_with_ragged_features_is_refused() -> None:
    with pytest.raises(ConfigError, match="arm 'arm1' has 1 features, the table names 2"):
        table_of((1.0, 2.0), (1.0,))


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e200])
def test_table_with_an_unusable_feature_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="arm 'arm0': feature 'y' is"):
        table_of((1.0, value))


def test_arm_with_a_word_for_a_feature_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"arm 'a': features .* are not numbers"):
        Arm("a", "g", ("deep",))  # type: ignore[arg-type]


def test_table_unknown_arm_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown arm 'arm9'") as caught:
        table_of((1.0, 2.0), (3.0, 4.0)).index("arm9")

    assert "did you mean 'arm" in caught.value.hint


def test_geometry_features_are_log_size_log_step_and_relative_depth() -> None:
    values = geometry_features(size=410e6, step=0, layer=18, layers=24)

    assert len(values) == len(GEOMETRY_NAMES)
    assert values == (math.log(410e6), 0.0, 0.75)
    assert geometry_features(size=1, step=143000, layer=0, layers=6)[1] == math.log(143001)


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"size": 0}, "size is 0"),
        ({"size": math.nan}, "size is nan"),
        ({"step": -1}, "step is -1"),
        ({"layer": 7}, "layer 7 of 6 layers"),
        ({"layer": -1}, "layer -1 of 6 layers"),
        ({"layers": 0, "layer": 0}, "layer 0 of 0 layers"),
    ],
)
def test_geometry_value_outside_its_range_is_refused(change: dict[str, int], claim: str) -> None:
    facts = {"size": 1, "step": 1, "layer": 1, "layers": 6} | change

    with pytest.raises(ConfigError, match=claim):
        geometry_features(**facts)
