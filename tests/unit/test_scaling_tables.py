"""Tables that others published have the numbers that they state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.scaling.comparison import Comparison, compare
from hpc_toolkit.training.scaling.records import read_source
from hpc_toolkit.training.scaling.tables import read_csv, read_json

PUBLISHED = Path(__file__).with_name("published_scaling.json")


@pytest.fixture(scope="module")
def published() -> dict[str, Comparison]:
    found = read_source(PUBLISHED)
    return {series.name: compare(series) for series in found}


@pytest.mark.parametrize(
    ("name", "speedups", "efficiencies", "gpu_hours"),
    [
        ("QLoRA on 4 x A10", (1, 1.918, 3.767), (1, 0.959, 0.942), (0.1903, 0.1984, 0.2020)),
        (
            "8 x V100",
            (1, 1.959, 3.75, 7.059),
            (1, 0.980, 0.938, 0.882),
            (0.1333, 0.1361, 0.1422, 0.1511),
        ),
        (
            "1.3B parameters on 8 to 32 GPUs",
            (1, 1.932, 3.696),
            (1, 0.966, 0.924),
            (1.889, 1.956, 2.044),
        ),
        ("8 x A100", (1, 1.846, 3.429, 6.0), (1, 0.923, 0.857, 0.75), (12, 13, 14, 16)),
        ("one V100 against eight", (1, 8.3), (1, 1.0375), (8.3, 8.0)),
    ],
)
def test_published_tables_have_these_speedups_efficiencies_and_gpu_hours(
    published: dict[str, Comparison],
    name: str,
    speedups: tuple[float, ...],
    efficiencies: tuple[float, ...],
    gpu_hours: tuple[float, ...],
) -> None:
    rows = published[name].rows

    assert [row.speedup for row in rows] == pytest.approx(speedups, rel=5e-4)
    assert [row.efficiency for row in rows] == pytest.approx(efficiencies, rel=1e-3)
    assert [row.gpu_hours for row in rows] == pytest.approx(gpu_hours, rel=1e-3)


def test_eight_v100_for_an_hour_are_cheaper_than_one_for_its_hours(
    published: dict[str, Comparison],
) -> None:
    one, eight = published["one V100 against eight"].rows

    assert one.cost == pytest.approx(25.398)
    assert eight.cost == pytest.approx(24.48)
    assert eight.premium == pytest.approx(-0.0361, abs=1e-4)


def table(**changes: Any) -> str:
    plain = {"name": "t", "unit": "hours", "points": [{"world_size": 1, "value": 2}]}
    return json.dumps({**plain, **changes})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"points": [{"world_size": 1, "value": NaN}]}', "not JSON: NaN"),
        ('{"tables": []}', r"\[\] is not a table or a list"),
        ('{"tables": [3]}', "table 1: .* is not an object"),
        (table(unit="days"), "unit: 'days' is not one of samples_per_s, seconds, hours"),
        (table(point=3), "unknown key 'point'"),
        (table(points={}), "points: {} is not a list"),
        (table(points=[{"value": 1}]), "{'value': 1} is not a world_size with one value"),
        (table(points=[{"world_size": 1}]), "is not a world_size with one value"),
        (table(points=[{"world_size": 1, "value": "2"}]), "points: value: '2' is not above 0"),
        (table(points=[{"world_size": 1, "value": True}]), "True is not above 0"),
        (
            table(points=[{"world_size": 1, "value": 1e300}]),
            r"1e\+300 is not above 0",
        ),
        (table(points=[{"world_size": 1.5, "value": 2}]), "1.5 is not a whole number from 1"),
        (table(points=[{"world_size": 0, "value": 2}]), "0 is not a whole number from 1"),
        (table(points=[{"world_size": 1, "value": 0}]), "0 is not above 0"),
        (table(points=[{"world_size": 1, "values": []}]), "is not a world_size with"),
        (table(points=[{"world_size": 1, "value": 1, "values": [2]}]), "is not a world_size with"),
        (table(price_per_gpu_hour=-3), "price_per_gpu_hour: -3 is not 0 or more"),
    ],
)
def test_a_table_that_cannot_be_read_names_where(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_json(text, "t.json")


def test_csv_rows_of_one_world_size_are_repeats() -> None:
    text = "world_size,seconds,price_per_hour\n2,30,4\n1,50,2\n2.0,25,4\n"

    (series,) = read_csv(text, "t.csv")

    assert [point.world_size for point in series.points] == [1, 2]
    assert series.points[1].rates == (1 / 30, 1 / 25)
    assert series.points[1].price_per_hour == 4


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "its columns are none"),
        ("world_size,days\n", "its columns are world_size, days"),
        ("world_size,seconds\n1\n", r"t\.csv:2: '' is not a number"),
        ("world_size,seconds\n1,2\n2,1,205\n", r"t\.csv:3: it has more cells"),
        ("world_size,seconds\n", "no world size was measured"),
    ],
)
def test_a_csv_that_cannot_be_read_names_where(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_csv(text, "t.csv")
