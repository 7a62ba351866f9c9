"""A cluster is named or recognized; files of later layers win, and values know their place.

What 'hpctk cluster' lists, shows and writes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.clusters import choice, draft, files
from hpc_toolkit.slurm.clusters.choice import resolve_cluster
from hpc_toolkit.slurm.clusters.facts import VARIABLES, cluster_names, load_cluster
from hpc_toolkit.slurm.clusters.files import user_directory
from hpc_toolkit.slurm.render.spec import DEFAULT_OPTIONS, MEMORY_OPTIONS
from tests.sites import recorded
from tests.unit.jobcommands import call, refused


class Layers:
    """Directories of the layers, empty at first, on a machine that nothing recognizes."""

    def __init__(self, root: Path) -> None:
        self.directories = {
            "site": root / "site",
            "user": root / "config" / "hpctk" / "clusters",
            "project": root / "here" / "clusters",
        }
        for directory in self.directories.values():
            directory.mkdir(parents=True)

    def write(self, layer: str, name: str, text: str) -> str:
        """Write a file; return what errors call it."""
        path = self.directories[layer] / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        return f"./clusters/{name}.toml" if layer == "project" else str(path)


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layers:
    made = Layers(tmp_path)
    monkeypatch.setattr(choice, "CONFIG_FILES", ())
    monkeypatch.setenv("HPCTK_SITE_CLUSTERS", str(made.directories["site"]))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path / "here")
    return made


def test_later_layers_win_key_by_key_and_each_key_knows_its_file(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = layers.write("site", "lab", "nodes = 20\ncpus_per_node = 20\ngpu_type = 'a'")
    user = layers.write("user", "lab", "cpus_per_node = 30\ngpu_type = 'b'")
    project = layers.write("project", "lab", "gpu_type = 'c'\n[defaults]\nqos = 'high'")
    monkeypatch.setenv("HPCTK_QOS", "low")

    lab = load_cluster("lab")

    assert (lab.nodes, lab.cpus_per_node, lab.gpu_type, lab.gpus_per_node) == (20, 30, "c", 4)
    written = {"gpus_per_node": "clusters/lab.toml", "nodes": site, "cpus_per_node": user}
    for key, file in {**written, "gpu_type": project}.items():
        assert lab.written(key) == f"{file}: {key}"
    assert lab.written("defaults.qos") == "$HPCTK_QOS"
    assert dict(lab.defaults)["qos"] == "low"


def test_tables_are_merged_key_by_key_and_lists_are_replaced(layers: Layers) -> None:
    layers.write("site", "lab", "modules = ['a', 'b']\n[env]\nA = '1'\nB = '1'")
    user = layers.write("user", "lab", "modules = ['c']\n[env]\nB = '2'\n[defaults]\nqos = 'q'")

    lab = load_cluster("lab")

    assert (lab.modules, dict(lab.env)) == (("c",), {"A": "1", "B": "2"})
    assert dict(lab.defaults) == {"time": 1800, "qos": "q"}
    assert lab.written("defaults") == f"{user}, clusters/lab.toml: defaults"
    assert lab.written("defaults.time") == "clusters/lab.toml: defaults.time"


def test_a_cluster_named_by_its_path_has_one_file_and_the_variables(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    (layers.directories["project"].parent / "lab.toml").write_text("nodes = 3", encoding="utf-8")
    layers.write("user", "lab", "cpus_per_node = 5")
    monkeypatch.setenv("HPCTK_ACCOUNT", "me")

    lab = load_cluster("./lab.toml")

    assert (lab.nodes, lab.cpus_per_node, lab.defaults) == (3, None, (("account", "me"),))
    assert (lab.name, lab.written("nodes")) == ("lab", "./lab.toml: nodes")
    # The project is the current directory, and none above it.
    layers.write("project", "mine", "nodes = 3")
    assert "mine" in cluster_names()
    monkeypatch.chdir(layers.directories["project"])
    assert "mine" not in cluster_names()


def test_extends_starts_from_another_cluster_but_not_from_how_it_is_recognized(
    layers: Layers,
) -> None:
    layers.write("site", "lab", "cpus_per_node = 20")
    user = layers.write("user", "big", "extends = 'lab'\nnodes = 100\n[facts]\nnote = 'x'")

    big = load_cluster("big")

    assert (big.name, big.nodes, big.cpus_per_node, big.gpu_type) == ("big", 100, 20, "l40s")
    assert big.identify == ()
    assert big.file == user
    assert big.written("gpu_type") == "clusters/lab.toml: gpu_type"
    assert {"note", "accounting"} <= dict(big.facts).keys()
    layers.write("user", "a", "extends = 'b'")
    layers.write("user", "b", "extends = 'a'")
    with pytest.raises(ConfigError, match="a extends b extends a: a circle"):
        load_cluster("a")


@pytest.mark.usefixtures("layers")
def test_every_option_with_a_default_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(VARIABLES.values()) == set(DEFAULT_OPTIONS)
    for variable, option in VARIABLES.items():
        with monkeypatch.context() as patched:
            patched.setenv(variable, "7")
            value = dict(load_cluster("generic").defaults)[option]
            numbers = {"time": 420} | dict.fromkeys(("cpus_per_task", *MEMORY_OPTIONS), 7)
            assert value == numbers.get(option, "7"), variable


@pytest.mark.usefixtures("layers")
@pytest.mark.parametrize(
    ("variable", "value"),
    [("HPCTK_CPUS_PER_TASK", "four"), ("HPCTK_CPUS_PER_TASK", "9" * 5000), ("HPCTK_QOS", "a\nb")],
)
def test_a_variable_that_is_no_value_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(ConfigError, match=rf"\${variable}: "):
        load_cluster("lab")


@pytest.mark.parametrize("layer", ["site", "user", "project"])
def test_a_file_that_everybody_may_write_is_refused(layers: Layers, layer: str) -> None:
    layers.write(layer, "lab", "setup = ['curl -sS example.org/x']")
    (layers.directories[layer] / "lab.toml").chmod(0o666)

    with pytest.raises(ConfigError, match=r"lab\.toml: it is world-writable") as caught:
        load_cluster("lab")

    assert caught.value.hint.startswith("chmod o-w ")


def test_a_file_in_a_directory_that_everybody_may_write_is_refused_unless_it_is_sticky(
    layers: Layers,
) -> None:
    layers.write("project", "lab", "nodes = 2")
    for mode in (0o777, 0o1777):
        layers.directories["project"].chmod(mode)
        for name in ("lab", "./clusters/lab.toml"):
            if mode == 0o777:
                with pytest.raises(ConfigError, match="it is world-writable"):
                    load_cluster(name)
            else:
                assert load_cluster(name).nodes == 2


def test_a_link_is_as_safe_as_the_directory_that_it_leads_to(
    layers: Layers, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "x.toml").write_text("nodes = 2", encoding="utf-8")
    (layers.directories["user"] / "lab.toml").symlink_to(shared / "x.toml")
    assert load_cluster("lab").nodes == 2

    shared.chmod(0o777)

    with pytest.raises(ConfigError, match="it is world-writable"):
        load_cluster("lab")


@pytest.mark.parametrize("owned", ["lab.toml", "."], ids=["file", "directory"])
def test_a_project_file_that_another_user_can_change_is_read_only_where_its_path_is_given(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, owned: str
) -> None:
    layers.write("project", "lab", "nodes = 2")
    if os.getuid() == 0:
        os.chown(layers.directories["project"] / owned, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)

    with pytest.raises(ConfigError, match="it or its directory belongs to another user") as caught:
        load_cluster("lab")
    assert load_cluster("./clusters/lab.toml").nodes == 2
    assert "--cluster ./clusters/lab.toml" in caught.value.hint


def test_the_file_that_was_checked_is_the_one_that_is_read(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers.write("project", "x", "nodes = 1")
    path = layers.directories["project"] / "x.toml"
    real = files._open_to_all

    def exchange(directory: os.stat_result) -> bool:
        other = path.with_name("other")
        other.write_text("nodes = 99", encoding="utf-8")
        other.replace(path)
        return real(directory)

    monkeypatch.setattr(files, "_open_to_all", exchange)

    assert load_cluster("x").nodes == 1


def test_a_pipe_is_no_cluster_file_and_nobody_waits_for_its_writer(layers: Layers) -> None:
    layers.write("project", "other", "nodes = 1")
    for name in ("x", "lab"):
        os.mkfifo(layers.directories["project"] / f"{name}.toml")

    with pytest.raises(ConfigError, match=r"x\.toml: cannot be read: is not a regular file"):
        load_cluster("x")
    assert load_cluster("other").nodes == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"nodes = {'1' * 5000}", "contains a number with thousands of digits"),
        (f"nodes = 0x{'f' * 5000}", "a number of thousands of digits is not a whole number"),
        (f"nodes = {'[' * 3000}{']' * 3000}", "is nested hundreds of levels deep"),
        (f"gpu_type = '{' ' * 5000}'", r"' {199}\.\.\. is not a name"),
    ],
)
def test_a_file_beyond_what_python_reads_is_an_error_of_that_file(
    layers: Layers, text: str, message: str
) -> None:
    layers.write("project", "x", text)

    with pytest.raises(ConfigError, match=rf"clusters/x\.toml: .*{message}") as caught:
        load_cluster("x")
    assert len(caught.value.message) < 400
    assert resolve_cluster(None).cluster.name == "generic"


def test_the_users_directory_follows_xdg_and_ignores_a_relative_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")

    assert user_directory() == Path("/home/me/.config/hpctk/clusters")


HOST = os.uname().nodename


def identified(layers: Layers, name: str, sign: str) -> None:
    layers.write("user", name, f"[identify]\n{sign}\n")


def test_an_option_wins_over_the_variable_and_that_over_recognition(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    identified(layers, "known", f"hostname = '{HOST}'")
    assert resolve_cluster(None).cluster.name == "known"

    monkeypatch.setenv("HPCTK_CLUSTER", "lab")

    assert resolve_cluster(None).cluster.name == "lab"
    assert resolve_cluster("killarney").cluster.name == "killarney"
    assert resolve_cluster("killarney").notes == ()


@pytest.mark.parametrize(
    ("pattern", "name"), [(HOST, "known"), (f"{HOST[0]}*", "known"), ("*.else.where", "generic")]
)
def test_a_pattern_must_be_that_of_the_whole_host_name(
    layers: Layers, pattern: str, name: str
) -> None:
    identified(layers, "known", f"hostname = '{pattern}'")

    assert resolve_cluster(None).cluster.name == name


@pytest.mark.usefixtures("layers")
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
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    identified(layers, "mine", "env = 'CC_CLUSTER=killarney'")
    monkeypatch.setenv("CC_CLUSTER", "killarney")
    assert resolve_cluster(None).cluster.name == "mine"

    identified(layers, "a", f"hostname = '{HOST}'")
    identified(layers, "b", "hostname = '*'")
    monkeypatch.delenv("CC_CLUSTER")

    says = r"a and b both match this machine, by identify\.hostname"
    with pytest.raises(ConfigError, match=says) as caught:
        resolve_cluster(None)
    assert "--cluster" in caught.value.hint


def test_a_broken_file_is_passed_over_with_a_note(layers: Layers) -> None:
    layers.write("user", "a", "nodes = [")
    identified(layers, "b", "hostnam = '*'")
    identified(layers, "c", f"hostname = '{HOST}'")

    found = resolve_cluster(None)

    assert found.cluster.name == "c"
    assert [note.split(": ")[0] for note in found.notes[:2]] == ["passed over", "passed over"]
    assert "unknown key 'hostnam'" in found.notes[1]


def output(*arguments: str) -> str:
    result = call("cluster", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list_tells_the_layers_of_each_cluster(layers: Layers) -> None:
    lab = layers.write("user", "lab", "nodes = 4")
    layers.write("user", "mine", "description = 'ours'")

    lines = {line.split()[0]: line for line in output("list").splitlines()}
    records = {one["name"]: one for one in json.loads(output("list", "--json"))}

    assert list(lines) == ["generic", "killarney", "lab", "mine"]
    assert "built-in, user" in lines["lab"]
    assert lines["mine"].split(maxsplit=1)[1].split() == ["user", "ours"]
    assert records["lab"]["files"] == [
        {"layer": "built-in", "file": "clusters/lab.toml"},
        {"layer": "user", "file": lab},
    ]


def test_show_with_origin_names_the_file_of_every_value(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = layers.write("user", "lab", "nodes = 4\n[defaults]\nqos = 'q'")
    monkeypatch.setenv("HPCTK_TIME", "0:10:00")

    lines = [line.split(maxsplit=2) for line in output("show", "lab", "--origin").splitlines()]

    shown = {key: (file, value) for file, key, value in lines if key != "partition"}
    assert shown["nodes"] == (lab, "4")
    assert shown["gpus_per_node"] == ("clusters/lab.toml", "4")
    assert shown["defaults.qos"] == (lab, "q")
    assert shown["defaults.time"] == ("$HPCTK_TIME", "00:10:00")

    record: dict[str, Any] = json.loads(output("show", "lab", "--json"))
    assert record["mem_per_node_mib"] == 192000
    assert record["partitions"][1]["name"] == "urgent"
    assert record["origins"]["max_walltime"] == "clusters/lab.toml: max_walltime"


def test_no_name_of_a_file_reaches_the_terminal_as_it_is(layers: Layers) -> None:
    layers.write("user", "a\x1b[2J", "nods = 1")

    listed = call("cluster", "list")

    assert r"a\x1b[2J" in listed.stdout
    assert "\x1b" not in listed.output


def test_init_writes_a_users_file_that_is_in_reach_at_once(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "ask_slurm", lambda: recorded("mixed"))
    assert output("init", "site", "--from-slurm") == f"{layers.directories['user']}/site.toml\n"
    assert load_cluster("site").partitions[0].name == "main"

    assert "the file exists" in refused("cluster", "init", "site", "--from-slurm").message
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


@pytest.mark.usefixtures("layers")
def test_init_marks_a_partition_that_takes_no_jobs_from_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    text = output("init", "deep", "--from-slurm", "-o", "-")

    assert text.count("restricted = ") == 1
    assert 'restricted = "AllocNodes=login1,login2: this host is ' in text
