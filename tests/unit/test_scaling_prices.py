"""What ranks cost: whose price counts, in which currency, and where the page says it is from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.training.scaling.comparison import Comparison, compare
from hpc_toolkit.training.scaling.program import place
from hpc_toolkit.training.scaling.records import series_of
from hpc_toolkit.training.scaling.series import priced
from hpc_toolkit.training.scaling.tables import read_json
from tests.unit.test_scaling_records import record

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


def test_the_price_of_the_partition_counts(tmp_path: Path) -> None:
    path = tmp_path / "parts.toml"
    path.write_text(SITE + '[[partitions]]\nname = "cheap"\nprice_per_gpu_hour = 1.0\n')

    found = analysed(on_gpus(cluster=str(path), partition="cheap"))

    assert found.series.points[0].price_per_hour == 2.0
    assert "partitions.cheap.price_per_gpu_hour" in told(found)


def test_ranks_on_cpus_pay_for_their_nodes_alone(site: str) -> None:
    machine = {**record(1, 1.0)["machine"], "cluster": site}
    records = [record(1, 10.0, machine=machine), record(8, 40.0, machine=machine, nodes=2)]

    found = analysed(records)

    assert [point.price_per_hour for point in found.series.points] == [4.0, 8.0]
    assert found.rows[1].premium == pytest.approx(-0.5)
    assert found.rows[0].energy_kwh is None


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


def test_a_record_names_the_cluster_of_its_job_and_none_outside_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_PARTITION": "gpu"}
    monkeypatch.setenv("HPCTK_CLUSTER", "lab")

    assert place("", {}) == {}
    assert place("x", {}) == {"cluster": "x"}
    assert place("x", job) == {"cluster": "x", "partition": "gpu", "job": "7"}
    assert place("", job)["cluster"] == "lab"
    monkeypatch.setenv("HPCTK_CLUSTER", "generic")
    assert "cluster" not in place("", job)
