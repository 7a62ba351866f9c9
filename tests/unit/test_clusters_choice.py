"""A cluster is named or recognized, and its first partition that takes a job is chosen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError, RenderError
from hpc_toolkit.slurm.clusters import choice as clusterchoice
from hpc_toolkit.slurm.clusters.choice import choose_partition, resolve_cluster
from hpc_toolkit.slurm.clusters.facts import parse_cluster
from hpc_toolkit.slurm.clusters.fitting import Needs

HOST = os.uname().nodename


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for user's files, on a machine that nothing recognizes."""
    monkeypatch.setattr(clusterchoice, "CONFIG_FILES", ())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "config" / "hpctk" / "clusters"
    directory.mkdir(parents=True)
    return directory


def identified(directory: Path, name: str, sign: str) -> None:
    (directory / f"{name}.toml").write_text(f"[identify]\n{sign}\n", encoding="utf-8")


def test_an_option_wins_over_the_variable_and_that_over_recognition(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identified(here, "known", f"hostname = '{HOST}'")
    assert resolve_cluster(None).cluster.name == "known"

    monkeypatch.setenv("HPCTK_CLUSTER", "lab")

    assert resolve_cluster(None).cluster.name == "lab"
    assert resolve_cluster("killarney").cluster.name == "killarney"
    assert resolve_cluster("killarney").notes == ()


@pytest.mark.parametrize(
    ("pattern", "name"), [(HOST, "known"), (f"{HOST[0]}*", "known"), ("*.else.where", "generic")]
)
def test_a_pattern_must_be_that_of_the_whole_host_name(here: Path, pattern: str, name: str) -> None:
    identified(here, "known", f"hostname = '{pattern}'")

    assert resolve_cluster(None).cluster.name == name


@pytest.mark.usefixtures("here")
def test_the_slurm_in_reach_is_better_evidence_than_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("# ClusterName=other\nclustername = HpctkLab # ours\n", encoding="utf-8")
    monkeypatch.setenv("CC_CLUSTER", "killarney")
    found = [resolve_cluster(None)]
    monkeypatch.setenv("SLURM_CONF", str(conf))
    found.append(resolve_cluster(None))
    monkeypatch.delenv("CC_CLUSTER")
    conf.write_text("ClusterName=lab\n", encoding="utf-8")  # a site's own name for its Slurm
    found.append(resolve_cluster(None))

    assert [one.cluster.name for one in found] == ["killarney", "lab", "generic"]
    why = "clusters/killarney.toml: identify.env = CC_CLUSTER=killarney"
    assert found[0].notes == (f"cluster killarney, recognized by {why}",)
    assert "identify.slurm_cluster = hpctklab" in found[1].notes[0]


def test_a_users_cluster_wins_over_a_builtin_one_and_two_of_one_layer_are_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identified(here, "mine", "env = 'CC_CLUSTER=killarney'")
    monkeypatch.setenv("CC_CLUSTER", "killarney")
    assert resolve_cluster(None).cluster.name == "mine"

    identified(here, "a", f"hostname = '{HOST}'")
    identified(here, "b", "hostname = '*'")
    monkeypatch.delenv("CC_CLUSTER")

    says = r"a and b both match this machine, by identify\.hostname"
    with pytest.raises(ConfigError, match=says) as caught:
        resolve_cluster(None)
    assert "--cluster" in caught.value.hint


def test_a_broken_file_is_passed_over_with_a_note(here: Path) -> None:
    (here / "a.toml").write_text("nodes = [", encoding="utf-8")
    identified(here, "b", "hostnam = '*'")
    identified(here, "c", f"hostname = '{HOST}'")

    found = resolve_cluster(None)

    assert found.cluster.name == "c"
    assert [note.split(": ")[0] for note in found.notes[:2]] == ["passed over", "passed over"]
    assert "unknown key 'hostnam'" in found.notes[1]


MIXED = parse_cluster(
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
        assert choose_partition(MIXED, needs) == found
        return
    with pytest.raises(RenderError) as caught:
        choose_partition(MIXED, needs)
    assert caught.value.message.endswith(found)
    assert ("requeue" in caught.value.hint) == ("time at most" in found)
