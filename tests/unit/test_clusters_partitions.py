"""The first partition that takes a job is chosen; otherwise each one says why it does not."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.clusters.choice import choose_partition, fitting_site, for_partition
from hpc_toolkit.slurm.clusters.facts import Cluster, load_cluster, parse_cluster
from hpc_toolkit.slurm.clusters.fitting import Needs

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


def needs(**given: Any) -> Needs:
    job = {"nodes": 1, "gpus_per_node": 4, "cpus": 8, "mem_mib": 1024, "time_s": 3600}
    return Needs(**{**job, **given})


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ({}, "short"),
        ({"time_s": 10800}, "short"),
        ({"time_s": 10801}, "long"),
        ({"time_s": 10801, "nodes": 3}, "big"),
        ({"gpus_per_node": 5}, "big"),
        ({"mem_mib": 480 * 1024 + 1}, "big"),
        ({"mem_mib": 0}, "short"),
        ({"gpu_type": "h100"}, "big"),
    ],
)
def test_the_first_partition_in_the_order_of_the_file_that_fits_is_chosen(
    job: dict[str, Any], name: str
) -> None:
    assert choose_partition(MIXED, needs(**job)) == name


def test_a_job_that_fits_nowhere_is_refused_with_the_reason_of_each() -> None:
    with pytest.raises(RenderError) as caught:
        choose_partition(MIXED, needs(nodes=3, cpus=60, time_s=86400))

    assert caught.value.message == (
        "no partition of site offers 3 nodes with 4 GPUs for 1-00:00:00 (site.toml: partitions:"
        " short: time at most 03:00:00; long: nodes at most 2; big: CPUs a node at most 48)"
    )
    assert "requeue" in caught.value.hint


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"nodes": 11}, "short, big: nodes at most 10"),
        ({"gpus_per_node": 9}, "big: GPUs a node at most 8"),
        ({"mem_mib": 3 * 2**20}, "big: memory a node at most 2T"),
        ({"gpu_type": "a100"}, "short, long: its GPUs are l40s"),
    ],
)
def test_a_refusal_names_the_limit(job: dict[str, Any], reason: str) -> None:
    with pytest.raises(RenderError, match=reason):
        choose_partition(MIXED, needs(**job))


def test_a_partition_without_a_limit_takes_what_its_cluster_takes() -> None:
    site = parse_cluster("[[partitions]]\nname = 'a'", file="s.toml", name="s")

    assert choose_partition(site, needs(nodes=10**6, time_s=10**9)) == "a"


@pytest.mark.parametrize("names", [(), ("short", "long"), ("elsewhere",), ("short", "x")])
def test_named_partitions_of_which_one_fits_or_is_unknown_are_accepted(
    names: tuple[str, ...],
) -> None:
    fitting_site(MIXED, names, needs(nodes=2, time_s=20000))


def test_named_partitions_of_which_none_fits_are_refused() -> None:
    with pytest.raises(
        RenderError, match=r"--time: 05:33:20 .*partitions\.short\.max_walltime = 03"
    ):
        fitting_site(MIXED, ("short",), needs(time_s=20000))


def test_nothing_is_checked_where_no_partition_is_known() -> None:
    fitting_site(Cluster(name="s", file="s.toml"), ("a",), needs(nodes=10**6))


def test_a_limit_that_is_the_same_everywhere_is_told_once() -> None:
    text = "gpus_per_node = 4\n[[partitions]]\nname = 'a'\nnodes = 9\n[[partitions]]\nname = 'b'"
    site = parse_cluster(text, file="s.toml", name="s")
    with pytest.raises(RenderError) as caught:
        fitting_site(site, (), needs(gpus_per_node=5, nodes=90))

    assert caught.value.message == (
        "--gpus-per-node: 5 is more than s has (s.toml: gpus_per_node = 4)"
    )


def test_partitions_with_the_same_reason_are_named_together() -> None:
    with pytest.raises(RenderError) as caught:
        fitting_site(load_cluster("killarney"), (), needs(gpus_per_node=9))

    said = caught.value.message
    assert "gpubase_l40s_b4, gpubase_l40s_b5: GPUs a node at most 4; gpubase_h100_b1, " in said
    assert said.endswith("gpubase_h100_b5: GPUs a node at most 8)")


def test_a_refusal_proposes_what_would_help() -> None:
    sources = {"mem_per_node": "$HPCTK_MEM"}
    with pytest.raises(RenderError) as caught:
        choose_partition(MIXED, needs(gpus_per_node=5, mem_mib=3 * 2**20, sources=sources))

    assert caught.value.hint == "request fewer GPUs a node, or less memory than $HPCTK_MEM says"


def test_a_partition_for_large_jobs_takes_no_small_one() -> None:
    site = parse_cluster(
        "[[partitions]]\nname = 'a'\nmin_nodes = 4\n[[partitions]]\nname = 'b'\nnodes = 3",
        file="s.toml",
        name="s",
    )

    assert choose_partition(site, needs(nodes=3)) == "b"
    assert choose_partition(site, needs(nodes=4)) == "a"
    with pytest.raises(RenderError, match=r"--nodes: 3 is less than s takes .*min_nodes = 4"):
        fitting_site(site, ("a",), needs(nodes=3))


def test_a_restricted_partition_is_never_chosen_and_taken_if_named() -> None:
    site = parse_cluster(
        "[[partitions]]\nname = 'a'\nrestricted = true\n[[partitions]]\nname = 'b'\nnodes = 3",
        file="s.toml",
        name="s",
    )

    assert choose_partition(site, needs()) == "b"
    assert fitting_site(site, ("a",), needs(nodes=9)).nodes is None
    with pytest.raises(RenderError, match="--nodes: 9 is more than s has"):
        choose_partition(site, needs(nodes=9))


def test_a_site_of_restricted_partitions_wants_one_to_be_named() -> None:
    text = "[[partitions]]\nname = 'a'\nrestricted = true"
    with pytest.raises(RenderError, match="all partitions are restricted") as caught:
        choose_partition(parse_cluster(text, file="s.toml", name="s"), needs())
    assert "--partition" in caught.value.hint


def test_a_cluster_for_a_partition_has_its_nodes_and_tells_where_they_are_written() -> None:
    big = for_partition(MIXED, MIXED.partitions[2])

    assert (big.gpus_per_node, big.gpu_type, big.mem_per_node_mib) == (8, "h100", 2**21)
    assert big.nodes == 10
    assert big.written("gpus_per_node") == "site.toml: partitions.big.gpus_per_node"
    assert big.written("nodes") == "site.toml: nodes"
