"""What a measurement costs by its cluster's file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.training.scaling.comparison import Comparison, compare, priced
from hpc_toolkit.training.scaling.records import series_of
from tests.unit.test_scaling_records import record

if TYPE_CHECKING:
    from pathlib import Path

SITE = """
description = "a site"
source = "here"
checked = 2026-01-01
gpus_per_node = 4
gpu_type = "a100"
price_per_gpu_hour = 2.0
price_per_node_hour = 4.0
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


def test_an_option_wins_over_a_cluster(site: str) -> None:
    found = analysed(on_gpus(cluster=site), price_per_gpu_hour=7.0)

    assert found.rows[0].cost == pytest.approx(7 * 1000 / 10 / 3600)
    assert "price: 7 CAD per GPU-hour, by --price-per-gpu-hour" in told(found)
