"""'hpctk cluster': what it lists, shows, checks and writes."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from hpc_toolkit.cli import clusters as cluster_commands
from hpc_toolkit.cli.help import Commands
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm.clusters import draft as clusterdraft
from hpc_toolkit.slurm.clusters.facts import load_cluster
from tests.scontrol_outputs import ROUTED

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


def call(*arguments: str) -> Result:
    app = Commands(help="")
    cluster_commands.register(app)
    return CliRunner().invoke(app, ["cluster", *arguments])


def output(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directory of cluster files, empty."""
    for name in [name for name in os.environ if name.startswith("HPCTK_")]:
        monkeypatch.delenv(name)
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


def test_list_shows_a_broken_file_instead_of_failing(user: Path) -> None:
    (user / "mine.toml").write_text("nods = 1", encoding="utf-8")

    assert f"error: {user}/mine.toml: unknown key 'nods'" in output("list")
    assert "unknown key" in json.loads(output("list", "--json"))[-1]["error"]


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


def test_show_tells_units_and_what_a_partition_gives(user: Path) -> None:
    (user / "mine.toml").write_text(
        "verified = true\nmodules = ['a', 'b']\nmem_per_node = '1536M'\n[[partitions]]\n"
        "name = 'p'\nmax_walltime = '90min'\nnodes = 3\ngpus_per_node = 2\nmem_per_node = '2T'\n"
        "[[partitions]]\nname = 'q'\n",
        encoding="utf-8",
    )

    shown = [line.split(maxsplit=1) for line in output("show", "mine").splitlines()]

    assert ["verified", "yes"] in shown
    assert ["modules", "a, b"] in shown
    assert ["mem_per_node", "1536M"] in shown
    text = "p   nodes 3, max_walltime 01:30:00, gpus_per_node 2, mem_per_node 2T"
    assert ["partition", text] in shown
    assert ["partition", "q"] in shown


def test_show_json_has_the_fields_and_their_origins() -> None:
    record: dict[str, Any] = json.loads(output("show", "lab", "--json"))

    assert record["mem_per_node_mib"] == 192000
    assert record["partitions"][1]["name"] == "urgent"
    assert record["origins"]["defaults.time"] == "clusters/lab.toml: defaults.time"


def test_validate_tells_the_first_error_of_every_file_and_ends_with_1(user: Path) -> None:
    (user / "a.toml").write_text("nods = 1", encoding="utf-8")
    (user / "b.toml").write_text("extends = 'labb'", encoding="utf-8")

    result = call("validate")

    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"clusters/{name}.toml: ok" for name in ("generic", "killarney", "lab")
    ]
    assert f"error: {user}/a.toml: unknown key 'nods'" in result.stderr
    assert "did you mean 'nodes'?" in result.stderr
    assert "error: unknown cluster: 'labb'" in result.stderr


def test_validate_tells_an_error_once_and_of_the_file_that_has_it(user: Path) -> None:
    (user / "lab.toml").write_text("nods = 4", encoding="utf-8")

    result = call("validate", "lab")

    assert result.stdout.splitlines() == ["clusters/lab.toml: ok"]
    assert result.stderr.count("unknown key 'nods'") == 1


def test_validate_json_has_every_file_and_its_errors(user: Path) -> None:
    (user / "a.toml").write_text("nods = 1", encoding="utf-8")

    right, wrong = call("validate", "lab", "--json"), call("validate", "--json")

    assert (right.exit_code, wrong.exit_code) == (0, 1)
    named = {"name": "lab", "layer": "built-in", "file": "clusters/lab.toml"}
    assert json.loads(right.stdout) == [{**named, "errors": [], "warnings": []}]
    found = {one["name"]: one for one in json.loads(wrong.stdout)}
    assert list(found) == ["generic", "killarney", "lab", "a"]
    assert (found["a"]["layer"], found["a"]["file"]) == ("user", f"{user}/a.toml")
    (unknown,) = found["a"]["errors"]
    assert unknown["error"] == f"{user}/a.toml: unknown key 'nods'"
    assert unknown["hint"] == "did you mean 'nodes'?"
    assert wrong.stderr == ""


def test_no_name_of_a_file_reaches_the_terminal_as_it_is(user: Path) -> None:
    (user / "a\x1b[2J.toml").write_text("nods = 1", encoding="utf-8")

    listed, validated = call("list"), call("validate")

    assert r"a\x1b[2J" in listed.stdout
    assert r"a\x1b[2J.toml: unknown key" in validated.stderr
    assert "\x1b" not in listed.output + validated.output


def test_validate_takes_names_and_paths(user: Path) -> None:
    (user / "lab.toml").write_text("nodes = 4", encoding="utf-8")
    path = user / "elsewhere"
    path.mkdir()
    (path / "x.toml").write_text("nodes = 1", encoding="utf-8")

    lines = output("validate", "lab", str(path / "x.toml"), str(user / "lab.toml")).splitlines()

    assert lines == [
        *("clusters/lab.toml: ok", f"{user}/lab.toml: ok", f"{path}/x.toml: ok"),
        f"{user}/lab.toml: ok",
    ]


def test_validate_of_an_unknown_name_gives_the_near_miss() -> None:
    error = call("validate", "labb").exception

    assert isinstance(error, HpcToolkitError)
    assert "did you mean 'lab'?" in error.hint


def test_schema_prints_json() -> None:
    assert json.loads(output("schema"))["properties"]["nodes"]["type"] == "integer"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusterdraft, "ask_slurm", lambda: ROUTED)


@pytest.mark.usefixtures("slurm")
def test_init_writes_a_users_file_that_is_in_reach_at_once(user: Path) -> None:
    assert output("init", "site", "--from-slurm") == f"{user}/site.toml\n"
    assert load_cluster("site").partitions[1].kinds == (("l40sx4", 4),)

    error = call("init", "site", "--from-slurm").exception
    assert isinstance(error, HpcToolkitError)
    assert "the file exists" in error.message
    assert output("init", "site", "--from-slurm", "--force")


@pytest.mark.usefixtures("slurm")
def test_init_prints_or_writes_another_file_on_request(user: Path) -> None:
    assert "slurm_cluster" in output("init", "site", "--from-slurm", "-o", "-")
    assert output("init", "site", "--from-slurm", "-o", "sub/x.toml") == "sub/x.toml\n"
    assert list(user.iterdir()) == []
    assert load_cluster("./sub/x.toml").name == "x"


def test_init_without_a_source_says_which_there_are(user: Path) -> None:
    error = call("init", "site").exception

    assert isinstance(error, HpcToolkitError)
    assert "--from-slurm" in error.message
    assert list(user.iterdir()) == []


def test_init_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch, user: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    error = call("init", "site", "--from-slurm").exception

    assert isinstance(error, HpcToolkitError)
    assert "cannot run scontrol" in error.message
    assert list(user.iterdir()) == []
