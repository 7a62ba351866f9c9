"""A cluster file drafted from Slurm's own answers is valid, and says what nobody could know."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.clusters.draft import SlurmFacts, draft, gpus_of
from hpc_toolkit.slurm.clusters.facts import Cluster, Partition, parse_cluster
from hpc_toolkit.slurm.clusters.files import write_draft
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

    assert (site.nodes, site.gpus_per_node, site.gpu_type) == (1, 2, "tesla")
    assert (site.cpus_per_node, site.mem_per_node_mib) == (32, 190000 - 2048)
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


def test_a_site_that_routes_jobs_is_described_by_its_gpu_nodes() -> None:
    text, site = drafted(ROUTED)

    assert [one.name for one in site.partitions] == [
        *("cpubase_b1", "gpubase_l40s_b1", "gpubase_h100_b1"),
        "private",
    ]
    assert (site.nodes, site.gpus_per_node, site.cpus_per_node) == (4, 4, 62)
    # Two types: only a partition can say which is its own.
    assert site.gpu_type is None
    assert site.partitions[1].gpu_type == "l40s"
    assert site.partitions[2] == Partition(
        name="gpubase_h100_b1",
        nodes=2,
        gpus_per_node=8,
        gpu_type="h100",
        cpus_per_node=46,
        mem_per_node_mib=2060000,
    )
    assert site.partitions[0].gpus_per_node == 0
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

    assert f"# restricted: {limit}" in text
    assert site.partitions[0].restricted


def test_a_partition_for_large_jobs_says_from_how_many_nodes_on() -> None:
    nodes = [f"NodeName=n{i} CPUTot=4 RealMemory=100 Partitions=a" for i in range(3)]

    assert described("PartitionName=a MinNodes=2", *nodes)[1].partitions[0].min_nodes == 2
    assert described("PartitionName=a MinNodes=1", *nodes)[1].partitions[0].min_nodes is None


def test_every_node_that_gives_at_least_as_much_is_counted() -> None:
    nodes = [
        f"NodeName=n{i} CPUTot=64 RealMemory={515000 if i < 7 else 515900} Partitions=gpu"
        " Gres=gpu:a100:4"
        for i in range(12)
    ]
    _, site = described("PartitionName=gpu", *nodes)

    assert (site.nodes, site.mem_per_node_mib, site.gpu_type) == (12, 515000, "a100")


def test_a_partition_of_several_types_of_gpus_names_none() -> None:
    nodes = [
        f"NodeName=n{i} CPUTot=64 RealMemory=515000 Partitions=main"
        f" Gres=gpu:{'l40s' if i < 6 else 'h100'}:4"
        for i in range(10)
    ]
    text, site = described("PartitionName=main", *nodes)

    assert (site.nodes, site.gpus_per_node) == (10, 4)
    assert (site.gpu_type, site.partitions[0].gpu_type) == (None, None)
    assert "# other nodes: 4 x 4 GPUs h100" in text


def test_memory_that_nobody_told_slurm_of_is_unknown() -> None:
    told = facts(
        "ClusterName = x\nSelectTypeParameters = CR_CORE",
        ["PartitionName=a"],
        ["NodeName=n1 CPUTot=4 RealMemory=1 Partitions=a"],
    )
    _, site = drafted(told)

    assert (site.mem_per_node_mib, site.mem_style) == (None, "none")


def test_what_is_unknown_of_one_partition_is_not_that_of_another() -> None:
    told = facts(
        "ClusterName = x\nSelectTypeParameters = CR_CORE_MEMORY",
        ["PartitionName=a Default=YES", "PartitionName=b"],
        [
            "NodeName=n1 CPUTot=4 RealMemory=5000 Partitions=a",
            "NodeName=n2 CPUTot=4 RealMemory=1 Partitions=b",
        ],
    )
    _, site = drafted(told)

    assert (site.cpus_per_node, site.mem_per_node_mib) == (4, None)
    assert [one.mem_per_node_mib for one in site.partitions] == [5000, None]


def test_limits_of_use_are_told_in_comments() -> None:
    text, site = drafted(ROUTED)

    assert not site.account_required
    assert "# account_required = true" in text
    assert "# restricted: AllowAccounts=lab-a,lab-b\n# restricted: DenyQos=low" in text
    for name, why in (("admin", "RootOnly=YES"), ("broken", "State=DOWN"), ("empty", "no nodes")):
        assert f"# Left out: '{name}': {why}" in text


def test_a_partition_is_chosen_where_slurm_does_not_route_and_the_default_is_first() -> None:
    text, site = drafted(MIXED)

    assert [one.name for one in site.partitions] == ["batch", "preempt"]
    assert site.choose_partition
    assert "# the default partition\n# other nodes: 3 x 126 CPUs, 500G" in text
    assert "PreemptMode=REQUEUE: jobs here may have to give way" in text


def test_a_partitions_own_limits_are_less_than_its_nodes() -> None:
    _, site = drafted(MIXED)

    assert (site.nodes, site.cpus_per_node, site.mem_per_node_mib) == (2, 48, 200000)
    assert site.partitions[1].mem_per_node_mib == 240000, "of the cluster"
    assert site.partitions[1].max_walltime_s is None


def test_no_limit_of_arrays_and_no_type_of_gpus_stay_open() -> None:
    text, site = drafted(MIXED)

    assert site.max_array_size is None
    assert site.gpu_type is None
    assert "gpu_type" not in without_comments(text)


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
    ("gres", "gpus"),
    [
        ("(null)", (0, None)),
        ("", (0, None)),
        ("gpu:4", (4, None)),
        ("gpu", (1, None)),
        ("gpu:l40s:4", (4, "l40s")),
        ("gpu:l40s:4(S:0-1)", (4, "l40s")),
        ("gpu:l40s:4(S:0,2),nvme:1", (4, "l40s")),
        ("nvme:2,gpu:a100:2,gpu:v100:6", (6, "v100")),
        ("gpu:a100_3g.20gb:8", (8, "a100_3g.20gb")),
        ("gpu:no_consume:4", (4, None)),
        ("shard:8,mps:100", (0, None)),
    ],
)
def test_gpus_are_read_from_gres(gres: str, gpus: tuple[int, str | None]) -> None:
    assert gpus_of(gres) == gpus


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
    with pytest.raises(ConfigError, match="gpu_type: 'a;b'"):
        draft("site", told, TODAY)


def test_a_draft_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")

    with pytest.raises(ConfigError, match=r"file/site\.toml: cannot be written"):
        write_draft("site", "x", out=str(tmp_path / "file" / "site.toml"), force=False)
