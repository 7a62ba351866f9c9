"""'hpctk render': what it writes, prints and refuses, its --from, and scripts of guides."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from hpc_toolkit.cli.scriptoptions import PANELS
from hpc_toolkit.slurm.records import script_options
from hpc_toolkit.slurm.render.file import read_header
from hpc_toolkit.slurm.render.spec import FIELDS, ScriptSpec
from tests.scripttext import batch_words
from tests.toyrun import ToyRun
from tests.unit import jobcommands

pytestmark = pytest.mark.usefixtures("elsewhere")
DEFAULT = Path("slurm/work-queue.sbatch")
CHECKOUT = Path(__file__).parents[2]


call = partial(jobcommands.call, "render")
refused = partial(jobcommands.refused, "render")


def interpreter(script: str) -> str:
    """The interpreter that a script calls, as bash reads it."""
    return batch_words(script)[0]


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
    ],
)
def test_a_variable_that_nothing_expands_is_a_warning(words: tuple[str, ...], where: str) -> None:
    said = call("command", "-o", "-", *words, *(() if "--" in words else ("--", "true")))

    assert said.exit_code == 0, said.output
    warnings = [line for line in said.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == bool(where)
    expected = f"warning: {where}: the variable is not expanded; double quotes expand it now, and "
    assert all(line.startswith(expected) for line in warnings)


def test_render_writes_the_script_and_its_log_directory_and_prints_its_path_alone(
    elsewhere: Path,
) -> None:
    result = call("--nodes", "8", "--gpus-per-node", "4")

    assert (result.exit_code, result.stdout) == (0, f"{DEFAULT}\n")
    assert "#SBATCH --nodes=8\n" in DEFAULT.read_text()
    assert Path("slurm/logs").is_dir()
    assert {path.name for path in elsewhere.iterdir()} == {"slurm"}
    shutil.rmtree("slurm")
    assert call("-o", "-").stdout.startswith("#!/bin/bash\n")
    assert [path for path in elsewhere.rglob("*") if not path.is_dir()] == []
    assert Path("slurm/logs").is_dir()


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

    script = call("--cluster", "./site.toml", *options, "-o", "-").stdout

    assert interpreter(script) == expected


def test_the_only_run_is_the_one_that_a_script_works_on() -> None:
    run = ToyRun(Path("runs/it's one"))

    result = call("--nodes", "2")

    assert result.stdout == f"{DEFAULT}\n"
    assert result.stderr.splitlines() == [
        "note: the script works on runs/it's one",
        "requests 2 nodes for 01:00:00: up to 2.00 node-hours",
    ]
    assert "--run=runs/it's one" in batch_words(DEFAULT.read_text())
    moved = call("--sbatch", "chdir=/tmp", "-o", "-")
    assert f"--run={run.root.absolute()}" in batch_words(moved.stdout)


@pytest.mark.parametrize(
    ("content", "message"), [("edited", "was edited since"), ("foreign", "is not ours")]
)
def test_render_overwrites_an_edited_or_foreign_file_only_with_force(
    content: str, message: str
) -> None:
    call()
    mine = DEFAULT.read_text() + "echo mine\n" if content == "edited" else "echo mine\n"
    DEFAULT.write_text(mine)

    error = refused("--nodes", "2")

    assert message in error.message
    assert "--force" in error.hint
    assert DEFAULT.read_text() == mine
    assert call("--nodes", "2", "--force").exit_code == 0
    assert "echo mine" not in DEFAULT.read_text()


def test_render_makes_the_directories_of_its_own_output_and_of_the_logs(elsewhere: Path) -> None:
    result = call("--output", "a b/u/%u-%x-%j.log", "--time", "90", "-o", "out/my.sbatch")

    assert result.stdout == "out/my.sbatch\n"
    script = Path("out/my.sbatch").read_text()
    assert '#SBATCH --output="a b/u/%u-%x-%j.log"\n' in script
    assert "#SBATCH --time=01:30:00\n" in script
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

    again = call("-o", "-", *command_of(example)).stdout

    assert read_header(again, name).request == read_header(example, name).request
    whole = {site: str(tmp_path / site) for site in sites}
    expected = [whole.get(word, word) for word in command_of(example)]
    assert command_of(again) == expected


def command_of(script: str) -> list[str]:
    """The arguments of 'hpctk render' that a header tells."""
    lines = script[script.index("#   hpctk render ") :].replace("\\\n#", " ")
    return shlex.split(lines.splitlines()[0].removeprefix("#"))[2:]


def test_every_field_has_an_option_and_every_option_a_field() -> None:
    named = {option.name.partition("/")[0] for group in PANELS.values() for option in group}

    known = {field.name for field in fields(ScriptSpec)}
    passed = {name.replace("-", "_") for name in FIELDS}
    assert not named & passed
    # Some set a variable of env.
    other = {"cluster", "module", "monitor"}
    assert (named | passed) - other == known - {"modules", "command"}


def test_the_help_shows_about_twenty_options() -> None:
    shown = [option for group in PANELS.values() for option in group if not option.hidden]

    assert len(shown) < 26
    assert all(len(option.help) <= 60 for option in shown)


def test_render_warns_of_a_directory_from_which_the_site_takes_no_jobs(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(elsewhere))

    result = call("--cluster", "killarney", "--account", "aip-x", "-o", "-")

    assert "note: killarney takes no jobs from below ~" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "0"), "--nodes: 0 is not accepted"),
        (("--job-name", "a\n#SBATCH --evil"), "--job-name: 'a.n#SBATCH --evil' is not accepted"),
        (("--env", "A"), "--env: 'A' has no '='"),
        (("--gpus-per-node", "l40s"), "--gpus-per-node: 'l40s' is not a number of GPUs"),
        (("--gpus-per-node", ":4"), "--gpus-per-node: ':4' is not a number of GPUs"),
        (("--sbatch", "ntasks=x"), "--sbatch ntasks: 'x' is not accepted"),
        (("--sbatch", "comment"), "--sbatch: 'comment' needs a value"),
        (("work-queue", "--", "python"), "the template work-queue cannot run"),
    ],
)
def test_render_refuses_and_writes_nothing(
    elsewhere: Path, arguments: tuple[str, ...], message: str
) -> None:
    error = refused(*arguments)

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
    error = refused(*words)

    assert error.message == f"no such option: {words[0].partition('=')[0]}"
    assert (error.hint, error.exit_code) == (f"write --sbatch {hint}", 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (" --nodes 2 ", " --nodez 2 ", "has an unknown option '--nodez'"),
        ("render work-queue --cluster", "render --cluster", "request in its header was edited"),
        ("#   hpctk render", "#   render", "not a script that 'hpctk render' wrote"),
    ],
)
def test_a_request_that_cannot_be_read_is_refused(old: str, new: str, message: str) -> None:
    call("--nodes", "2")
    DEFAULT.write_text(DEFAULT.read_text().replace(old, new), encoding="utf-8")

    assert message in refused("--from", str(DEFAULT)).message
    assert "nowhere.sbatch: cannot be read" in refused("--from", "nowhere.sbatch").message


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


SITE = """
max_walltime = "2-00:00:00"
gpus_per_node = 8
cpus_per_node = 64
mem_per_node = "480G"
container_runtime = "apptainer"
max_array_size = 1001
"""
MASKS = "mask_cpu:fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,fe00000000,fe0000000000"
IMAGE = "docker:nersc/pytorch:24.08"
GRID = "m=(a b); t=(x y z); i=$SLURM_ARRAY_TASK_ID; exec python eval.py ${m[i / 3]} ${t[i % 3]}"

TRAP = {"signal": "B:SIGUSR1@120", "requeue": "", "time": "04:00:00", "open-mode": "append"}
MASKED = {"nodes": "4", "ntasks-per-node": "8", "gpus-per-node": "8", "cpus-per-task": "8"}
SHIFTER = f"command --plain --gpus-per-node 4 --sbatch image={IMAGE} --sbatch module=gpu,nccl"
NAMED_LOG = "slurm/logs/eval___layer_12__mean-bb325c96-%j.out"
NAMED = {"job-name": "eval / layer 12: mean", "output": NAMED_LOG}

MOVED: dict[str, tuple[str, list[str], dict[str, str], list[str]]] = {
    # name: (options of the command, its program, options of the script, parts of its last command)
    "a task for each GPU, with masks, in a container": (
        f"command --nodes 4 --gpus-per-node 8 --cpu-bind {MASKS} --container lumi.sif",
        ["python", "train.py"],
        MASKED,
        ["--apptainer=lumi.sif", f"--srun=--cpu-bind={MASKS}", "python train.py"],
    ),
    "shifter with image and modules": (
        SHIFTER,
        ["shifter", "python", "train.py"],
        {"image": IMAGE, "module": "gpu,nccl", "ntasks-per-node": "4"},
        ["shifter python train.py"],
    ),
    "requeue by a trap on USR1": (
        "train-single-gpu --time 4h --sbatch signal=B:SIGUSR1@120",
        ["train.py"],
        # hpctk requeues when the program, which gets the signal, exits with 75.
        TRAP,
        ["batch train", "launch", "train.py"],
    ),
    "an array of 844 tasks, 12 at once": (
        "command --plain --array 0-843%12",
        ["bash", "-c", GRID],
        {"array": "0-843%12"},
        [f"'{GRID}'"],
    ),
    "--wrap with an account and a hint": (
        "command --plain --account x@v100 --sbatch hint=nomultithread",
        ["python", "x.py"],
        {"account": "x@v100", "hint": "nomultithread"},
        ["python x.py"],
    ),
    "a job name with blanks and slashes": (
        "command --plain --job-name 'eval / layer 12: mean'",
        ["python", "x.py"],
        NAMED,
        ["python x.py"],
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_script_of_a_guide_is_rendered(tmp_path: Path, name: str) -> None:
    words, program, expected, command = MOVED[name]
    (tmp_path / "g.toml").write_text(SITE, encoding="utf-8")
    site = ("--cluster", tmp_path / "g.toml")
    done = call(*site, "-o", "-", *shlex.split(words), "--", *program)
    assert done.exit_code == 0, done.exception

    options = script_options(done.stdout)
    assert {key: options.get(key) for key in expected} == expected
    last = done.stdout.rpartition("\n\n")[2].replace(" \\\n  ", " ")
    assert [word for word in command if word not in last] == []
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
