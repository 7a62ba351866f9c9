"""Without --cluster a variable names the cluster, or it is recognized, and the user is told."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.clusters import choice as clusterchoice
from hpc_toolkit.slurm.clusters.choice import resolve_cluster, slurm_cluster_name

if TYPE_CHECKING:
    from pathlib import Path

HOST = os.uname().nodename


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for user's files, on a machine that nothing recognizes."""
    for name in [name for name in os.environ if name.startswith(("HPCTK_", "SLURM_CONF", "CC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(clusterchoice, "CONFIG_FILES", ())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "config" / "hpctk" / "clusters"
    directory.mkdir(parents=True)
    return directory


def identified(directory: Path, name: str, sign: str) -> None:
    (directory / f"{name}.toml").write_text(f"[identify]\n{sign}\n", encoding="utf-8")


@pytest.mark.usefixtures("here")
def test_nothing_known_is_generic_without_a_word() -> None:
    found = resolve_cluster(None)

    assert (found.cluster.name, found.notes) == ("generic", ())


def test_an_option_wins_over_the_variable_and_that_over_recognition(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identified(here, "known", f"hostname = '{HOST}'")
    assert resolve_cluster(None).cluster.name == "known"

    monkeypatch.setenv("HPCTK_CLUSTER", "lab")

    assert resolve_cluster(None).cluster.name == "lab"
    assert resolve_cluster("killarney").cluster.name == "killarney"
    assert resolve_cluster("killarney").notes == ()


@pytest.mark.usefixtures("here")
def test_a_cluster_is_recognized_by_a_variable_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC_CLUSTER", "killarney")

    found = resolve_cluster(None)

    assert found.cluster.name == "killarney"
    why = "clusters/killarney.toml: identify.env = CC_CLUSTER=killarney"
    assert found.notes == (f"cluster killarney, recognized by {why}",)


@pytest.mark.usefixtures("here")
def test_a_variable_of_another_value_recognizes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC_CLUSTER", "killarney2")

    assert resolve_cluster(None).cluster.name == "generic"


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (HOST, "known"),
        (f"{HOST[0]}*", "known"),
        ("*.else.where", "generic"),
    ],
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
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.setenv("CC_CLUSTER", "killarney")

    found = resolve_cluster(None)

    assert found.cluster.name == "lab"
    assert "identify.slurm_cluster = hpctklab" in found.notes[0]


@pytest.mark.usefixtures("here")
def test_a_site_that_calls_its_slurm_lab_is_not_taken_for_a_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=lab\n", encoding="utf-8")
    monkeypatch.setenv("SLURM_CONF", str(conf))

    assert resolve_cluster(None).cluster.name == "generic"


def test_slurms_own_files_are_read_where_no_variable_names_one(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path / "slurm.conf"
    second.write_text("ClusterName=One-2\n", encoding="utf-8")
    monkeypatch.setattr(clusterchoice, "CONFIG_FILES", (str(tmp_path / "none"), str(second)))

    assert slurm_cluster_name({}) == "one-2"
    identified(here, "mine", "slurm_cluster = 'ONE-2'")
    assert resolve_cluster(None).cluster.name == "mine"
    assert slurm_cluster_name({"SLURM_CONF": "/nowhere"}) == ""


def test_a_users_cluster_wins_over_a_builtin_one_recognized_by_the_same_sign(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identified(here, "mine", "env = 'CC_CLUSTER=killarney'")
    monkeypatch.setenv("CC_CLUSTER", "killarney")

    assert resolve_cluster(None).cluster.name == "mine"


def test_two_of_one_layer_recognized_by_the_same_sign_are_refused(here: Path) -> None:
    identified(here, "a", f"hostname = '{HOST}'")
    identified(here, "b", "hostname = '*'")

    with pytest.raises(
        ConfigError, match=r"a and b both match this machine, by identify\.hostname"
    ) as e:
        resolve_cluster(None)

    assert "--cluster" in e.value.hint


def test_a_broken_file_is_passed_over_with_a_note(here: Path) -> None:
    (here / "a.toml").write_text("nodes = [", encoding="utf-8")
    identified(here, "b", "hostnam = '*'")
    identified(here, "c", f"hostname = '{HOST}'")

    found = resolve_cluster(None)

    assert found.cluster.name == "c"
    assert [note.split(": ")[0] for note in found.notes[:2]] == ["passed over", "passed over"]
    assert "unknown key 'hostnam'" in found.notes[1]
