"""What a drafted cluster file makes of a request: one row for each request of a site."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError, HpcToolkitError, RenderError
from hpc_toolkit.planning.nodes import node_of
from hpc_toolkit.slurm.clusters import format_count, read_gres
from hpc_toolkit.slurm.clusters.choice import choose_partition
from hpc_toolkit.slurm.clusters.draft import SlurmFacts
from hpc_toolkit.slurm.clusters.facts import parse_cluster
from hpc_toolkit.slurm.clusters.fitting import Needs
from hpc_toolkit.slurm.clusters.rights import ASSOCIATION, QOS, User, parse_rows
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import read_spec
from hpc_toolkit.slurm.render.values import file_name
from hpc_toolkit.submit.submission import of_request
from tests.hostile import HOSTILE
from tests.sites import Site, invented, recorded
from tests.unit.jobcommands import call

ROWS = """Cluster|Account|Partition|QOS|Def QOS|MaxSubmit
site|Lab||normal,over,long|normal|40
"""
LIMITS = """Name|Flags|MaxWall|MaxTRES|MaxTRESPU|GrpTRES|MaxSubmitPU
normal|||||node=6|30
over|OverPartQOS||node=9||||
long|PartitionTimeLimit|7-00:00:00||||
few|||node=3||||
fast||00:30:00||||
"""
KNOWN = User(
    groups=frozenset({"users"}),
    host="login1",
    associations=parse_rows(ROWS, ASSOCIATION),
    qos=parse_rows(LIMITS, QOS),
)


def made(*records: str, config: str = "", user: User | None = None) -> SlurmFacts:
    """A site of partitions and of nodes, which have ``CPUTot``."""
    nodes = [one for one in records if "CPUTot" in one]
    found = invented("site", [one for one in records if one not in nodes], nodes, config)
    return replace(found, user=user) if user else found


LINEAR = "SelectType = select/linear\n"
SITES = {
    "features": made(
        "all Default=YES",
        "4*NodeName=a CPUTot=64 RealMemory=256000 Gres=gpu:a100:4 Partitions=all"
        " AvailableFeatures=ib,milan",
        "2*NodeName=b CPUTot=64 RealMemory=128000 Gres=gpu:v100:4 Partitions=all"
        " AvailableFeatures=eth,rome",
        "2*NodeName=s CPUTot=32 RealMemory=128000 Gres=gpu:a100:2,gpu:a100_1g.5gb:14"
        " Partitions=all AvailableFeatures=ib,parts",
    ),
    "cpu limit": made(
        "thin Default=YES MaxMemPerCPU=2000",
        "thick",
        "4*NodeName=n CPUTot=16 RealMemory=128000 Partitions=thin",
        "4*NodeName=m CPUTot=16 RealMemory=256000 Partitions=thick",
    ),
    "gres": made(
        "all Default=YES",
        "2*NodeName=d CPUTot=64 RealMemory=256000 Gres=tmpfs:100G,nvme:fast:2,nvme:slow:4"
        " Partitions=all",
        "3*NodeName=e CPUTot=64 RealMemory=256000 Gres=nvme:fast:1,lustre:no_consume:4K"
        " Partitions=all",
    ),
    "untyped": made(
        "all Default=YES",
        "2*NodeName=u CPUTot=32 RealMemory=128000 Gres=gpu:4 Partitions=all",
        "NodeName=t CPUTot=32 RealMemory=128000 Gres=gpu:A100:4 Partitions=all",
    ),
    "deny": made(
        "open Default=YES DenyAccounts=banned,none DenyQos=Scavenge MaxNodes=3",
        "some AllowQos=short,normal",
        "own QoS=few",
        "free MaxNodes=6",
        "8*NodeName=n CPUTot=32 RealMemory=128000 Partitions=open,some,own,free",
    ),
    "qos": made(
        "main Default=YES QoS=few MaxTime=1-00:00:00 AllowAccounts=lab,physics",
        "20*NodeName=n CPUTot=32 RealMemory=128000 Partitions=main",
        user=KNOWN,
    ),
    "linear": made(
        "cpu Default=YES",
        "shared OverSubscribe=FORCE:4",
        "4*NodeName=n CPUTot=32 RealMemory=128000 Partitions=cpu,shared",
        config=LINEAR,
    ),
    "racks": made(
        "all Default=YES",
        *(
            f"4*NodeName=s{n}x CPUTot=32 Partitions=all AvailableFeatures=small,r{n}"
            for n in range(6)
        ),
        *(
            f"2*NodeName=l{n}x CPUTot=32 Partitions=all AvailableFeatures=large,r{n}"
            for n in range(6)
        ),
    ),
    "closed": made(
        "own Default=YES AllowAccounts=x,y",
        "4*NodeName=n CPUTot=32 RealMemory=128000 Partitions=own",
    ),
    "order": made(
        "main Default=YES QoS=few MaxNodes=2 MaxTime=1-0",
        "spare PreemptMode=REQUEUE",
        "gpu",
        "cpu MaxTime=2-0",
        "both MaxTime=5-0",
        "4*NodeName=n CPUTot=32 RealMemory=128000 Partitions=main,cpu,spare,both",
        "4*NodeName=g CPUTot=32 RealMemory=128000 Gres=gpu:a100:4 Partitions=gpu,spare,both",
    ),
    "short": made(
        "main Default=YES MaxTime=1-0",
        "test MaxTime=00:20:00",
        "fast QoS=fast MaxTime=1-0",
        "4*NodeName=n CPUTot=32 RealMemory=128000 Partitions=main,test,fast",
        user=KNOWN,
    ),
    "complete": made(
        "cpu OverSubscribe=EXCLUSIVE DefMemPerCPU=2000",
        "gpu OverSubscribe=EXCLUSIVE JobDefaults=DefMemPerGPU=30000",
        "most OverSubscribe=EXCLUSIVE MaxMemPerCPU=2000",
        "more OverSubscribe=EXCLUSIVE MaxMemPerCPU=8000",
        "new OverSubscribe=NO Exclusive=NODE DefMemPerCPU=2000",
        "user OverSubscribe=NO Exclusive=USER",
        "4*NodeName=n CPUTot=40 RealMemory=160000 Gres=gpu:a100:4"
        " Partitions=cpu,gpu,most,more,new,user",
    ),
    "whole": made(
        "part Default=YES",
        "whole OverSubscribe=EXCLUSIVE",
        "4*NodeName=n CPUTot=32 RealMemory=128000 Gres=gpu:a100:4 Partitions=part,whole",
        "2*NodeName=m CPUTot=32 RealMemory=128000 Gres=gpu:a100:8 Partitions=whole",
    ),
    "least": made(
        *("large Default=YES MinNodes=4", "rest MaxNodes=3"),
        "9*NodeName=n CPUTot=32 RealMemory=128000 Partitions=large,rest",
    ),
    **{name: recorded(name) for name in ("mixed", "rights", "slices")},
    "styles": recorded("memory"),
    "limits": made(
        "gpu DefMemPerCPU=2000 MaxMemPerCPU=4000 JobDefaults=DefCpuPerGPU=8,DefMemPerGPU=60000",
        "cpu MaxMemPerNode=UNLIMITED",
        "2*NodeName=a CPUTot=64 RealMemory=512000 Gres=gpu:h100:4 Partitions=gpu,cpu",
        config="MaxMemPerNode = UNLIMITED\nMaxMemPerCPU = 5000\n",
    ),
    "two types": made(
        "gpu",
        "4*NodeName=a CPUTot=48 RealMemory=480000 Gres=gpu:a100:2,gpu:t4:4 Partitions=gpu",
    ),
    "parts": made(
        "gpu", "NodeName=a CPUTot=8 RealMemory=8000 Gres=gpu:2,gpu:mig-1g.5gb:4 Partitions=gpu"
    ),
    "memory": made(
        "all MaxNodes=8",
        "9*NodeName=a CPUTot=40 RealMemory=192000 Partitions=all",
        "4*NodeName=b CPUTot=40 RealMemory=768000 Partitions=all",
        "NodeName=c CPUTot=40 RealMemory=1536000 Partitions=all",
    ),
    "old and new": made(
        *("old", "new"),
        "4*NodeName=a CPUTot=32 RealMemory=128000 Gres=gpu:v100:4 Partitions=old",
        "4*NodeName=b CPUTot=96 RealMemory=960000 Gres=gpu:h100:4 Partitions=new",
    ),
    "deans": made(
        *("cpu Default=YES", "more", "gpu AllowGroups=deans"),
        "4*NodeName=n CPUTot=32 RealMemory=128000 Partitions=cpu,more",
        "2*NodeName=g CPUTot=32 RealMemory=128000 Gres=gpu:v100:4 Partitions=gpu",
    ),
}

OPTIONS_OR_REFUSAL: list[tuple[str, str, dict[str, str | None] | str]] = [
    # A constraint leaves only complete GPUs, so that no type is needed.
    ("features", "--gpus-per-node 2 --sbatch constraint=milan|rome", {"gpus-per-node": "2"}),
    ("features", "--gpus-per-node 2 --sbatch constraint=ib", {"gpus-per-node": "a100:2"}),
    ("features", "--gpus-per-node 2 --mem 200G", {"gpus-per-node": "a100:2"}),
    ("features", "--gpus-per-node 2", {"gpus-per-node": "a100:2"}),
    ("features", "--nodes 7 --sbatch constraint=milan|rome", r"nodes at most 6 "),
    ("features", "--nodes 5 --sbatch constraint=ib&milan", r"nodes at most 4 \(a100x4\)"),
    ("features", "--sbatch constraint=rome&ib", "rome&ib is not what"),
    # Slurm alone knows what brackets and counts mean.
    ("features", "--nodes 8 --sbatch constraint=[milan|rome]", {"constraint": "[milan|rome]"}),
    ("features", "--nodes 8 --sbatch constraint=rome*3", {"constraint": "rome*3"}),
    ("features", "--sbatch constraint=!milan", "constraint: '!milan' is not accepted"),
    # 16 CPUs with 2000M are too little.
    ("cpu limit", "--mem 30000M", {"partition": "thin", "cpus-per-task": "15"}),
    ("cpu limit", "--mem 33000M", {"partition": "thick", "cpus-per-task": "1"}),
    ("cpu limit", "--ntasks-per-node 3 --mem 32000M", {"partition": "thick"}),
    ("gres", "--nodes 2 --sbatch gres=tmpfs:100G", {"gres": "tmpfs:100G"}),
    ("gres", "--nodes 3 --sbatch gres=tmpfs:90G", r"nodes at most 2 \("),
    ("gres", "--sbatch gres=tmpfs:101G", "101G .* a node has at most 100G"),
    ("gres", "--sbatch gres=tmpfs:2t", "2T .* a node has at most 100G"),
    ("gres", "--nodes 5 --sbatch gres=nvme:fast:1", {"nodes": "5"}),
    ("gres", "--nodes 3 --sbatch gres=nvme:fast:2", r"nodes at most 2 \("),
    ("gres", "--nodes 2 --sbatch gres=nvme:6", {"nodes": "2"}),
    ("gres", "--sbatch gres=lustre:5k", "a node has at most 4K"),
    # Slurm gives no type to GPUs without one, and tells A100 from a100.
    ("untyped", "--gpus-per-node a100:2", {"gpus-per-node": "A100:2"}),
    ("untyped", "--nodes 2 --gpus-per-node A100:2", r"nodes at most 1 \(A100x4\)"),
    ("untyped", "--gpus-per-node v100:1", "--gpu-type: v100 .*its GPUs are without a type, A100"),
    ("untyped", "--nodes 3 --gpus-per-node 2", {"gpus-per-node": "2"}),
    ("deny", "--partition open --account Banned", "Banned is not for site .*denied_accounts"),
    ("deny", "--partition open --qos scavenge", "scavenge is not for site .*denied_qos"),
    # Those whose QOS must be named, or has unknown limits, come after the others.
    ("deny", "--nodes 2 --qos normal", {"partition": "open"}),
    ("deny", "--nodes 5", {"partition": "free"}),
    ("deny", "--nodes 7 --qos normal", {"partition": "some"}),
    ("deny", "--nodes 7 --qos other", {"partition": "own"}),
    ("qos", "--nodes 4 --account LAB", r"--nodes: 4 .*qos\.few: nodes at most 3"),
    ("qos", "--nodes 10 --qos OVER", r"--nodes: 10 .*qos\.over: nodes at most 9"),
    ("qos", "--qos long --time 3-0", {"time": "3-00:00:00"}),
    ("qos", "array --array 0-30", r"31 jobs .*qos\.normal: at most 30"),
    ("racks", "--nodes 13 --sbatch constraint=large", r"nodes at most 12 \("),
    # It is left out of the file, because each rack would be a kind of nodes.
    ("racks", "--nodes 12 --sbatch constraint=r1", {"nodes": "12"}),
    ("closed", "--partition own --account X", {"partition": "own"}),
    ("closed", "--partition own --account z", r"z is not for site .*own\.accounts = x, y"),
    # Slurm's default is the first, whatever its QOS; GPUs and preemption are for who needs them.
    ("order", "--nodes 2", {"partition": "main"}),
    ("order", "--nodes 3", {"partition": "cpu"}),
    ("order", "--nodes 3 --time 3-0", {"partition": "both"}),
    ("order", "--nodes 3 --time 6-0", {"partition": "spare"}),
    ("order", "--nodes 6", {"partition": "both"}),
    ("order", "--gpus-per-node 1", {"partition": "gpu"}),
    # The usual default, an hour, is too long for some partitions.
    ("short", "--nodes 1", {"partition": "main", "time": "01:00:00"}),
    ("short", "--partition test", {"time": "00:20:00"}),
    ("short", "--partition fast", {"time": "00:30:00"}),
    ("short", "--partition test --time 1:00:00", "01:00:00 is more than site has"),
    ("least", "--nodes 3", {"partition": "rest"}),
    ("least", "--nodes 4", {"partition": "large"}),
    ("least", "--partition large --nodes 3", r"3 is less than site takes .*min_nodes = 4"),
    # Slurm multiplies memory for a CPU or a GPU by all CPUs or GPUs of a complete node.
    ("complete", "--partition cpu", {"mem": "160000M", "mem-per-cpu": None}),
    ("complete", "--partition gpu --gpus-per-node 1", {"mem": "160000M", "mem-per-gpu": None}),
    ("complete", "--partition new", {"mem": "160000M"}),
    ("complete", "--partition user", {"mem": "4000M"}),
    ("complete", "--partition most", {"mem-per-cpu": "2000M"}),
    ("complete", "--partition more", {"mem-per-cpu": "4000M"}),
    ("mixed", "--nodes 60", r"--nodes: 60 is more than site has \(.*kinds: nodes at most 50 "),
    ("mixed", "--nodes 4 --gpus-per-node a100:8", r"4 .*main\.kinds: nodes at most 3 \(a100x8\)\)"),
    ("mixed", "--gpus-per-node a30:3", r"--gpus-per-node: 3 .*GPUs a node at most 2"),
    ("mixed", "--gpus-per-node v100:1", r"--gpu-type: v100 .*its GPUs are a30, a100"),
    ("mixed", "--gpus-per-node a100:1 --sbatch constraint=fat", "--gpu-type: a100"),
    ("mixed", "--mem 3100G", r"memory per node: 3100G .*memory a node at most 3000G"),
    ("mixed", "--cpus-per-task 129", r"--cpus-per-task: 129 .*CPUs a node at most 128"),
    # A job gets its share of the nodes that fit.
    ("mixed", "--nodes 2 --gpus-per-node a30:2", {"cpus-per-task": "24", "mem-per-cpu": "10666M"}),
    ("mixed", "--gpus-per-node a100:1", {"cpus-per-task": "16", "mem-per-cpu": "8000M"}),
    ("mixed", "--nodes 30", {"cpus-per-task": "1", "mem-per-cpu": "4000M"}),
    ("mixed", "--gpus-per-node 1", {"cpus-per-task": "16", "mem-per-cpu": "8000M"}),
    ("mixed", "--gpus-per-node 4", {"gpus-per-node": "a100:4"}),
    ("slices", "--gpus-per-node h100:4", {"gpus-per-node": "h100:4"}),
    # 64 CPUs for 14 sevenths and 4 times 3 sevenths of a GPU, and for 2 GPUs and 8 halves.
    ("slices", "--gpus-per-node h100_1g.10gb:1", {"cpus-per-task": "2", "mem-per-cpu": "9615M"}),
    ("slices", "--gpus-per-node h100_3g.40gb:1", {"cpus-per-task": "7"}),
    ("slices", "--gpus-per-node l40s:1", {"gpus-per-node": "l40s:1", "cpus-per-task": "10"}),
    ("slices", "--gpus-per-node l40s.2:1", {"cpus-per-task": "5"}),
    # Memory has the form of the partition, and more of it for each CPU needs more CPUs.
    ("styles", "--partition cpu --ntasks-per-node 48", {"mem-per-cpu": "3958M", "mem": None}),
    ("styles", "--partition cpu --mem 40000M", {"cpus-per-task": "11"}),
    (
        "styles",
        "--partition cpu --cpus-per-task 4 --mem 40000M",
        "memory per CPU: 10000M is more than site allows .*cpu.max_mem_per_cpu = 3968M",
    ),
    ("styles", "--partition cpu --sbatch mem-per-cpu=4G", "max_mem_per_cpu"),
    ("styles", "--partition acc --gpus-per-node 2", {"gpus-per-node": "mi250:2", "mem": "480000M"}),
    # Partitions that the user may use.
    ("rights", "--nodes 4", {"partition": "batch"}),
    ("rights", "--nodes 2", {"partition": "open"}),
    ("rights", "--gpus-per-node 1", {"partition": "teach"}),
    ("rights", "--nodes 9", "open: nodes at most 2"),
    # 16 CPUs with 4000M are less than a quarter of the node.
    ("limits", "--partition gpu --gpus-per-node 1", {"mem-per-gpu": "64000M"}),
    ("limits", "--partition gpu", {"mem-per-cpu": "4000M"}),
    ("limits", "--partition cpu", {"mem-per-cpu": "5000M"}),
    # Types of one node are never mixed; a rank gets its share of six GPUs.
    ("two types", "--gpus-per-node 3", {"gpus-per-node": "t4:3"}),
    ("two types", "--gpus-per-node 2", {"gpus-per-node": "a100:2"}),
    ("two types", "--gpus-per-node a100:2", {"cpus-per-task": "8", "mem": "160000M"}),
    ("two types", "--gpus-per-node 5", "at most 4"),
    ("parts", "--gpus-per-node 1", "ambiguous: site has complete .*its GPUs are mig-1g.5gb"),
    ("memory", "--nodes 8 --ntasks-per-node 40", {"cpus-per-task": "1", "mem": "192000M"}),
    ("memory", "--nodes 5 --mem 700G", {"mem": "700G"}),
    ("memory", "--nodes 2 --mem 900G", "nodes at most 1 "),
    ("memory", "--nodes 9", "nodes = 8"),
    # Several partitions give what all of them have; one that is not listed has anything.
    (
        "old and new",
        "--partition old,new --gpus-per-node 2",
        {"gpus-per-node": "2", "cpus-per-task": "8"},
    ),
    ("old and new", "--partition new --gpus-per-node 2", {"gpus-per-node": "h100:2"}),
    ("old and new", "--partition other --gpus-per-node 64", {"gpus-per-node": "64"}),
    ("deans", "--gpus-per-node 1 --partition gpu", {"partition": "gpu"}),
    ("deans", "--gpus-per-node 1", r"gpu accepts it, but is restricted \(AllowGroups=deans: you"),
]


@pytest.mark.parametrize(("name", "words", "expected"), OPTIONS_OR_REFUSAL)
def test_a_request_gives_the_right_options_or_a_refusal(
    tmp_path: Path, name: str, words: str, expected: dict[str, str | None] | str
) -> None:
    found = Site(SITES[name], tmp_path)
    if isinstance(expected, str):
        refused = found.refusal(words)
        assert re.search(expected, f"{refused.message} {refused.hint}"), refused
    else:
        options = found.options(words)
        assert {key: options.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "words", "said", "unsaid"),
    [
        ("features", "--gpus-per-node 4 --sbatch constraint=ib", "4 a100", "v100"),
        ("mixed", "--gpus-per-node 4", "nodes that fit: 3 a100x8", "l40s"),
        ("styles", "--partition acc --gpus-per-node 2", "8.00 GPU-hours; complete nodes", "2.00"),
        ("deny", "--partition opened", "not checked: site lists no partition opened", "fit"),
        ("deny", "--partition open,x", "not checked: site lists no partition x", "open,"),
        ("deny", "--partition open", "1.00 node-hours", "not checked"),
        ("linear", "--partition cpu --nodes 2", "complete nodes are billed", "GPU"),
        ("linear", "--partition shared", "1.00 node-hours", "billed"),
        # A job of two GPUs may get, and pays for, a node of eight.
        ("whole", "--partition whole --gpus-per-node 2", "8.00 GPU-hours; nodes", "2.00"),
        ("whole", "--partition part --gpus-per-node 2", "2.00 GPU-hours", "billed"),
        ("whole", "--partition part --gpus-per-node 2 --sbatch exclusive", "4.00 GPU-h", "2.00"),
        ("whole", "--partition part --sbatch exclusive", "complete nodes are billed", "1.00 node"),
        ("whole", "--partition part --gpus-per-node 2 --sbatch exclusive=user", "2.00", "billed"),
    ],
)
def test_the_note_of_a_request_says_what_is_true(
    tmp_path: Path, name: str, words: str, said: str, unsaid: str
) -> None:
    note = Site(SITES[name], tmp_path).note(words).partition("requests ")[2]

    assert said in note
    assert unsaid not in note


BY_HAND = parse_cluster(
    """
    nodes = 10
    gpus_per_node = 4
    gpu_type = "l40s"
    cpus_per_node = 64
    mem_per_node = "480G"
    choose_partition = true
    partitions = [
      { name = "short", max_walltime = "3:00:00" },
      { name = "long", max_walltime = "2-00:00:00", nodes = 2 },
      { name = "big", gpus_per_node = 8, gpu_type = "h100", cpus_per_node=48, mem_per_node="2T" },
    ]
    """,
    file="site.toml",
    name="site",
)


REASONS = (
    "no partition of site offers 3 nodes with 4 GPUs for 1-00:00:00 (site.toml: partitions:"
    " short: time at most 03:00:00; long: nodes at most 2; big: CPUs a node at most 48)"
)


@pytest.mark.parametrize(
    ("job", "found"),
    [
        ({}, "short"),
        ({"time_s": 10800}, "short"),
        ({"time_s": 10801}, "long"),
        ({"time_s": 10801, "nodes": 3}, "big"),
        ({"gpus_per_node": 5}, "big"),
        ({"mem_mib": 480 * 1024 + 1}, "big"),
        ({"mem_mib": 0}, "short"),
        ({"gpu_type": "h100"}, "big"),
        (
            {"nodes": 11},
            "(site.toml: partitions: short, big: nodes at most 10; long: nodes at most 2)",
        ),
        ({"nodes": 3, "cpus": 60, "time_s": 86400}, REASONS),
    ],
)
def test_the_first_partition_that_fits_is_chosen_or_the_reason_of_each_is_given(
    job: dict[str, Any], found: str
) -> None:
    usual = {"nodes": 1, "gpus_per_node": 4, "cpus": 8, "mem_mib": 1024, "time_s": 3600}
    needs = Needs(**{**usual, **job})
    if " " not in found:
        assert choose_partition(BY_HAND, needs) == found
        return
    with pytest.raises(RenderError) as caught:
        choose_partition(BY_HAND, needs)
    assert caught.value.message.endswith(found)
    assert ("requeue" in caught.value.hint) == ("time at most" in found)


def test_a_plan_bills_complete_nodes_where_all_partitions_give_them(tmp_path: Path) -> None:
    site = parse_cluster(Site(SITES["whole"], tmp_path).text, file="s.toml", name="s")

    found = {gpus: node_of(site, gpus=gpus) for gpus in (2, 6)}
    assert [(one.gpus, one.workers) for one in found.values()] == [(2, 2), (8, 6)]
    assert ["complete nodes are billed" in one.why for one in found.values()] == [False, True]
    priced = replace(site, price_per_gpu_hour=2.0)
    assert node_of(priced, gpus=6).price_per_hour == 16.0


PRICED = """
currency = "EUR"
price_per_gpu_hour = 1.0
partitions = [
  { name = "mixed", kinds = { l40s = 20, a100 = 4 }, max_walltime = "1-00:00:00" },
  { name = "whole", kinds = { a100 = 4 }, whole_nodes = true, price_per_gpu_hour = 3.0 },
  { name = "cpu", kinds = { plain = 9 }, price_per_node_hour = 0.5 },
]
[kinds]
l40s = { cpus = 32, mem = "256G", gpus = "l40s:4" }
a100 = { cpus = 64, mem = "1T", gpus = "a100:8" }
plain = { cpus = 96, mem = "128G" }
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        # workers of a node, its billed GPUs, price, and the time limit of the longest job
        ("", (4, 4, 4.0, None)),
        ("--partition mixed", (4, 4, 4.0, 86400)),
        ("--partition mixed --gpus-per-node a100:2", (2, 2, 2.0, 86400)),
        ("--partition whole", (8, 8, 24.0, None)),
        ("--partition whole --gpus-per-node 2", (2, 8, 24.0, None)),
        ("--partition cpu --workers-per-node 12", (12, 0, 0.5, None)),
        ("--partition cpu,whole --gpus-per-node 4", (4, 8, 24.0, None)),
        ("--gpus-per-node a100:8", (8, 8, 8.0, 86400)),
        ("--partition none", "lists no partition none"),
        ("--partition cpu --nodes 10", "--nodes: 10 is more than s has"),
        ("--partition cpu --gpus-per-node 1", "--gpus-per-node: 1 is more than s has"),
        ("--partition mixed --gpus-per-node h100:1", "its GPUs are l40s, a100"),
        ("--partition mixed --time-limit 2d", "--time: 2-00:00:00 is more than s has"),
    ],
)
def test_a_plan_of_a_partition_has_its_nodes_limits_and_prices(
    tmp_path: Path, words: str, found: tuple[int, int, float, int | None] | str
) -> None:
    (tmp_path / "s.toml").write_text(PRICED, encoding="utf-8")
    argv = f"plan --items 9999 --item-time 10min --cluster {tmp_path}/s.toml --nodes 1 --json"
    done = call(*argv.split(), *words.split())

    if isinstance(found, str):
        assert found in f"{done.exception} {getattr(done.exception, 'hint', '')}"
        return
    plan = json.loads(done.stdout)
    node, (choice,) = plan["node"], plan["choices"]
    limit_s = choice["ask_s"] if choice["in_a_row"] > 1 else None
    assert (node["workers"], node["gpus"], node["price_per_hour"], limit_s) == found


def test_several_submissions_count_against_the_number_of_jobs(tmp_path: Path) -> None:
    site = Site(SITES["qos"], tmp_path)
    for jobs, refused in ((31, True), (30, False)):
        words = f"submit command --cluster {site.file} --jobs {jobs} --dry-run -- true"
        said = str(call(*words.split()).exception)
        assert ("--jobs: 31 jobs are more than a user of site may" in said) is refused, said


@pytest.mark.parametrize(
    ("text", "read", "written"),
    [
        ("nvme", [("nvme", "", 1)], "1"),
        ("tmpfs:100G", [("tmpfs", "", 100 * 1024**3)], "100G"),
        ("a:b:no_consume:2k", [("a", "b", 2048)], "2K"),
        ("gpu:1g.5gb:3(S:0),gpu:1g.5gb:4(S:1)", [("gpu", "1g.5gb", 7)], "7"),
        ("a:x", [("a", "x", 1)], "1"),
        ("a:1536", [("a", "", 1536)], "1536"),
        ("a:0", [("a", "", 0)], "0"),
        ("gpu:l40s:4(S:0,2),nvme:1", [("gpu", "l40s", 4), ("nvme", "", 1)], "4"),
        ("gpu:a100:2,gpu:v100:6,gpu:a100:2", [("gpu", "a100", 4), ("gpu", "v100", 6)], "4"),
        ("gpu:no_consume:4", [("gpu", "", 4)], "4"),
    ],
)
def test_amounts_of_resources_are_read_with_their_units(
    text: str, read: list[tuple[str, str, int]], written: str
) -> None:
    assert read_gres(text) == read
    assert format_count(read[0][2]) == written


MORE = "--sbatch hint=memory_bound --sbatch exclusive --sbatch licenses=x"
MORE += " --sbatch open-mode=append --sbatch constraint=eth"
DEFAULTS = """
max_walltime = "2-00:00:00"
gpus_per_node = 4
cpus_per_node = 64
mem_per_node = "512G"
[defaults]
time = "2h"
mem_per_gpu = "16G"
[defaults.sbatch]
hint = "nomultithread"
exclusive = true
licenses = "scratch:1"
image = "docker:ubuntu:22.04"
export = "NONE"
clusters = "alex"
open-mode = "truncate"
nice = 10
constraint = "ib"
[[partitions]]
name = "big"
[partitions.defaults]
time = "3h"
mem = "none"
[partitions.defaults.sbatch]
hint = "multithread"
exclusive = false
gres-flags = "enforce-binding"
[[partitions]]
name = "plain"
[[partitions]]
name = "tidy"
[partitions.defaults.sbatch]
hint = false
nice = false
"""
LEFT_OUT = "--sbatch hint= --sbatch licenses= --sbatch constraint= --sbatch time="


@pytest.mark.parametrize(
    ("words", "expected"),  # a word without "=" is an option that the script lacks
    [
        (
            "--partition plain --gpus-per-node 1",
            """hint=nomultithread exclusive= licenses=scratch:1 nice=10 image=docker:ubuntu:22.04
            export=NONE clusters=alex open-mode=truncate constraint=ib time=02:00:00 gres-flags
            mem-per-gpu=16G""",
        ),
        # A default of memory per GPU does not stop a job without GPUs.
        ("--partition plain", "mem-per-gpu mem=8G"),
        (
            "--partition big --gpus-per-node 1",
            "hint=multithread exclusive time=03:00:00 mem mem-per-gpu gres-flags=enforce-binding",
        ),
        (
            f"--partition big --time 1h --mem 4G {MORE}",
            "hint=memory_bound exclusive= time=01:00:00 mem=4G licenses=x open-mode=append",
        ),
        (f"--partition big {MORE}", "constraint=eth"),
        ("--partition plain --sbatch exclusive=no", "exclusive hint=nomultithread"),
        (f"--partition big {LEFT_OUT}", "hint licenses constraint time=01:00:00 nice=10"),
        ("--partition tidy", "hint nice open-mode=truncate licenses=scratch:1"),
        ("--partition tidy --sbatch hint=multithread", "hint=multithread nice"),
        ("--partition plain --sbatch comment=a= --sbatch image=", "comment=a= image"),
        ("--partition plain --sbatch oversubscribe", "exclusive oversubscribe="),
        ("--partition big,plain", "hint=nomultithread exclusive="),
        ("train-cpu --partition plain --hint compute_bound -- t.py", "hint nice=10"),
    ],
)
def test_the_command_line_wins_over_a_partition_and_that_over_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, expected: str
) -> None:
    found = Site(SITES["linear"], tmp_path)
    found.file.write_text(DEFAULTS, encoding="utf-8")
    wanted = [one.partition("=") for one in expected.split()]

    options = found.options(words)
    assert {key: options.get(key) for key, *_ in wanted} == {
        key: value if has_value else None for key, has_value, value in wanted
    }
    if "time" not in words:
        monkeypatch.setenv("HPCTK_TIME", "30")
        assert found.options(words)["time"] == "00:30:00"


@pytest.mark.parametrize("table", ["[defaults.sbatch]", "[partitions.defaults.sbatch]"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("wrap = 'rm -r x'", "'wrap' is not supported"),
        ("test-only = true", "'test-only' is not supported"),
        ("gpus = 4", "'gpus' is not supported"),
        ("node = 4", "sbatch may read 'node' as 'nodelist'"),
        ("'no such' = 4", "is not accepted"),
        ("N = 4", "'N=4' is not accepted"),
        ("hint = 1.5", "text, a whole number, true or false"),
        ("hint = ['a']", "text, a whole number, true or false"),
        ("ntasks = 4", "some templates do not have it"),
        ("time = '4 x'", "'4 x' is not a time limit"),
        ("exclusive = 'sometimes'", "'sometimes' is not accepted"),
        ("constraint = 'a b'", "is not accepted"),
        ("licenses = true", "'licenses' needs a value"),
        ("licenses = ''", "a value, or false to leave it out"),
        ("exclude = ''", "a value, or false to leave it out"),
        ('comment = "a\\n#SBATCH --x"', "is not accepted"),
    ],
)
def test_options_that_sbatch_must_not_get_are_refused_with_their_place(
    table: str, line: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=r"s\.toml: defaults: sbatch: .* a table"):
        parse_cluster("[defaults]\nsbatch = 'hint=x'\n", file="s.toml", name="s")
    text = f"[[partitions]]\nname = 'a'\n{table}\n{line}\n"
    with pytest.raises(HpcToolkitError) as caught:
        parse_cluster(text, file="s.toml", name="s")

    assert message in f"{caught.value.message} {caught.value.hint}"
    assert re.match(r"s\.toml: .*defaults", caught.value.message)


def test_hostile_defaults_are_refused_or_one_quoted_word() -> None:
    taken = 0
    for text in HOSTILE:
        for option in ("hint", "comment", "image", "constraint"):
            value = "".join(f"\\U{ord(one):08X}" for one in text)
            try:
                site = parse_cluster(
                    f'[defaults.sbatch]\n{option} = "{value}"\n', file="s.toml", name="s"
                )
                script = render_script(read_spec({"python": "/p"}), site)
            except HpcToolkitError:
                continue
            taken += 1
            line = next(one for one in script.splitlines() if f"#SBATCH --{option}=" in one)
            shown = line.partition("=")[2]
            inside = re.sub(r"\\(.)", r"\1", shown[1:-1]) if shown[:1] == '"' else shown
            assert inside == text
            assert shown[:1] == '"' or re.fullmatch(r"[A-Za-z0-9_./:@%+=,-]*", shown)
    assert taken > 100


@pytest.mark.parametrize(
    ("form", "words", "expected"),
    [
        ("none", "--gpus-per-node A100:2", {"gres": None}),
        ("gpus", "--nodes 2 --gpus-per-node a100:2", {"gpus": "A100:4"}),
        ("gpus-per-task", "--gpus-per-node a100:2", {"gpus-per-task": "A100:1"}),
        ("gpus-per-node", "--gpus-per-node a100:2", {"gpus-per-node": "A100:2"}),
        ("gres", "--gpus-per-node a100:2 --sbatch gres=x:1", {"gres": "gpu:A100:2,x:1"}),
    ],
)
@pytest.mark.parametrize("where", ["cluster", "partition"])
def test_gpus_are_requested_in_the_form_of_the_cluster_or_the_partition(
    tmp_path: Path, where: str, form: str, words: str, expected: dict[str, str | None]
) -> None:
    found = Site(SITES["untyped"], tmp_path)
    line = f'gpu_request = "{form}"'
    if where == "cluster":
        found.edit('gpu_request = "gpus-per-node"', line)
    else:
        found.edit('name = "all"', f'name = "all"\n{line}')
    if "--nodes 2" in words:
        found.edit("A100x4 = 1", "A100x4 = 2")

    options = found.options(words)
    forms = ("gpus", "gpus-per-node", "gpus-per-task", "gres")
    assert {key: options[key] for key in forms if key in options} == {
        key: value for key, value in expected.items() if value
    }
    # Of the eight CPUs that belong to each GPU.
    assert options["cpus-per-task"] == "8"


def test_a_slash_in_a_name_makes_no_directory(tmp_path: Path) -> None:
    site = parse_cluster("", file="s.toml", name="s")
    spec = read_spec({"job_name": "a b/c", "command": ("t.py",), "python": "/p"})
    found = of_request(spec, site, "train-cpu", run=None, cwd=tmp_path)

    name = "a_b_c-539138d5"
    assert found.path == tmp_path / "slurm" / f"{name}.sbatch"
    assert (found.log, found.training) == (f"slurm/logs/{name}-%j.out", tmp_path / "runs" / name)
    names = ("a_b_c", "a b/c", "a_b/c", "a b_c", "a:b=c")
    assert len({file_name(one) for one in names}) == len(names)
    assert file_name("layer-1.2_a") == "layer-1.2_a"
    with pytest.raises(RenderError, match="'/' would name a directory"):
        read_spec({"job_name": "a/b", "output": "x-%8x"})
    for name in (" a", "a ", "a\tb", "a;b", "$a", "a'b", "a#b", "a" * 65, "-a"):
        with pytest.raises(RenderError):
            read_spec({"job_name": name})
