"""A cluster file drafted from Slurm's own answers is valid, and says what nobody could know."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.clusters.draft import SlurmFacts, draft
from hpc_toolkit.slurm.clusters.facts import Cluster, parse_cluster
from hpc_toolkit.slurm.clusters.files import write_draft
from hpc_toolkit.slurm.clusters.nodes import NodeKind, read_gres
from hpc_toolkit.slurm.controller import parse_config
from hpc_toolkit.slurm.records import parse_records
from tests.scontrol_outputs import MIXED, OLD_LINEAR, ROUTED, facts

if TYPE_CHECKING:
    from pathlib import Path

TODAY = dt.date(2026, 11, 21)


def drafted(told: SlurmFacts) -> tuple[str, Cluster]:
    text = draft("site", told, TODAY)
    return text, parse_cluster(text, file="site.toml", name="site")


def without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def test_an_old_slurm_with_select_linear_is_described() -> None:
    text, site = drafted(OLD_LINEAR)

    assert site.partitions[0].nodes == 1
    assert site.kinds == (
        NodeKind(
            name="teslax2",
            cpus=32,
            mem_mib=190000 - 2048,
            gpus=(("tesla", 2),),
            gres=(("nvme", 1),),
        ),
    )
    assert (site.gpu_request, site.max_walltime_s) == ("gres", 1800)
    assert (site.max_array_size, site.shrink_jobs) == (10001, False)
    assert site.defaults == (("time", 1800),)
    assert not site.choose_partition
    assert "does not share out memory" in text
    assert site.mem_style == "none"


def test_a_draft_tells_its_source_its_date_and_that_nobody_verified_it() -> None:
    text, site = drafted(ROUTED)

    assert site.source == "hpctk cluster init site --from-slurm"
    assert (site.checked, site.verified) == ("2026-11-21", False)
    assert dict(site.facts)["slurm"] == "25.05.3"
    assert dict(site.identify) == {"slurm_cluster": "Routed"}
    assert "# container_runtime" in text


@pytest.mark.parametrize("value", ["(null)", "accounting_storage/none"])
def test_a_slurm_without_accounting_is_described_as_such(value: str) -> None:
    """Slurm 24.11 prints "(null)" where 22.05 printed accounting_storage/none."""
    _, site = drafted(replace(ROUTED, config={**ROUTED.config, "AccountingStorageType": value}))

    assert dict(site.facts)["accounting"] == "accounting_storage/none"


def test_a_site_that_routes_jobs_lists_its_partitions_and_their_nodes() -> None:
    text, site = drafted(ROUTED)

    assert {one.name: one.kinds for one in site.partitions} == {
        "cpubase_b1": (("cpu62", 3),),
        "gpubase_l40s_b1": (("l40sx4", 4),),
        "gpubase_h100_b1": (("h100x8", 2),),
        "private": (("h100x8", 1),),
    }
    assert site.kinds[2] == NodeKind(name="h100x8", cpus=46, mem_mib=2060000, gpus=(("h100", 8),))
    assert site.max_walltime_s is None
    assert not site.choose_partition
    assert "left to the site (JobSubmitPlugins=lua)" in text


def described(partition: str, *nodes: str, config: str = "") -> tuple[str, Cluster]:
    settings = f"ClusterName = x\nSelectTypeParameters = CR_CORE_MEMORY\n{config}"
    return drafted(facts(settings, [partition], list(nodes)))


@pytest.mark.parametrize("limit", ["ReqResv=YES", "AllocNodes=login9", "AllowGroups=staff"])
def test_a_partition_that_only_some_may_use_is_marked(limit: str) -> None:
    text, site = described(
        f"PartitionName=a State=UP {limit}", "NodeName=n1 CPUTot=4 RealMemory=100 Partitions=a"
    )

    assert f'restricted = "{limit}: ' in text
    assert site.partitions[0].restricted


def test_a_partition_for_large_jobs_says_from_how_many_nodes_on() -> None:
    nodes = [f"NodeName=n{i} CPUTot=4 RealMemory=100 Partitions=a" for i in range(3)]

    assert described("PartitionName=a MinNodes=2", *nodes)[1].partitions[0].min_nodes == 2
    assert described("PartitionName=a MinNodes=1", *nodes)[1].partitions[0].min_nodes is None


def test_nodes_with_almost_equal_memory_are_of_one_kind() -> None:
    nodes = [
        f"NodeName=n{i} CPUTot=64 RealMemory={515000 if i < 7 else 515900} Partitions=gpu"
        " Gres=gpu:a100:4"
        for i in range(12)
    ]
    _, site = described("PartitionName=gpu", *nodes)

    assert site.partitions[0].kinds == (("a100x4", 12),)
    assert site.kinds[0].mem_mib == 515000


def test_memory_that_nobody_told_slurm_of_is_unknown() -> None:
    told = facts(
        "ClusterName = x\nSelectTypeParameters = CR_CORE",
        ["PartitionName=a", "PartitionName=b"],
        [
            "NodeName=n1 CPUTot=4 RealMemory=1 Partitions=a",
            "NodeName=n2 CPUTot=4 RealMemory=5000 Partitions=b",
        ],
    )
    _, site = drafted(told)

    assert [kind.mem_mib for kind in site.kinds] == [None, 5000]
    assert [kind.name for kind in site.kinds] == ["cpu4", "cpu4-5000M"]
    assert site.mem_style == "none"


def test_limits_of_use_are_told_in_comments() -> None:
    text, site = drafted(ROUTED)

    assert not site.account_required
    assert "# account_required = true" in text
    assert 'restricted = "AllowAccounts=lab-a,lab-b: your accounts are unknown"' in text
    for name, why in (("admin", "RootOnly=YES"), ("broken", "State=DOWN"), ("empty", "no nodes")):
        assert f"# Left out: '{name}': {why}" in text


def test_a_partition_is_chosen_where_slurm_does_not_route_and_the_default_is_first() -> None:
    text, site = drafted(MIXED)

    assert [one.name for one in site.partitions] == ["batch", "preempt"]
    assert site.choose_partition
    assert "# the default partition\n[[partitions]]" in text
    assert "PreemptMode=REQUEUE: jobs here may have to give way" in text


def test_a_partitions_own_limits_are_less_than_its_nodes() -> None:
    _, site = drafted(MIXED)
    batch, preempt = site.partitions

    assert dict(batch.kinds) == {"cpu126": 3, "gpux4": 2}
    assert (batch.max_cpus_per_node, batch.max_mem_per_node_mib) == (48, 200000)
    assert preempt.max_mem_per_node_mib == 240000, "of the cluster"
    assert preempt.max_walltime_s is None


def test_no_limit_of_arrays_and_no_type_of_gpus_stay_open() -> None:
    _, site = drafted(MIXED)

    assert site.max_array_size is None
    assert {kind.name: kind.gpus for kind in site.kinds}["gpux4"] == (("", 4),)


def test_every_suggestion_in_a_comment_is_valid_where_it_stands() -> None:
    text, _ = drafted(OLD_LINEAR)
    lines = text.split("\n")
    suggested = [
        line.removeprefix("# ") if line.startswith(("# [", "# f", "# l", "# c", "# NCCL")) else line
        for line in lines
        if "modules = []" not in line
    ]

    site = parse_cluster("\n".join(suggested), file="site.toml", name="site")

    assert site.forbidden_submit_dirs == ("~",)
    assert site.container_runtime == "apptainer"
    assert dict(site.nccl) == {"NCCL_SOCKET_IFNAME": "ib0"}


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("", []),
        ("gpu:4", [("gpu", "", 4)]),
        ("gpu", [("gpu", "", 1)]),
        ("gpu:l40s:4(S:0,2),nvme:1", [("gpu", "l40s", 4), ("nvme", "", 1)]),
        ("gpu:a100:2,gpu:v100:6", [("gpu", "a100", 2), ("gpu", "v100", 6)]),
        ("gpu:a100_3g.20gb:8", [("gpu", "a100_3g.20gb", 8)]),
        ("gpu:no_consume:4", [("gpu", "", 4)]),
        ("shard:a100:8,mps:400", [("shard", "a100", 8), ("mps", "", 400)]),
        ("gpu:a100:2,gpu:a100:2", [("gpu", "a100", 4)]),
    ],
)
def test_resources_are_read_from_gres(gres: str, found: list[tuple[str, str, int]]) -> None:
    assert read_gres(gres) == found


def test_text_with_spaces_and_equal_signs_hides_no_value() -> None:
    line = "NodeName=n1 OS=Linux 6.1 #1 SMP  RealMemory=5 State=IDLE Reason=RealMemory=7 x=y"

    assert parse_records(f"{line}\nNo partitions\n\n")[0]["RealMemory"] == "5"
    assert len(parse_records(f"{line}\nNo partitions\n\n")) == 1


def test_settings_are_read_with_their_spaces_and_indices() -> None:
    told = parse_config(
        "Configuration data as of x\nA = (null)\nSlurmctldHost[0]  = a(b)\nB   = \n"
    )

    assert told == {"A": "(null)", "SlurmctldHost[0]": "a(b)", "B": ""}


def test_a_slurm_without_partitions_is_refused_and_says_what_was_left_out() -> None:
    told = facts("ClusterName = x", ["PartitionName=a State=DOWN"], [])

    with pytest.raises(ConfigError, match=r"no partition that accepts jobs \('a': State=DOWN\)"):
        draft("site", told, TODAY)


@pytest.mark.parametrize("name", ["../x", "a b", "", "-x"])
def test_a_name_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="its name"):
        draft(name, OLD_LINEAR, TODAY)


@pytest.mark.parametrize("name", ["x.toml", "a.b.toml"])
def test_a_name_that_would_be_taken_for_a_path_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="would be read as a path") as caught:
        draft(name, OLD_LINEAR, TODAY)
    assert name.removesuffix(".toml") in caught.value.hint


def test_hostile_words_of_slurm_stay_in_their_strings_and_comments() -> None:
    told = facts(
        'ClusterName = a"\\b\x1b\nSLURM_VERSION = 1"\nJobSubmitPlugins = x\x1b[2J',
        ["PartitionName=ok State=UP AllowAccounts=a\x1b"],
        ["NodeName=n1 CPUTot=4 RealMemory=100 Partitions=ok,$(x) Gres=gpu:a;b:4"],
    )
    with pytest.raises(ConfigError, match="identify: slurm_cluster"):
        draft("site", told, TODAY)
    told.config["ClusterName"] = "ok"
    with pytest.raises(ConfigError, match="gpus: 'a;b:4'"):
        draft("site", told, TODAY)


def test_a_draft_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")

    with pytest.raises(ConfigError, match=r"file/site\.toml: cannot be written"):
        write_draft("site", "x", out=str(tmp_path / "file" / "site.toml"), force=False)
