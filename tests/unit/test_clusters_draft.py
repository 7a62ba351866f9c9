"""A cluster file drafted from Slurm's own answers is valid, and says what nobody could know."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.clusters import NodeKind
from hpc_toolkit.slurm.clusters.draft import SlurmFacts, draft
from hpc_toolkit.slurm.clusters.facts import Cluster, parse_cluster
from hpc_toolkit.slurm.records import parse_records
from tests.sites import invented

TODAY = dt.date(2026, 11, 21)
OLD_GRES = " Gres=gpu:tesla:2(S:0-1),nvme:1"
OLD_LINEAR = invented(
    "oldtimer",
    ["debug Default=YES MaxTime=00:30:00 MaxNodes=1"],
    ["2*NodeName=x CPUTot=32 RealMemory=190000 MemSpecLimit=2048 Partitions=debug" + OLD_GRES],
    "MaxArraySize = 10001\nSchedulerParameters = disable_job_shrink,bf_interval=30\n"
    "SelectType = select/linear\nSelectTypeParameters = CR_ONE_TASK_PER_CORE\n"
    "AccountingStorageEnforce = none\n",
)
ROUTED = invented(
    "Routed",
    [
        *("cpubase Default=YES MaxTime=03:00:00", "gpubase MaxTime=UNLIMITED"),
        *("private AllowAccounts=lab-a,lab-b MaxTime=7-00:00:00", "admin RootOnly=YES"),
        *("broken State=DOWN", "empty"),
    ],
    [
        "3*NodeName=c CPUEfctv=62 CPUTot=64 RealMemory=250000 Partitions=cpubase,admin,broken",
        "NodeName=h CPUTot=46 RealMemory=2060000 Gres=gpu:h100:8 Partitions=gpubase,private",
        "NodeName=i CPUTot=46 RealMemory=2060000 Gres=gpu:h100:8 Partitions=gpubase",
    ],
    "JobSubmitPlugins = lua\n",
)


def drafted(told: SlurmFacts) -> tuple[str, Cluster]:
    text = draft("site", told, TODAY)
    return text, parse_cluster(text, file="site.toml", name="site")


def test_an_old_slurm_with_select_linear_is_described() -> None:
    text, site = drafted(OLD_LINEAR)

    assert site.partitions[0].nodes == 1
    kind = NodeKind(name="teslax2", cpus=32, mem_mib=190000 - 2048, gpus=(("tesla", 2),))
    assert site.kinds == (replace(kind, gres=(("nvme", 1),)),)
    assert (site.gpu_request, site.max_walltime_s) == ("gres", 1800)
    assert (site.max_array_size, site.shrink_jobs) == (10001, False)
    assert site.defaults == (("time", 1800),)
    assert not site.choose_partition
    assert "does not share out memory" in text
    assert site.mem_style == "none"


def test_a_draft_of_a_site_that_routes_jobs_tells_its_source_partitions_and_nodes() -> None:
    text, site = drafted(ROUTED)

    assert site.source == "hpctk cluster init site --from-slurm"
    assert (site.checked, site.verified) == ("2026-11-21", False)
    assert dict(site.facts)["slurm"] == "24.05.4"
    assert dict(site.identify) == {"slurm_cluster": "Routed"}
    assert "# container_runtime" in text
    assert {one.name: one.kinds for one in site.partitions} == {
        "cpubase": (("cpu62", 3),),
        "gpubase": (("h100x8", 2),),
        "private": (("h100x8", 1),),
    }
    assert site.kinds[1] == NodeKind(name="h100x8", cpus=46, mem_mib=2060000, gpus=(("h100", 8),))
    assert (site.max_walltime_s, site.choose_partition) == (None, False)
    assert "left to the site (JobSubmitPlugins=lua)" in text


@pytest.mark.parametrize("value", ["(null)", "accounting_storage/none"])
def test_a_slurm_without_accounting_is_described_as_such(value: str) -> None:
    """Slurm 24.11 prints "(null)" where 22.05 printed accounting_storage/none."""
    _, site = drafted(replace(ROUTED, config={**ROUTED.config, "AccountingStorageType": value}))

    assert dict(site.facts)["accounting"] == "accounting_storage/none"


def described(partition: str, *nodes: str, config: str = "") -> tuple[str, Cluster]:
    return drafted(invented("x", [partition], list(nodes), config))


@pytest.mark.parametrize("limit", ["ReqResv=YES", "AllocNodes=login9", "AllowGroups=staff"])
def test_a_partition_that_only_some_may_use_is_marked(limit: str) -> None:
    node = "NodeName=n1 CPUTot=4 RealMemory=100 Partitions=a"
    no_limit = "MaxArraySize = 4000001\n"
    text, site = described(f"a {limit}", node, config=no_limit)

    assert f'restricted = "{limit}: ' in text
    assert site.partitions[0].restricted
    assert site.max_array_size == 2**20


@pytest.mark.parametrize(
    ("mems", "kinds"),
    [
        ([*[515000] * 7, *[515900] * 5], {515000: 12}),
        (range(500000, 520000, 500), {500000: 11, 505500: 11, 511000: 11, 516500: 7}),
    ],
)
def test_nodes_with_almost_equal_memory_are_of_one_kind(
    mems: Sequence[int], kinds: dict[int, int]
) -> None:
    line = "NodeName=n{} CPUTot=64 RealMemory={} Partitions=gpu Gres=gpu:a100:4"
    _, site = described("gpu", *(line.format(*one) for one in enumerate(mems)))

    assert [kind.mem_mib for kind in site.kinds] == list(kinds)
    assert [number for _, number in site.partitions[0].kinds] == list(kinds.values())


@pytest.mark.parametrize("gpu", ["tesla-v100", "a100-v2"])
def test_each_kind_of_nodes_has_its_own_name(gpu: str) -> None:
    line = f"NodeName=n{{0}} CPUTot={{0}} RealMemory=9000 Gres=gpu:{gpu}:4 Partitions=a"
    _, site = described("a", *(line.format(number) for number in range(1, 5)))

    assert sum(number for _, number in site.partitions[0].kinds) == len(site.kinds) == 4


def test_a_partition_is_chosen_where_slurm_does_not_route_and_the_default_is_first() -> None:
    node = "NodeName=a CPUTot=64 RealMemory=256000 Partitions=batch,preempt"
    partitions = ["preempt PreemptMode=REQUEUE", "batch Default=YES"]
    text, site = drafted(invented("mixed", partitions, [node]))

    assert [one.name for one in site.partitions] == ["batch", "preempt"]
    assert site.choose_partition
    assert "# the default partition\n[[partitions]]" in text
    assert "PreemptMode=REQUEUE: jobs here may have to give way" in text


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


@pytest.mark.parametrize("key", ["Reason", "Comment", "Extra"])
def test_nothing_is_read_from_free_text(key: str) -> None:
    text = "MemSpecLimit=3 CoreSpecCount=2 Partitions=a"
    line = f"NodeName=n1 RealMemory=5 {key}=x {text}\ny=Gres=gpu:8 {text}\nComment=z {text}\n"

    assert parse_records(line) == ({"NodeName": "n1", "RealMemory": "5"},)
    line = f"NodeName=n1 OS=Linux 6.1 #1 SMP  RealMemory=5 State=IDLE {key}=RealMemory=7 x=y"
    (found,) = parse_records(f"{line}\nNo partitions\n\n")
    assert found["RealMemory"] == "5"


@pytest.mark.parametrize(
    ("values", "cpus"),
    [
        ("CPUEfctv=192 CPUTot=224 CoreSpecCount=16 Sockets=2 CoresPerSocket=56", 192),
        # Slurm 21.08 has no CPUEfctv. A CPU is a thread or a core.
        ("CPUTot=224 CoreSpecCount=16 Sockets=2 CoresPerSocket=56 ThreadsPerCore=2", 192),
        ("CPUTot=112 CoreSpecCount=16 Sockets=2 CoresPerSocket=56 ThreadsPerCore=2", 96),
        ("CPUTot=112 CoreSpecCount=16", 96),
        ("CPUTot=112 Sockets=2 CoresPerSocket=56", 112),
    ],
)
def test_cores_for_the_system_are_not_for_jobs(values: str, cpus: int) -> None:
    _, site = described("a", f"NodeName=n RealMemory=9000 {values} Partitions=a")

    assert site.kinds[0].cpus == cpus


def test_a_slurm_without_partitions_is_refused_and_says_what_was_left_out() -> None:
    told = invented("x", ["a State=DOWN"], [])

    with pytest.raises(ConfigError, match=r"no partition that accepts jobs \('a': State=DOWN\)"):
        draft("site", told, TODAY)


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        *((name, "its name", "") for name in ("../x", "a b", "", "-x")),
        *((f"{one}.toml", "would be read as a path", one) for one in ("x", "a.b")),
    ],
)
def test_a_name_that_is_no_name_or_would_be_taken_for_a_path_is_refused(
    name: str, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        draft(name, OLD_LINEAR, TODAY)
    assert hint in caught.value.hint


def test_hostile_words_of_slurm_stay_in_their_strings_and_comments() -> None:
    told = invented(
        'a"\\b\x1b',
        ["ok AllowAccounts=a\x1b"],
        ["NodeName=n CPUTot=4 RealMemory=100 Partitions=ok,$(x) Gres=gpu:a;b:4"],
        'SLURM_VERSION = 1"\nJobSubmitPlugins = x\x1b[2J',
    )
    with pytest.raises(ConfigError, match="identify: slurm_cluster"):
        draft("site", told, TODAY)
    told.config["ClusterName"] = "ok"
    with pytest.raises(ConfigError, match="gpus: 'a;b:4'"):
        draft("site", told, TODAY)
