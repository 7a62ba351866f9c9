"""A site's own records give a cluster file with which requests get the right nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.errors import ConfigError, RenderError
from hpc_toolkit.planning.nodes import node_of
from hpc_toolkit.slurm.clusters import is_slice, read_gres
from hpc_toolkit.slurm.clusters.facts import parse_cluster
from hpc_toolkit.slurm.clusters.rights import (
    ASSOCIATION,
    QOS,
    User,
    closed,
    parse_rows,
    qos_limits,
    this_user,
)
from hpc_toolkit.slurm.render.directives import complete, cpus, memory_mib
from hpc_toolkit.slurm.render.spec import ScriptSpec, read_spec
from tests.sites import Site, drafted, invented, recorded, site


@pytest.fixture
def memory(tmp_path: Path) -> Site:
    return Site(recorded("memory"), tmp_path)


def test_nodes_that_are_down_count_and_are_mentioned(tmp_path: Path) -> None:
    found = site(
        tmp_path,
        ["all Default=YES"],
        [
            "6*NodeName=c CPUTot=32 RealMemory=128000 Partitions=all",
            "3*NodeName=d CPUTot=32 RealMemory=192000 Gres=gpu:v100:2(S:0-1) Partitions=all",
            "NodeName=e CPUTot=64 RealMemory=512000 Gres=gpu:v100:8 Partitions=all State=DOWN*",
            "NodeName=f CPUTot=64 RealMemory=512000 Gres=gpu:v100:8 Partitions=all State=DRAIN",
            "NodeName=g CPUTot=99 RealMemory=512000 Gres=gpu:v100:9 Partitions=all State=FUTURE",
        ],
    )

    assert "# 2 of 11 nodes are down or drained now" in found.text
    assert found.rank("--nodes 2 --gpus-per-node 8") == (8, 64000)
    assert found.options("--nodes 5 --gpus-per-node 2")["gpus-per-node"] == "v100:2"
    # Of 2 GPUs on nodes with 2 and with 8, every node has the share of the smaller part.
    assert found.rank("--nodes 5 --gpus-per-node 2") == (8, 64000)
    assert "nodes at most 2 (v100x8)" in str(found.refusal("--nodes 3 --gpus-per-node 4"))
    assert "at most 8" in str(found.refusal("--gpus-per-node 9"))


def test_slices_beside_complete_gpus_and_slices_alone(tmp_path: Path) -> None:
    gres = "gpu:a100:3(S:0-1),gpu:a100_1g.5gb:7(S:1),shard:a100:24,mps:300"
    found = site(
        tmp_path,
        ["gpu Default=YES", "small"],
        [
            f"2*NodeName=a CPUTot=56 RealMemory=560000 Partitions=gpu Gres={gres}",
            "NodeName=b CPUTot=56 RealMemory=560000 Gres=gpu:1g.10gb:28 Partitions=small",
        ],
    )

    assert found.options("--gpus-per-node 1")["gpus-per-node"] == "a100:1"
    # Seven slices of a seventh make the fourth GPU.
    assert found.rank("--gpus-per-node a100:1") == (14, 140000)
    assert found.rank("--gpus-per-node a100_1g.5gb:1") == (2, 20000)
    assert found.options("--partition gpu --sbatch gres=shard:4")["gres"] == "shard:4"
    assert "a node has at most 24" in str(found.refusal("--partition gpu --sbatch gres=shard:25"))
    refused = found.refusal("--partition small --gpus-per-node 1")
    assert "name the type of a part: 1g.10gb" in str(refused)
    assert found.options("--partition small --gpus-per-node 1g.10gb:2")["gpus-per-node"]


def test_gpus_that_slurm_does_not_know_can_be_added(tmp_path: Path) -> None:
    nodes = ["4*NodeName=r CPUTot=16 RealMemory=1 Partitions=rtx"]
    found = site(tmp_path, ["rtx MaxTime=1-0"], nodes, "SelectType = select/linear\n")
    assert "at most 0" in str(found.refusal("--gpus-per-node 4"))
    found.edit('# gpu_request = "none"', 'gpu_request = "none"')
    found.edit("cpus = 16", 'cpus = 16, gpus = "rtx5000:4"')

    options = found.options("--nodes 2 --gpus-per-node 4")
    assert (options["ntasks-per-node"], options["cpus-per-task"]) == ("4", "4")
    assert not {"gres", "gpus-per-node", "mem"} & options.keys()


ROWS = "Cluster|Account|Partition|QOS|Def QOS|MaxSubmit\n{}\n".format
LIMITS = """Name|Flags|MaxWall|MaxTRES|MaxTRESPU|GrpTRES|MaxSubmitPU
normal|DenyOnLimit|1-00:00:00|node=4|cpu=100,gres/gpu=8||200
long|PartitionTimeLimit|7-00:00:00||||
free||||||
few|||gres/gpu:A100=2,gres/gpu:v100=1|gres/gpu=4||
none||00:00:00|gres/gpu=0|cpu=99999999||99999999
"""


def member(*rows: str, groups: str = "users", host: str = "login1", limits: str = LIMITS) -> User:
    return User(
        groups=frozenset(groups.split(",")),
        host=host,
        associations=parse_rows(ROWS("\n".join(rows)), ASSOCIATION),
        qos=parse_rows(limits, QOS),
    )


@pytest.mark.parametrize(
    ("record", "user", "why"),
    [
        ("AllowGroups=a,b", member(groups="b"), ""),
        ("AllowGroups=a,b", member(groups="c"), "AllowGroups=a,b: you are in none"),
        ("AllocNodes=login1,login2", member(host="login2"), ""),
        ("AllocNodes=login1,login2", member(host="login4"), "AllocNodes=login1,login2: this host"),
        ("AllowAccounts=x,y", member("site|y||normal||"), ""),
        ("AllowAccounts=x,y", member("site|z||normal||"), "AllowAccounts=x,y: yours are z"),
        ("AllowAccounts=x,y", User(), "AllowAccounts=x,y: your accounts are unknown"),
        ("DenyAccounts=x,y", member("site|y||normal||"), "DenyAccounts=x,y: yours are y"),
        ("DenyAccounts=x,y", member("site|y||normal||", "site|z||normal||"), ""),
        ("DenyAccounts=x,y", User(), ""),
        ("AllowQos=short", User(), ""),
        ("AllowQos=short", member("site|y||normal,short||"), ""),
        ("AllowQos=short", member("site|y||normal,long||"), "AllowQos=short: yours are normal, "),
        ("DenyQos=normal,long", member("site|y||normal,long||"), "DenyQos=normal,long: yours "),
        ("DenyQos=normal", member("site|y||normal,long||"), ""),
        ("ReqResv=YES", User(), "ReqResv=YES"),
        ("", member("site|y|elsewhere|normal||"), "no account of yours is for this partition"),
        ("", member("site|y|a|normal||"), ""),
    ],
)
def test_a_partition_is_closed_only_for_users_that_it_excludes(
    record: str, user: User, why: str
) -> None:
    found = closed(dict(pair.split("=") for pair in f"PartitionName=a {record}".split()), user)

    assert found.startswith(why) if why else not found


def test_qos_and_accounts_of_a_user_bind_requests(tmp_path: Path) -> None:
    facts = invented(
        "site",
        ["main Default=YES MaxTime=2-00:00:00 AllowAccounts=a,b", "fast QoS=long DenyQos=free"],
        ["20*NodeName=n CPUTot=64 RealMemory=256000 Gres=gpu:a100:4 Partitions=main,fast"],
    )
    rows = [f"site|{one}||normal,long,free,few,none|normal|400" for one in "abc"]
    found = Site(replace(facts, user=member(*rows)), tmp_path)
    site = parse_cluster(found.text, file="site.toml", name="site")

    assert "# Your accounts: a, b, c." in found.text
    assert (site.default_qos, site.max_submit_jobs) == ("normal", 400)
    assert site.partitions[0].accounts == ("a", "b")
    assert site.partitions[1].allowed_qos == ("normal", "long", "few", "none")
    assert found.options("--nodes 4 --account a")["partition"] == "main"
    assert found.options("--nodes 4 --account c")["partition"] == "fast"
    # A quarter of a node has 16 CPUs for a GPU, but the QOS allows 100 in all.
    assert found.options("--nodes 4 --gpus-per-node 2 --qos free")["cpus-per-task"] == "16"
    assert found.options("--nodes 3 --gpus-per-node 2")["cpus-per-task"] == "16"
    assert found.options("--nodes 2 --gpus-per-node 4 --ntasks-per-node 1")["cpus-per-task"] == "50"
    # A QOS may override the time limit of its partition.
    assert found.options("--qos long --partition main --time 5-0")["time"] == "5-00:00:00"
    for words, message in (
        ("--nodes 5", r"--nodes: 5 is more than site has \(.*qos\.normal: nodes at most 4\)"),
        ("--nodes 3 --gpus-per-node 4", r"12 is more than site allows \(.*GPUs at most 8\)"),
        ("--nodes 2 --cpus-per-task 64", r"128 is more than site allows \(.*CPUs at most 100\)"),
        ("--gpus-per-node a100:1 --nodes 3 --qos few", r"3 is more .*few: GPUs at most 2\)"),
        ("--gpus-per-node 1 --qos none", r"1 is more .*none: GPUs at most 0\)"),
        ("--time 25:00:00 --partition main", r"--time: .*qos\.normal: time at most 1-00:00:00"),
        ("--qos free --partition fast", r"--qos: free is not for site \(.*normal, long"),
        ("--account c --partition main", r"--account: c is not for site \(.*main\.accounts = a, b"),
        ("--array 0-300 array", r"--array: 301 jobs .*qos\.normal: at most 200\)"),
        ("--array 0-500 --qos free array", r"--array: 501 jobs .*max_submit_jobs: at most 400\)"),
    ):
        with pytest.raises(RenderError, match=message):
            found.render(words)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["site|a||n,m|n|400", "site|b||n|n|30"], ("n", 400)),
        (["site|a||n,m|n|400", "site|b||n|m|"], (None, None)),
        (["site|a||n,m|n|", "site|b||n||30"], (None, None)),
        (["site|a||||"], (None, None)),
    ],
)
def test_limits_of_one_account_do_not_bind_jobs_of_another(
    rows: list[str], expected: tuple[str | None, int | None]
) -> None:
    facts = invented("site", ["a Default=YES"], ["NodeName=n CPUTot=8 Partitions=a"])
    text = drafted(replace(facts, user=member(*rows)))
    found = parse_cluster(text, file="site.toml", name="site")

    assert (found.default_qos, found.max_submit_jobs) == expected


@pytest.mark.parametrize(
    ("plugins", "chosen"),
    [
        ("require_timelimit", True),
        ("job_submit/throttle,logging", True),
        ("require_timelimit,lua", False),
        ("partition", False),
    ],
)
def test_a_plugin_that_only_checks_jobs_leaves_the_choice_of_a_partition(
    plugins: str, chosen: bool
) -> None:
    nodes = ["NodeName=n CPUTot=8 Partitions=a,b"]
    facts = invented("site", ["a Default=YES", "b"], nodes, f"JobSubmitPlugins = {plugins}\n")

    assert ("\nchoose_partition = true\n" in drafted(facts)) is chosen


def test_sacctmgr_is_asked_for_this_user_and_may_be_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sacctmgr"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *assoc*) me=$(id -un); echo "site|a|$me||normal|normal|";'
        " echo \"other|b|$me||normal|normal|\"; echo 'site|c|else||normal|normal|';;"
        " *) echo 'normal||02:00:00||||';; esac\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert not this_user("site", accounting=True).associations

    program.chmod(0o755)
    found = this_user("Site", accounting=True)
    assert found.own("account") == ["a"]
    assert qos_limits(found, "normal")["max_walltime"] == "02:00:00"
    assert not this_user("site", accounting=False).associations


def test_a_partition_alone_can_leave_memory_to_slurm(memory: Site) -> None:
    memory.edit("whole_nodes = true", 'mem_style = "none"\nwhole_nodes = true')

    assert not {"mem", "mem-per-cpu"} & memory.options("--partition acc --gpus-per-node 8").keys()
    assert "mem" in memory.options("--partition big")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ntasks-per-node 48", True),
        ("--ntasks-per-node 16", False),
        ("--ntasks-per-node 48 --mem none", False),
        ("--ntasks-per-node 48 --mem 500G", False),
    ],
)
def test_generic_says_when_its_default_memory_is_large(
    memory: Site, words: str, said: bool
) -> None:
    memory.file = Path("generic")  # not a path
    _, note = memory.render(words)

    assert ("768G of memory on each node (clusters/generic.toml: defaults." in note) is said


def test_a_plan_counts_complete_gpus_and_the_nodes_that_have_them() -> None:
    first = node_of(parse_cluster(drafted(recorded("slices")), file="s.toml", name="s"))
    assert (first.gpus, first.cpus) == (4, 96)
    site = parse_cluster(drafted(recorded("mixed")), file="m.toml", name="m")
    assert node_of(site, gpus=4).cpus == 128
    assert node_of(site, gpus=0).gpus == 0
    with pytest.raises(ConfigError, match="9 is more than m has"):
        node_of(site, gpus=9)


_SHAPES = st.tuples(
    st.integers(1, 6),
    st.sampled_from([4, 32, 64]),
    st.sampled_from([64000, 256000]),
    st.sampled_from(["(null)", "gpu:a:4", "gpu:b:2", "gpu:a:2,gpu:a_1g.5gb:7", "gpu:b:1,gpu:a:3"]),
    st.sampled_from(["x", "x,y"]),
)
_Shapes = list[tuple[int, int, int, str, str]]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(_SHAPES, min_size=1, max_size=4),
    st.integers(1, 8),
    st.sampled_from(["", "1", "2", "4", "a:2", "a_1g.5gb:3", "b:1"]),
    st.sampled_from([{}, {"mem": "100000M"}, {"cpus_per_task": 8}, {"constraint": "y"}]),
)
def test_a_script_is_accepted_exactly_if_enough_nodes_can_run_it(
    shapes: _Shapes, nodes: int, gpus: str, more: dict[str, Any]
) -> None:
    lines = [
        f"{n}*NodeName=n{at}x CPUTot={cpus} RealMemory={mem} Gres={gres} Partitions=all"
        f" AvailableFeatures={features}"
        for at, (n, cpus, mem, gres, features) in enumerate(shapes)
    ]
    cluster = parse_cluster(drafted(invented("s", ["all"], lines)), file="s.toml", name="s")
    kind, _, number = gpus.rpartition(":")
    request = {"gpus_per_node": int(number), "gpu_type": kind or None} if gpus else {}
    spec = read_spec({"nodes": nodes, "python": "/bin/python", **request, **more})
    try:
        full = complete(spec, cluster)
    except RenderError:
        ranks = int(number or 1)
        full = replace(spec, ntasks_per_node=ranks, cpus_per_task=spec.cpus_per_task or 1)
        # A request without a type means complete GPUs of one type.
        types = [kind] if kind else ["a", "b"] if gpus else [""]
        assert all(_able(shapes, replace(full, gpu_type=one or None)) < nodes for one in types)
    else:
        assert _able(shapes, full) >= nodes
        assert kind or not is_slice(full.gpu_type or "")


def _able(shapes: _Shapes, full: ScriptSpec) -> int:
    """The number of nodes that Slurm could give to a script."""
    listed = any("y" in features for *_, features in shapes)
    total = 0
    for number, has_cpus, has_mem, gres, features in shapes:
        counts = {kind: n for _, kind, n in read_gres(gres) if kind}
        whole = [n for kind, n in counts.items() if not is_slice(kind)]
        most = counts.get(full.gpu_type, 0) if full.gpu_type else max(whole, default=0)
        right = not (full.constraint and listed) or "y" in features
        fits = has_cpus >= cpus(full) and has_mem >= memory_mib(full)
        total += number * (right and fits and most >= full.gpus_per_node)
    return total
