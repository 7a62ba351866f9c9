"""The first partition that takes a job is chosen; otherwise each one says why it does not."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_toolkit.clusters.facts import Cluster, load_cluster, parse_cluster
from hpc_toolkit.clusters.partitions import check_partitions, choose_partition, for_partition
from hpc_toolkit.errors import RenderError

MIXED = parse_cluster(
    """
    nodes = 10
    gpus_per_node = 4
    gpu_type = "l40s"
    cpus_per_node = 64
    mem_per_node = "480G"
    choose_partition = true
    [[partitions]]
    name = "short"
    max_walltime = "3:00:00"
    [[partitions]]
    name = "long"
    max_walltime = "2-00:00:00"
    nodes = 2
    [[partitions]]
    name = "big"
    gpus_per_node = 8
    gpu_type = "h100"
    cpus_per_node = 48
    mem_per_node = "2T"
    """,
    file="site.toml",
    name="site",
)


def needs(**given: Any) -> dict[str, Any]:
    job = {"nodes": 1, "gpus_per_node": 4, "cpus": 8, "mem_mib": 1024, "time_s": 3600}
    return {**job, **given}


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ({}, "short"),
        ({"time_s": 10800}, "short"),
        ({"time_s": 10801}, "long"),
        ({"time_s": 10801, "nodes": 3}, "big"),
        ({"time_s": 172801}, "big"),
        ({"gpus_per_node": 5}, "big"),
        ({"mem_mib": 480 * 1024 + 1}, "big"),
        ({"mem_mib": 0}, "short"),
        ({"cpus": None, "mem_mib": None}, "short"),
        ({"gpu_type": "h100"}, "big"),
        ({"gpu_type": "l40s"}, "short"),
        ({"cpus": 64, "gpus_per_node": 0}, "short"),
    ],
)
def test_the_first_partition_in_the_order_of_the_file_that_fits_is_chosen(
    job: dict[str, Any], name: str
) -> None:
    assert choose_partition(MIXED, **needs(**job)).name == name


def test_a_job_that_fits_nowhere_is_refused_with_the_reason_of_each() -> None:
    with pytest.raises(RenderError) as caught:
        choose_partition(MIXED, **needs(nodes=3, cpus=60, time_s=86400))

    assert caught.value.message == (
        "no partition of site gives 3 nodes with 4 GPUs for 1-00:00:00 (site.toml: partitions:"
        " short: time at most 03:00:00; long: nodes at most 2; big: CPUs a node at most 48)"
    )
    assert "requeue" in caught.value.hint


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"nodes": 11}, "nodes at most 10"),
        ({"gpus_per_node": 9}, "big: GPUs a node at most 8"),
        ({"mem_mib": 3 * 2**20}, "big: memory a node at most 2T"),
        ({"gpu_type": "a100"}, "short: its GPUs are l40s"),
    ],
)
def test_a_refusal_names_the_limit(job: dict[str, Any], reason: str) -> None:
    with pytest.raises(RenderError, match=reason):
        choose_partition(MIXED, **needs(**job))


def test_a_partition_without_a_limit_takes_what_its_cluster_takes() -> None:
    site = parse_cluster("[[partitions]]\nname = 'a'", file="s.toml", name="s")

    assert choose_partition(site, **needs(nodes=10**6, time_s=10**9)).name == "a"


@pytest.mark.parametrize(
    "names", [(), ("short", "long"), ("long",), ("elsewhere",), ("short", "x")]
)
def test_named_partitions_of_which_one_fits_or_is_unknown_are_accepted(
    names: tuple[str, ...],
) -> None:
    check_partitions(MIXED, names, **needs(nodes=2, time_s=20000))


def test_named_partitions_of_which_none_fits_are_refused() -> None:
    with pytest.raises(RenderError, match=r"partitions: short: time at most 03:00:00\)"):
        check_partitions(MIXED, ("short",), **needs(time_s=20000))


def test_nothing_is_checked_where_no_partition_is_known() -> None:
    check_partitions(Cluster(name="s", file="s.toml"), ("a",), **needs(nodes=10**6))


def test_a_cluster_for_a_partition_has_its_nodes_and_tells_where_they_are_written() -> None:
    big = for_partition(MIXED, MIXED.partitions[2])

    assert (big.gpus_per_node, big.gpu_type, big.mem_per_node_mib) == (8, "h100", 2**21)
    assert big.nodes == 10
    assert big.written("gpus_per_node") == "site.toml: partitions.big.gpus_per_node"
    assert big.written("nodes") == "site.toml: nodes"


def test_a_killarney_job_of_a_day_fits_into_the_third_tier() -> None:
    found = choose_partition(load_cluster("killarney"), **needs(nodes=40, time_s=86400))

    assert found.name == "gpubase_l40s_b3"
