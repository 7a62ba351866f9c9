"""A cluster file drafted from a real Slurm describes it, and its scripts are accepted there."""

from __future__ import annotations

import os
import pwd
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_toolkit.lab.settings import LabPaths, LabSettings
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.clusters.fitting import kinds_of
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import wait_until
from tests.slurm.templatesite import Site


def user_of(lab: LabUnderTest, cwd: Path) -> Site:
    """A user without files of their own in front of a Slurm."""
    return Site(lab, cwd, environ={"XDG_CONFIG_HOME": str(cwd / "config")})


@pytest.fixture
def site(lab: LabUnderTest, tmp_path: Path) -> Site:
    return user_of(lab, tmp_path)


def test_a_drafted_file_says_what_the_builtin_file_of_the_lab_says_and_is_not_overwritten(
    site: Site,
) -> None:
    init = ("cluster", "init", "mine", "--from-slurm")
    path = site.hpctk(*init).strip()
    drafted, builtin = load_cluster(path), load_cluster("lab")

    for fact in (
        *("gpu_request", "max_walltime_s", "max_array_size", "shrink_jobs", "mem_style"),
        *("identify", "account_required"),
    ):
        assert getattr(drafted, fact) == getattr(builtin, fact), fact
    (kind,), (own,) = drafted.kinds, kinds_of(builtin)
    assert (kind.gpus, kind.cpus, kind.mem_mib) == (own.gpus, own.cpus, own.mem_mib)
    for mine, its in zip(drafted.partitions, builtin.partitions, strict=True):
        assert (mine.name, mine.kinds) == (its.name, ((kind.name, its.nodes),))
    assert not drafted.verified
    assert drafted.source == "hpctk cluster init mine --from-slurm"
    shown = [site.hpctk("cluster", "show", named) for named in (path, "mine")]
    assert shown[0] == shown[1]
    again = site.call(*init, check=False)
    assert again.returncode == 1
    assert "the file exists" in again.stderr

    words = ("--nodes", "8", "--gpus-per-node", "4", "--cluster", "mine")
    script = site.cwd / site.hpctk("render", *words).strip()

    assert "#SBATCH --partition=main\n" in script.read_text(encoding="utf-8")
    assert "n[1-8]" in site.lab.run("sbatch", "--test-only", script, cwd=site.cwd).stderr


def several_conf(text: str) -> str:
    """slurm.conf with nodes with four GPUs, with parts of GPUs, with untyped GPUs and much memory,
    and plain ones; a closed partition, one of complete nodes, and one with a QOS."""
    line = next(one for one in text.splitlines() if one.startswith("NodeName="))
    port = int(re.findall(r"Port=\[?(\d+)", line)[0])
    bare = re.sub(r"(NodeName|Port|RealMemory|Gres)=\S+ ?", "", line)
    nodes = [
        "n1 RealMemory=64000 Gres=gpu:L40S:4 Feature=ada",
        "n2 RealMemory=64000 Gres=gpu:L40S:2,gpu:L40S.2:2 Feature=ada",
        "n3 RealMemory=256000 Gres=gpu:2,tmpfs:100G Feature=fat,ib",
        "n4 RealMemory=32000 Feature=ib",
    ]
    lines = [f"NodeName={one} Port={port + at} {bare}" for at, one in enumerate(nodes)]
    lines += [
        "PartitionName=closed Nodes=n4 AllowGroups=nobody-at-all State=UP MaxTime=60",
        "PartitionName=whole Nodes=n1 OverSubscribe=EXCLUSIVE State=UP MaxTime=60",
        "PartitionName=quick Nodes=n1,n4 State=UP MaxTime=60",
        "AccountingStorageEnforce=associations,limits,qos",
    ]
    kept = [one for one in text.splitlines() if "urgent" not in one and one != line]
    at = next(number for number, one in enumerate(kept) if one.startswith("PartitionName="))
    text = "\n".join([*kept[:at], *lines[:4], *kept[at:], *lines[4:]]) + "\n"
    return text.replace("GresTypes=gpu", "GresTypes=gpu,tmpfs")


def several_gres(_settings: LabSettings, paths: LabPaths) -> str:
    return f"""AutoDetect=off
NodeName=n1 Name=gpu Type=L40S File={paths.devices}/gpu[0-3]
NodeName=n2 Name=gpu Type=L40S File={paths.devices}/gpu[0-1]
NodeName=n2 Name=gpu Type=L40S.2 File={paths.devices}/gpu[2-3]
NodeName=n3 Name=gpu File={paths.devices}/gpu[0-1]
NodeName=n3 Name=tmpfs Count=100G
"""


RIGHTS = (
    "sacctmgr --immediate add qos quick set MaxTRESPerJob=node=1 MaxWall=10",
    "sacctmgr --immediate add qos urgent set Flags=OverPartQOS,PartitionTimeLimit MaxWall=120",
    "sacctmgr --immediate modify qos urgent set MaxTRESPerJob=node=2",
    "sacctmgr --immediate add account physics",
    "sacctmgr --immediate add user {user} account=physics qos=normal,urgent defaultqos=normal",
    # slurmctld does not start with a QOS that does not exist.
    "scontrol update partitionname=quick qos=quick",
)


@pytest.fixture
def several(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    """A Slurm with accounting and several kinds of nodes in one partition."""
    root = tmp_path_factory.mktemp("several")
    monkeypatch.setattr("hpc_toolkit.lab.gres_conf", several_gres)
    settings = LabSettings(nodes=4, accounting=True)
    with LabUnderTest(root / "lab", settings, edit=several_conf) as lab:
        for line in RIGHTS:
            lab.run(*line.format(user=pwd.getpwuid(os.getuid()).pw_name).split())
        yield user_of(lab, root)


RUN: list[tuple[str, str]] = [
    ("--partition main --gpus-per-node l40s:3", "n1"),
    ("--partition main --gpus-per-node L40S.2:2", "n2"),
    ("--partition main --mem 200000M", "n3"),
    ("--partition main --sbatch constraint=fat", "n3"),
    ("--partition main --sbatch constraint=(fat&ib)|fat", "n3"),
    ("--partition main --sbatch gres=tmpfs:90G", "n3"),
    ("--partition main --nodes 2 --sbatch constraint=[fat*1&ada*1] --mem 40000M", "n[1,3]"),
    ("--partition main --nodes 2 --sbatch nodelist=n[1,3-3]", "n[1,3]"),
    ("--partition whole --gpus-per-node 2", "n1"),
    ("--partition quick --gpus-per-node 1 --time 5", "n1"),
    ("--partition quick --nodes 2 --account physics --qos urgent --time 90", "n[1,4]"),
    ("--job-name 'a b/c:d=e,f' --sbatch signal=B:SIGUSR1@30 --sbatch nodelist=n[4]", "n4"),
]
"""Requests, and the nodes on which their jobs run."""
REFUSED = [
    ("--partition main --gpus-per-node 3 --nodes 2", "nodes at most 1 (L40Sx4)"),
    ("--partition main --nodes 2 --sbatch constraint=fat", "nodes at most 1 "),
    ("--partition main --gpus-per-node L40S.2:3", "GPUs a node at most 2"),
    ("--partition main --gpus-per-node a100:1", "its GPUs are L40S, L40S.2"),
    ("--partition main --mem 300000M", "memory a node at most 250G"),
    ("--partition main --sbatch gres=tmpfs:101G", "a node has at most 100G"),
    ("--partition quick --nodes 2 --time 5", "qos.quick: nodes at most 1"),
    ("--partition quick --time 30", "qos.quick: time at most 00:10:00"),
    ("--partition quick --qos urgent --time 3:00:00", "qos.urgent: time at most 02:00:00"),
]


@pytest.mark.long
def test_jobs_run_on_the_kind_of_nodes_that_a_request_means(several: Site) -> None:
    several.hpctk("cluster", "init", "several", "--from-slurm")
    shown = several.hpctk("cluster", "show", "several")
    assert "restricted AllowGroups=nobody-at-all: you are in none of these groups" in shown
    assert "qos.urgent" in shown

    render = ("render", "command", "--cluster", "several", "-o")
    jobs, scripts = {}, {}
    for words, nodes in RUN:
        given = [*shlex.split(words), *([] if "signal" in words else ["--plain"])]
        said = several.call(*render, "job.sbatch", "--force", *given, "--", "true")
        assert ("complete nodes are billed" in said.stderr) is ("whole" in words)
        scripts[words] = (several.cwd / "job.sbatch").read_text(encoding="utf-8")
        jobs[several.lab.sbatch("job.sbatch", cwd=several.cwd)] = (words, nodes)
    for words, why in REFUSED:
        argv = (*render, "-", *words.split(), "--plain", "--", "true")
        refused = several.call(*argv, check=False)
        assert refused.returncode == 1, words
        assert why in refused.stderr, words
    wait_until(lambda: not several.lab.run("squeue", "--noheader").stdout, "the jobs end")

    listed = several.lab.run("squeue", "--noheader", "--states=all", "--format=%i|%T|%N|%j").stdout
    ended = {row[0]: row[1:] for row in (line.split("|") for line in listed.splitlines())}
    for job, (words, nodes) in jobs.items():
        assert ended[job][:2] == ["COMPLETED", nodes], (words, scripts[words])
    assert "a b/c:d=e,f" in {row[2] for row in ended.values()}
