"""Tables that others measured, and what a measurement costs by its cluster's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.scaling.comparison import Comparison, compare
from hpc_toolkit.training.scaling.records import read_source, series_of
from hpc_toolkit.training.scaling.series import priced, read_csv, read_json
from tests.unit.test_scaling_records import record

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


SITE = """
description = "a site"
source = "here"
checked = 2026-01-01
gpus_per_node = 4
gpu_type = "a100"
price_per_gpu_hour = 2.0
price_per_node_hour = 4.0
watts_per_gpu = 400
currency = "CAD"
"""


@pytest.fixture
def site(tmp_path: Path) -> str:
    path = tmp_path / "site.toml"
    path.write_text(SITE)
    return str(path)


def on_gpus(**machine: Any) -> list[dict[str, Any]]:
    where = {**record(1, 1.0)["machine"], "device": "NVIDIA A100", **machine}
    return [record(1, 10.0, machine=where), record(2, 20.0, machine=where)]


def analysed(records: list[dict[str, Any]], **asked: Any) -> Comparison:
    (series,) = series_of(records)
    return compare(priced(series, **asked))


def told(comparison: Comparison) -> str:
    return "; ".join(comparison.series.notes)


def test_the_file_of_the_cluster_that_was_measured_has_the_price(site: str) -> None:
    found = analysed(on_gpus(cluster=site))

    # 2 for the GPU, and a quarter of its node.
    assert found.rows[1].cost_per_1000 == pytest.approx(3 * 2 * 1000 / 20 / 3600)
    assert found.series.currency == "CAD"
    assert f"price: 3 CAD per GPU-hour, by {site}: price_per_gpu_hour and" in told(found)
    assert "it was measured on" not in told(found)


def test_an_option_wins_over_every_price_and_a_table_over_a_cluster(site: str) -> None:
    (table,) = read_json(
        json.dumps(
            {
                "unit": "hours",
                "currency": "USD",
                "price_per_gpu_hour": 5,
                "source": "a guide",
                "points": [{"world_size": 1, "value": 2}],
            }
        ),
        "t",
    )

    both = compare(priced(table, cluster=site, price_per_gpu_hour=7.0))
    of_table = compare(priced(table, cluster=site))

    assert (both.rows[0].cost, of_table.rows[0].cost) == (14.0, 10.0)
    assert of_table.series.currency == "USD"
    assert both.series.notes[:2] == (
        "source: a guide",
        "price: $7 per GPU-hour, by --price-per-gpu-hour",
    )


def test_energy_is_of_measured_power_else_of_the_clusters(site: str) -> None:
    plain = on_gpus(cluster=site)
    seen = [{**one, "utilisation_of_ranks": {"gpu_power_w": 300.0}} for one in plain]

    def kwh(records: list[dict[str, Any]]) -> float:
        found = analysed(records).rows[1].energy_kwh
        assert found is not None
        return found

    hours = 1000 / 20 / 3600
    assert kwh(plain) == pytest.approx(0.4 * 2 * hours)
    assert kwh(seen) == pytest.approx(0.3 * 2 * hours)
    assert "power:" not in told(analysed(seen))
