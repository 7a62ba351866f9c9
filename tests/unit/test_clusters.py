"""A cluster file states facts; a slip names file and key; a drafted one says what is unknown."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.clusters import NodeKind
from hpc_toolkit.slurm.clusters.draft import SlurmFacts, draft
from hpc_toolkit.slurm.clusters.facts import (
    KEYS,
    Cluster,
    cluster_names,
    load_cluster,
    parse_cluster,
)
from hpc_toolkit.slurm.clusters.keys import PARTITION_KEYS, Partition
from hpc_toolkit.slurm.controller import parse_config
from hpc_toolkit.slurm.records import parse_records
from tests.clusterkeys import cluster_tables
from tests.sites import invented


def parse(text: str) -> Cluster:
    return parse_cluster(text, file="site.toml", name="site")


def test_builtin_clusters_load_and_say_where_their_facts_are_from() -> None:
    assert cluster_names() == ["generic", "killarney", "lab"]
    for name in cluster_names():
        cluster = load_cluster(name)
        assert (cluster.name, cluster.file) == (name, f"clusters/{name}.toml")
        assert cluster.description
        assert name == "generic" or (cluster.source and cluster.checked)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"\xff\xfe", "not UTF-8"), (b"a = [", "Unclosed|Invalid|Expected")],
)
def test_load_cluster_of_an_unreadable_file_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=f"mine.toml: .*({message})"):
        load_cluster(str(path))


def test_load_cluster_of_an_unknown_or_unprintable_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown cluster: 'kilarney'") as caught:
        load_cluster("kilarney")
    assert "did you mean 'killarney'?" in caught.value.hint
    for name in ("a\0b", "x\n.toml", "../x\x1b/y"):
        with pytest.raises(ConfigError, match="control character"):
            load_cluster(name)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        *((f"nodes = {one}", "nodes") for one in ("0", "true", "99999999999999999999")),
        *(("nodes = 1.5", "nodes"), ("price_per_node_hour = '2 USD'", "price_per_node_hour")),
        *(("mem_style = 'none at all'", "mem_style"), ("binds = '/a'", "binds")),
        *(("partitions = {name = 'a'}", "partitions"), ("facts = {a = {b = 'c'}}", "facts")),
        *(("gpus_per_node = '4'", "gpus_per_node"), ("gpu_request = 'gpu'", "gpu_request")),
        ('gpu_type = "l40s\\n#SBATCH --evil"', "gpu_type"),
        *(("mem_per_node = 480", "mem_per_node"), ("max_walltime = '90'", "max_walltime")),
        *(("verified = 'yes'", "verified"), ("checked = 2026-01-19T00:00:00", "checked")),
        *(("source = 1", "source"), ('description = "a\\u001bb"', "description")),
        ("modules = 'cuda'", "modules"),
        ("env = ['A=1']", "env"),
        ("env = {A = 1}", r"env\.A"),
        ("defaults = 1", "defaults"),
        ("defaults = {cpus_per_task = '5'}", "defaults: cpus_per_task"),
        ("defaults = {mem = '5G', mem_per_cpu = '1G'}", "defaults: mem and mem_per_cpu exclude"),
        *(
            (f"defaults = {{{key} = {value}}}", f"defaults: {key}")
            for key, value in {"time": "'ninety'", "mem": "'lots'", "mem_per_cpu": "'0'"}.items()
        ),
        ("defaults = {account = 'a;b'}", "defaults: account"),
        ("defaults = {cpus_per_task = 5000}", "defaults: cpus_per_task"),
        ("identify = {env = 'SITE'}", "identify: env"),
        ("choose_partition = true", "choose_partition: no "),
        ("conda_base = 'opt/conda'", "conda_base"),
        ("binds = ['/data:/data:rx']", "binds"),
        ("nccl = {LD_LIBRARY_PATH = '/x'}", "nccl: LD_LIBRARY_PATH is not a variable"),
        *(("modules = ['cuda; rm']", "modules"), ("setup = ['echo $HOME']", "setup")),
        ("env = {IFS = 'x'}", "env"),
        ("env = {API_TOKEN = 'x'}", "env: API_TOKEN looks like a secret"),
        ("forbidden_submit_dirs = ['home']", "forbidden_submit_dirs"),
        ("extends = '../lab'", "extends"),
        ("partitions = ['gpu']", "partitions"),
        ("partitions = [{max_walltime = '5'}]", "partitions"),
        ("partitions = [{name = 'a b'}]", r"partitions\[1\]: name"),
        ("partitions = [{name = 'a'}, {name = 'a'}]", "partitions: 'a' is listed twice"),
        ("partitions = [{name = 'gpu', mem_per_node = 5}]", r"partitions\.gpu: mem_per_node"),
    ],
)
def test_value_out_of_range_is_refused_with_file_and_key(line: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"site\.toml: {key}") as caught:
        parse(line)

    assert caught.value.hint


@pytest.mark.parametrize(
    ("line", "where", "near"),
    [
        ("gpu_per_node = 4", "unknown key 'gpu_per_node'", "gpus_per_node"),
        ("identify = {host = 'x'}", "identify: unknown key", "hostname"),
        ("defaults = {tiem = '5'}", "defaults: unknown key", "time"),
        ("partitions = [{name='a', node=1}]", r"partitions\.a: unknown key", "nodes"),
    ],
)
def test_unknown_key_is_refused_with_its_place_and_the_near_miss(
    line: str, where: str, near: str
) -> None:
    with pytest.raises(ConfigError, match=rf"site\.toml: {where}") as caught:
        parse(line)

    assert caught.value.hint == f"did you mean {near!r}?"


def test_every_key_is_a_field_and_every_field_a_key() -> None:
    taken = {"name", "file", "argument", "origins"}

    assert {field for field, _ in KEYS.values()} == {f.name for f in fields(Cluster)} - taken
    assert {field for field, _ in PARTITION_KEYS.values()} == {f.name for f in fields(Partition)}


GOOD = [
    "choose_partition = true\npartitions = [{name = 'a_b+c@d.e', nodes = 1}]",
    "identify = {env = 'A=b c', hostname = 'login*', slurm_cluster = 'x'}",
    "binds = ['/a', '/a:/b', '/a b:/c:ro']\nforbidden_submit_dirs = ['~', '~/x', '/home']",
    "conda_base = '/opt/conda'\ncontainer_runtime = 'pyxis'\ngpu_backend = 'gloo'",
    "env = {A = 'x'}\nfacts = {anything = 'läuft'}",
    "nccl = {NCCL_IB_HCA = 'mlx5', FI_CXI_RX_MATCH_MODE = 'software'}",
    "defaults = {mem = '0', partition = 'a,b', constraint = '[a|b]&c', qos = 'q'}",
    "setup = ['source /opt/env.sh']\nmodules = ['cuda/12.4']",
    "account_hint = 'aip-x'\naccount_required = true\nlogin_shell = true\nshrink_jobs = false",
    "price_per_gpu_hour = 2\nprice_per_node_hour = 0.6\ncurrency = 'USD'",
    "partitions = [{name = 'a', price_per_gpu_hour = 0}]",
    "node_setup = ['cp /data/env.tar /tmp']",
]


@pytest.mark.parametrize("text", GOOD)
def test_the_reader_accepts_valid_values(text: str) -> None:
    parse(text)


def test_every_key_has_a_description_for_the_reference() -> None:
    tables = {
        name: {key: about for key, _, about in rows} for name, rows in cluster_tables().items()
    }

    assert set(tables[""]) == set(KEYS)
    assert all(tables[""].values())
    longest = tables["[[partitions]]"]["max_walltime"]
    assert longest.startswith("Longest job that it accepts")
    assert tables[""]["nodes"] == "How many nodes one job can get at most."


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
    config = {key: one for key, one in ROUTED.config.items() if key != "AccountingStorageType"}
    config |= parse_config(f"AccountingStorageType   = {value}")
    _, site = drafted(replace(ROUTED, config=config))

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
