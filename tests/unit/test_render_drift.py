"""'hpctk render --check' and '--from': a script tells what it was rendered from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from hpc_toolkit.cli import render as render_command
from hpc_toolkit.cli.help import Commands
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm.render.file import sha256
from hpc_toolkit.slurm.render.script import check_drift

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT = Path("slurm/work-queue.sbatch")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str) -> Result:
    app = Commands(help="")
    render_command.register(app)
    return CliRunner().invoke(app, ["render", *arguments])


def refused(*arguments: str) -> HpcToolkitError:
    error = call(*arguments).exception
    assert isinstance(error, HpcToolkitError), error
    return error


def written(text: str, path: Path = DEFAULT) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_fresh_script_is_up_to_date() -> None:
    call("--nodes", "2", "--sbatch", 'comment=a "b" #c', "--dependency", "afterok:1")

    result = call("--check")

    assert (result.exit_code, result.stdout) == (0, f"{DEFAULT}: up to date\n")


def test_a_script_edited_by_hand_is_told_with_the_difference() -> None:
    call("--nodes", "2")
    written(DEFAULT.read_text().replace("--nodes=2", "--nodes=3"))

    result = call("--check", "--diff")

    assert result.exit_code == 1
    assert result.stdout.startswith(f"{DEFAULT}: edited by hand\n--- {DEFAULT}\n")
    assert "\n-#SBATCH --nodes=3\n+#SBATCH --nodes=2\n" in result.stdout


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced("by hpctk 0", "by hpctk 9"), "rendered by hpctk 9"),
        (
            replaced("hpctk-template: work-queue ", "hpctk-template: work-queue 00"),
            "the template work-queue changed",
        ),
        (
            replaced("hpctk-cluster: generic ", "hpctk-cluster: generic 00"),
            "the facts of the cluster generic changed",
        ),
        (replaced("export OMP_NUM_THREADS", "export  OMP_NUM_THREADS"), "rendered differently"),
    ],
)
def test_what_changed_since_the_rendering_is_told(
    change: Callable[[str], str], reason: str
) -> None:
    call("--nodes", "2")
    changed = change(DEFAULT.read_text())
    mark = next(line for line in changed.splitlines() if line.startswith("# hpctk-body"))
    body = changed.replace(mark + "\n", "")
    # As another version would have signed it.
    written(changed.replace(mark, f"# hpctk-body: sha256:{sha256(body)}"))

    result = call("--check")

    assert result.exit_code == 1
    assert reason in result.stdout
    assert "edited by hand" not in result.stdout


def test_a_request_that_is_refused_by_now_is_told() -> None:
    site = written('[defaults]\ntime = "60"\n', Path("site.toml"))
    call("--cluster", str(site.absolute()), "--nodes", "4")
    written("nodes = 2\n", site)

    drift = check_drift(DEFAULT)

    assert len(drift.reasons) == 1
    assert "its request is refused now: --nodes: 4 is more than site has" in drift.reasons[0]
    assert drift.rendered is None
    assert call("--check").exit_code == 1


def test_a_request_of_a_newer_version_is_refused_with_the_unknown_option() -> None:
    call("--nodes", "2")
    written(DEFAULT.read_text().replace(" --nodes 2 ", " --nodez 2 "))

    drift = check_drift(DEFAULT)

    assert "has an unknown option '--nodez'" in drift.reasons[-1]


def test_check_names_every_script_and_prints_json_on_demand() -> None:
    call("--nodes", "2", "--job-name", "a")
    call("--nodes", "2", "--job-name", "b")
    path = Path("slurm/b.sbatch")
    path.write_text(path.read_text() + "echo mine\n")
    written("#!/bin/bash\necho mine\n", Path("slurm/c.sbatch"))

    result = call("--check", "--json")

    assert result.exit_code == 1
    assert json.loads(result.stdout) == [
        {"file": "slurm/a.sbatch", "up_to_date": True, "reasons": []},
        {"file": "slurm/b.sbatch", "up_to_date": False, "reasons": ["edited by hand"]},
    ]
    assert call("--check", "slurm/a.sbatch").exit_code == 0


def test_a_damaged_header_is_told_and_hides_no_other_script() -> None:
    call("--job-name", "a")
    call("--job-name", "b")
    path = Path("slurm/a.sbatch")
    path.write_text(path.read_text().replace("render work-queue --cluster", "render --cluster"))

    result = call("--check")

    assert result.exit_code == 1
    first, second = result.stdout.splitlines()
    assert "the request in its header was edited" in first
    assert second == "slurm/b.sbatch: up to date"


def test_an_odd_file_hides_no_other_script() -> None:
    call("--job-name", "a")
    Path("slurm/b.sbatch").write_bytes(b"#!/bin/bash\n# caf\xe9\n")
    Path("slurm/c.sbatch").mkdir()

    own = call("--check")
    named = call("--check", *sorted(map(str, Path("slurm").glob("*.sbatch"))), "mine.sh")

    assert (own.exit_code, own.stdout) == (0, "slurm/a.sbatch: up to date\n")
    assert named.exit_code == 1
    assert named.stdout.splitlines() == [
        "slurm/a.sbatch: up to date",
        "slurm/b.sbatch: is not UTF-8 text",
        "slurm/c.sbatch: cannot be read: Is a directory",
        "mine.sh: cannot be read: No such file or directory",
    ]


def test_a_script_whose_lines_end_otherwise_is_edited_and_can_be_mended() -> None:
    call("--nodes", "2")
    unix = DEFAULT.read_bytes()
    DEFAULT.write_bytes(unix.replace(b"\n", b"\r\n"))

    result = call("--check")
    fixed = call("--from", str(DEFAULT), "--force")

    assert (result.exit_code, result.stdout) == (1, f"{DEFAULT}: edited by hand\n")
    assert fixed.exit_code == 0
    assert DEFAULT.read_bytes() == unix


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--check",), "no rendered script in slurm/"),
        (("--from", "nowhere.sbatch"), "nowhere.sbatch: cannot be read"),
        (("--from", "mine.sh"), "mine.sh: not a script that 'hpctk render' wrote"),
        (("--check", "--nodes", "2"), "--nodes: not allowed with --check"),
        (("--diff",), "--diff and --json need --check"),
        (("--check", "--from", "mine.sh"), "--from: not allowed with --check"),
    ],
)
def test_what_cannot_be_checked_is_an_error(arguments: tuple[str, ...], message: str) -> None:
    written("#!/bin/bash\n", Path("mine.sh"))

    error = refused(*arguments)

    assert message in error.message
    assert error.hint


def test_from_renders_a_script_again_with_other_options() -> None:
    passed = ("--sbatch", "begin=18:00", "--sbatch", "comment=old")
    call("--nodes", "2", "--mem", "4G", "--env", "A=1", *passed, "-o", "my.sbatch")

    other = ("--sbatch", "mem-per-cpu=2G", "--sbatch", "comment=new")
    again = call("--from", "my.sbatch", "--nodes", "3", *other)

    script = Path("my.sbatch").read_text()
    assert again.stdout == "my.sbatch\n"
    assert "#SBATCH --nodes=3\n" in script
    assert "#SBATCH --mem-per-cpu=2G\n" in script
    assert "#SBATCH --begin=18:00\n#SBATCH --comment=new\n" in script
    assert "--mem=4G" not in script
    assert "export A=1\n" in script
