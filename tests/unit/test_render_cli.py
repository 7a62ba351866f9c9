"""'hpctk render' and 'hpctk cluster': what they write, print and refuse to overwrite."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpc_toolkit.cli import clusters as cluster_commands
from hpc_toolkit.cli import render as render_command
from hpc_toolkit.cli.help import Commands
from hpc_toolkit.cli.scriptoptions import PANELS
from hpc_toolkit.engines.kubernetes import KINDS
from hpc_toolkit.errors import HpcToolkitError, RenderError
from hpc_toolkit.slurm.render.file import log_directory, read_header, write_script
from hpc_toolkit.slurm.render.script import template_names
from hpc_toolkit.slurm.render.spec import FIELDS, ScriptSpec
from tests.scripttext import batch_words
from tests.toyrun import ToyRun, empty_campaign

DEFAULT = Path("slurm/work-queue.sbatch")
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run below an empty directory, as nothing but the current one may be written to."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str) -> Result:
    app = Commands(help="")
    render_command.register(app)
    cluster_commands.register(app)
    return CliRunner().invoke(app, list(arguments))


def interpreter(script: str) -> str:
    """The interpreter that a script calls, as bash reads it."""
    return batch_words(script)[0]


def refused(*arguments: str) -> HpcToolkitError:
    error = call(*arguments).exception
    assert isinstance(error, HpcToolkitError)
    return error


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("--env", "X=$SCRATCH/a"), "--env 'X=$SCRATCH/a'"),
        (("--env", "X=${A}b"), "--env 'X=${A}b'"),
        (("--output", "$HOME/%j.out"), "--output '$HOME/%j.out'"),
        (("--sbatch", "chdir=$HOME"), "--sbatch chdir='$HOME'"),
        (("--", "echo", "$HOME"), "-- '$HOME'"),
        (("--", "echo", "$(date)"), "-- '$(date)'"),
        (("--env", "X=a$", "--", "echo", "$1", "5$"), ""),
        (("--", "bash", "-c", "echo $HOME"), ""),
        (("--", "/bin/awk", "{print $NF}"), ""),
        (("--node-cache", "$SLURM_TMPDIR"), ""),
    ],
)
def test_a_variable_that_nothing_expands_is_a_warning(words: tuple[str, ...], where: str) -> None:
    said = call("render", "command", "-o", "-", *words, *(() if "--" in words else ("--", "true")))

    assert said.exit_code == 0, said.output
    warnings = [line for line in said.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == bool(where)
    expected = f"warning: {where}: the variable is not expanded; double quotes expand it now, and "
    assert all(line.startswith(expected) for line in warnings)


def test_render_writes_the_script_and_prints_its_path_alone(elsewhere: Path) -> None:
    result = call("render", "--nodes", "8", "--gpus-per-node", "4")

    assert (result.exit_code, result.stdout) == (0, f"{DEFAULT}\n")
    assert "#SBATCH --nodes=8\n" in DEFAULT.read_text()
    assert Path("slurm/logs").is_dir()
    assert {path.name for path in elsewhere.iterdir()} == {"slurm"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), str(Path(sys.executable).absolute())),
        (("--venv", "/x/"), "/x/bin/python"),
        (("--conda", "/c/envs/x"), "/c/envs/x/bin/python"),
        (("--conda", "/c/envs/x", "--python", "/p/python"), "/p/python"),
        (("--conda", "x"), str(Path(sys.executable).absolute())),
    ],
)
def test_render_calls_the_interpreter_of_the_environment(
    options: tuple[str, ...], expected: str
) -> None:
    Path("site.toml").write_text('conda_base = "/c"\n')

    script = call("render", "--cluster", "./site.toml", *options, "-o", "-").stdout

    assert interpreter(script) == expected


def test_render_to_stdout_writes_no_file_but_makes_the_directory_of_the_log(
    elsewhere: Path,
) -> None:
    result = call("render", "-o", "-")

    assert result.stdout.startswith("#!/bin/bash\n")
    assert [path for path in elsewhere.rglob("*") if not path.is_dir()] == []
    assert Path("slurm/logs").is_dir()


def test_a_program_in_a_container_needs_no_hpctk_there() -> None:
    Path("site.toml").write_text('container_runtime = "apptainer"\n')
    given = ("render", "command", "--cluster", "./site.toml", "--container", "x.sif")

    script = call(*given, "-o", "-", "--", "python", "train.py").stdout

    assert interpreter(script) == str(Path(sys.executable).absolute())
    error = refused("render", "--cluster", "./site.toml", "--container", "x.sif")
    assert "the interpreter in the container" in error.message
    assert "--container-python" in error.hint


@pytest.mark.parametrize("template", ["wrok-queue", "a/b"])
def test_an_unknown_template_is_named_and_not_the_job(template: str) -> None:
    error = refused("render", template)

    assert error.message == f"unknown template: {template!r}"
    assert "work-queue" in error.hint


def test_the_only_run_is_the_one_that_a_script_works_on() -> None:
    run = ToyRun(Path("runs/it's one"))

    result = call("render", "--nodes", "2")

    assert result.stdout == f"{DEFAULT}\n"
    assert result.stderr.splitlines() == [
        "note: the script works on runs/it's one",
        "requests 2 nodes for 01:00:00: up to 2.00 node-hours",
    ]
    assert "--run=runs/it's one" in batch_words(DEFAULT.read_text())
    moved = call("render", "--sbatch", "chdir=/tmp", "-o", "-")
    assert f"--run={run.root.absolute()}" in batch_words(moved.stdout)


@pytest.mark.parametrize(("runs", "found"), [((), "none"), (("a", "b"), "several")])
def test_a_script_without_a_run_says_how_to_submit_it(runs: tuple[str, ...], found: str) -> None:
    for name in runs:
        ToyRun(Path("runs", name))

    result = call("render", "-o", "my job.sh")

    why = f"the script names no run: ./runs contains {found}"
    how = "submit it with: sbatch 'my job.sh' RUN"
    assert result.exit_code == 0
    assert result.stderr.splitlines()[1:] == [f"warning: {why}; {how}"]
    assert "--run" not in Path("my job.sh").read_text().split("exec ")[1]


def test_a_run_that_does_not_fit_the_template_is_not_named() -> None:
    empty_campaign(Path("runs/search"))

    said = call("render", "-o", "-")
    why = "runs/search is a campaign; name the template"
    assert f"warning: the script names no run: {why}; submit it with" in said.stderr
    assert "--run=runs/search" in batch_words(call("render", "campaign", "-o", "-").stdout)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("render ", {*template_names(), *KINDS}),
        ("render w", {"work-queue"}),
        ("render kubernetes-d", {"kubernetes-ddp"}),
        ("render kubernetes-queue --max-", {"--max-restarts"}),
        ("render --cluster k", {"killarney"}),
        ("cluster show g", {"generic"}),
    ],
)
def test_templates_and_clusters_are_completed(words: str, offered: set[str]) -> None:
    app = Commands(help="")
    render_command.register(app)
    cluster_commands.register(app)
    environ = {
        "_HPCTK_COMPLETE": "bash_complete",
        "COMP_WORDS": f"hpctk {words}",
        "COMP_CWORD": str(len(f"{words}.".split())),
    }

    completed = CliRunner().invoke(app, [], prog_name="hpctk", env=environ)

    assert {line.removeprefix("plain,") for line in completed.output.split()} == offered


def test_render_again_leaves_the_same_file_alone() -> None:
    call("render", "--nodes", "2")
    DEFAULT.chmod(0o444)
    before = DEFAULT.stat()

    result = call("render", "--nodes", "2")

    assert result.exit_code == 0
    after = DEFAULT.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert call("render", "--nodes", "3").exit_code == 0
    assert "--nodes=3" in DEFAULT.read_text()


@pytest.mark.parametrize(
    ("content", "message"), [("edited", "was edited since"), ("foreign", "is not ours")]
)
def test_render_overwrites_an_edited_or_foreign_file_only_with_force(
    content: str, message: str
) -> None:
    call("render")
    mine = DEFAULT.read_text() + "echo mine\n" if content == "edited" else "echo mine\n"
    DEFAULT.write_text(mine)

    error = refused("render", "--nodes", "2")

    assert message in error.message
    assert "--force" in error.hint
    assert DEFAULT.read_text() == mine
    assert call("render", "--nodes", "2", "--force").exit_code == 0
    assert "echo mine" not in DEFAULT.read_text()


def test_render_takes_sbatchs_names_and_its_own_output(elsewhere: Path) -> None:
    result = call(
        *("render", "work-queue", "--job-name", "mine", "--output", "a b/u/%u-%x-%j.log"),
        *("--time", "90", "--env", "A=b=c", "--env", "B=", "--setup", "ulimit -c 0"),
        *("--no-requeue", "--sbatch", "exclusive", "--run", "runs/x", "-o", "out/my.sbatch"),
    )

    assert result.stdout == "out/my.sbatch\n"
    script = Path("out/my.sbatch").read_text()
    for line in (
        "#SBATCH --job-name=mine",
        '#SBATCH --output="a b/u/%u-%x-%j.log"',
        "#SBATCH --time=01:30:00",
        "#SBATCH --exclusive",
        "#SBATCH --no-requeue",
        "export A=b=c",
        "export B=''",
    ):
        assert f"{line}\n" in script
    assert "--run=runs/x" in batch_words(script)
    assert (elsewhere / "a b").is_dir()
    assert not (elsewhere / "a b" / "%u").exists()


@pytest.mark.parametrize("name", [path.name for path in CHECKOUT.glob("slurm/examples/*.sbatch")])
def test_the_command_of_an_example_asks_for_the_same_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not in the checkout, whose runs/ may have a run.
    sites = [f"slurm/examples/{one.name}" for one in CHECKOUT.glob("slurm/examples/*.toml")]
    (tmp_path / "slurm/examples").mkdir(parents=True)
    for site in sites:
        shutil.copy(CHECKOUT / site, tmp_path / site)
    monkeypatch.chdir(tmp_path)
    example = (CHECKOUT / "slurm/examples" / name).read_text(encoding="utf-8")

    again = call("render", "-o", "-", *command_of(example)).stdout

    assert read_header(again, name).request == read_header(example, name).request
    whole = {site: str(tmp_path / site) for site in sites}
    expected = [whole.get(word, word) for word in command_of(example)]
    assert command_of(again) == expected


def command_of(script: str) -> list[str]:
    """The arguments of 'hpctk render' that a header tells."""
    lines = script[script.index("#   hpctk render ") :].replace("\\\n#", " ")
    return shlex.split(lines.splitlines()[0].removeprefix("#"))[2:]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (("--gpus-per-node", "a100:2"), ("--gpus-per-node=a100:2",)),
        (("--sbatch", "exclusive=user"), ("--exclusive=user",)),
        (("--sbatch", "nice", "--nodes", "2"), ("--nice", "--nodes=2")),
        (("--sbatch=nice=-5",), ("--nice=-5",)),
        (("--sbatch", "contiguous", "--sbatch", "hint=nomultithread"), ("--hint=nomultithread",)),
    ],
)
def test_options_are_written_as_for_sbatch(
    arguments: tuple[str, ...], lines: tuple[str, ...]
) -> None:
    script = call("render", "-o", "-", *arguments).stdout

    for line in lines:
        assert f"\n#SBATCH {line}\n" in script


def test_a_program_and_its_options_stand_behind_two_dashes() -> None:
    words = ("command", "--job-name", "x.y", "--", "run it", "--exclusive")

    path = call("render", *words).stdout

    assert path == "slurm/x.y.sbatch\n"
    assert "'run it' --exclusive" in Path(path.strip()).read_text()
    assert "#SBATCH --exclusive" not in Path(path.strip()).read_text()


def test_every_field_has_an_option_and_every_option_a_field() -> None:
    named = {option.name.partition("/")[0] for group in PANELS.values() for option in group}

    known = {field.name for field in fields(ScriptSpec)}
    passed = {name.replace("-", "_") for name in FIELDS}
    assert not named & passed
    # Some set a variable of env.
    other = {"cluster", "module", "monitor", "node_cache"}
    assert (named | passed) - other == known - {"modules", "command"}


def test_the_help_shows_about_twenty_options() -> None:
    shown = [option for group in PANELS.values() for option in group if not option.hidden]

    assert len(shown) < 26
    assert all(len(option.help) <= 60 for option in shown)


def test_the_log_directory_lies_below_the_directory_of_the_job(elsewhere: Path) -> None:
    call("render", "--output", "a/%j", "--sbatch=chdir=there", "--sbatch=error=b/c/%j")

    assert (elsewhere / "there/a").is_dir()
    assert (elsewhere / "there/b/c").is_dir()


def test_render_says_that_facts_are_not_verified() -> None:
    result = call("render", "--cluster", "killarney", "--account", "aip-x")

    assert "note: clusters/killarney.toml: facts not verified" in result.stderr
    assert result.stdout == f"{DEFAULT}\n"


def test_render_warns_of_a_directory_from_which_the_site_takes_no_jobs(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(elsewhere))

    result = call("render", "--cluster", "killarney", "--account", "aip-x", "-o", "-")

    assert "note: killarney takes no jobs from below ~" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "0"), "--nodes: 0 is not accepted"),
        (("--job-name", "a\n#SBATCH --evil"), "--job-name: 'a.n#SBATCH --evil' is not accepted"),
        (("--cluster", "nowhere"), "unknown cluster: 'nowhere'"),
        (("--env", "A"), "--env: 'A' has no '='"),
        (("--gpus-per-node", "l40s"), "--gpus-per-node: 'l40s' is not a number of GPUs"),
        (("--gpus-per-node", ":4"), "--gpus-per-node: ':4' is not a number of GPUs"),
        (("--sbatch", "ntasks=x"), "--sbatch ntasks: 'x' is not accepted"),
        (("--sbatch", "comment"), "--sbatch: 'comment' needs a value"),
        (("--sbatch=hold", "--sbatch=hold=no"), "--sbatch: 'hold' is given twice"),
        (("--sbatch", "time=5"), "--sbatch: 'time' is not supported"),
        (("work-queue", "--", "python"), "the template work-queue cannot run"),
    ],
)
def test_render_refuses_and_writes_nothing(
    elsewhere: Path, arguments: tuple[str, ...], message: str
) -> None:
    error = refused("render", *arguments)

    assert message in error.message.replace("\\", ".")
    assert error.hint
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--mem-per-cpu", "4G"), "mem-per-cpu=4G"),
        (("--exclusive=user", "x"), "exclusive=user"),
        (("--hold", "work-queue"), "hold"),
        (("--comment", "a b"), "'comment=a b'"),
    ],
)
def test_an_option_of_sbatch_without_its_prefix_is_a_usage_error(
    words: tuple[str, ...], hint: str
) -> None:
    error = refused("render", *words)

    assert error.message == f"no such option: {words[0].partition('=')[0]}"
    assert (error.hint, error.exit_code) == (f"write --sbatch {hint}", 2)


@pytest.mark.parametrize("out", ["taken", "taken/x/y.sbatch", "/proc/nowhere/x.sbatch"])
def test_write_script_that_cannot_be_written_is_an_error_with_its_path(
    elsewhere: Path, out: str
) -> None:
    (elsewhere / "taken").mkdir() if out == "taken" else (elsewhere / "taken").touch()

    with pytest.raises(RenderError, match=f"{out}: cannot be written"):
        write_script(Path(out), "#!/bin/bash\n", force=True)

    assert [path.name for path in elsewhere.rglob("*")] == ["taken"]


def test_a_log_directory_of_another_machine_is_a_note() -> None:
    result = call("render", "--output", "/proc/nowhere/%j.out")

    assert result.exit_code == 0
    assert "note: /proc/nowhere: " in result.stderr


@pytest.mark.parametrize(
    ("output", "directory"),
    [
        *(("%j.out", "."), ("logs/%j.out", "logs"), ("a/%u/b/%j.out", "a"), ("/x/%j", "/x")),
        *(("a%%b/c/%j", "a%b/c"), ("50%/%j/x", "50%"), ("%5A/x", ".")),
    ],
)
def test_log_directory_ends_where_slurm_fills_in(output: str, directory: str) -> None:
    assert log_directory(output) == Path(directory)
