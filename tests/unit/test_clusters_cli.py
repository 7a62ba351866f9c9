"""'hpctk cluster': what it lists, shows, checks and writes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm.clusters import draft as clusterdraft
from hpc_toolkit.slurm.clusters.facts import load_cluster
from tests.sites import recorded
from tests.unit import jobcommands

call = partial(jobcommands.call, "cluster")


def output(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directory of cluster files, empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    directory = tmp_path / "config" / "hpctk" / "clusters"
    directory.mkdir(parents=True)
    return directory


def test_list_tells_the_layers_of_each_cluster(user: Path) -> None:
    (user / "lab.toml").write_text("nodes = 4", encoding="utf-8")
    (user / "mine.toml").write_text("description = 'ours'", encoding="utf-8")

    lines = {line.split()[0]: line for line in output("list").splitlines()}
    records = {one["name"]: one for one in json.loads(output("list", "--json"))}

    assert list(lines) == ["generic", "killarney", "lab", "mine"]
    assert "built-in, user" in lines["lab"]
    assert lines["mine"].split(maxsplit=1)[1].split() == ["user", "ours"]
    assert records["lab"]["files"] == [
        {"layer": "built-in", "file": "clusters/lab.toml"},
        {"layer": "user", "file": str(user / "lab.toml")},
    ]


def test_show_with_origin_names_the_file_of_every_value(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user / "lab.toml").write_text("nodes = 4\n[defaults]\nqos = 'q'", encoding="utf-8")
    monkeypatch.setenv("HPCTK_TIME", "0:10:00")

    lines = [line.split(maxsplit=2) for line in output("show", "lab", "--origin").splitlines()]

    shown = {key: (file, value) for file, key, value in lines if key != "partition"}
    assert shown["nodes"] == (str(user / "lab.toml"), "4")
    assert shown["gpus_per_node"] == ("clusters/lab.toml", "4")
    assert shown["defaults.qos"] == (str(user / "lab.toml"), "q")
    assert shown["defaults.time"] == ("$HPCTK_TIME", "00:10:00")

    record: dict[str, Any] = json.loads(output("show", "lab", "--json"))
    assert record["mem_per_node_mib"] == 192000
    assert record["partitions"][1]["name"] == "urgent"
    assert record["origins"]["max_walltime"] == "clusters/lab.toml: max_walltime"


def test_no_name_of_a_file_reaches_the_terminal_as_it_is(user: Path) -> None:
    (user / "a\x1b[2J.toml").write_text("nods = 1", encoding="utf-8")

    listed = call("list")

    assert r"a\x1b[2J" in listed.stdout
    assert "\x1b" not in listed.output


def test_init_writes_a_users_file_that_is_in_reach_at_once(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusterdraft, "ask_slurm", lambda: recorded("mixed"))
    assert output("init", "site", "--from-slurm") == f"{user}/site.toml\n"
    assert load_cluster("site").partitions[0].name == "main"

    error = call("init", "site", "--from-slurm").exception
    assert isinstance(error, HpcToolkitError)
    assert "the file exists" in error.message
    assert output("init", "site", "--from-slurm", "--force")


SCONTROL = """#!/bin/sh
case "$*" in
  *config) echo "ClusterName = deep"; echo "SLURM_VERSION = 24.05.1" ;;
  *partition)
    echo "PartitionName=a State=UP AllocNodes=login[1-2]"
    echo "PartitionName=b State=UP AllocNodes=here[1-2],login9"
    echo "PartitionName=c State=UP AllocNodes=login[1-2],localhost" ;;
  *node) echo "NodeName=n1 CPUTot=4 RealMemory=100 Partitions=a,b,c" ;;
  *hostnames\\ login*) echo login1; echo login2 ;;
  *) echo here1; echo "$(uname -n | cut -d. -f1)" ;;
esac
"""


def test_init_marks_a_partition_that_takes_no_jobs_from_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    text = output("init", "deep", "--from-slurm", "-o", "-")

    assert text.count("restricted = ") == 1
    assert 'restricted = "AllocNodes=login1,login2: this host is ' in text
