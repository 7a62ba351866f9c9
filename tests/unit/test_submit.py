"""'hpctk submit': what is checked, kept, sent and printed, with a stand-in for sbatch."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpc_toolkit.cli import submit as submit_commands
from hpc_toolkit.cli.help import Commands
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.queue.control import HealthNotice, give_health_notice
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.client import SlurmError
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import ScriptSpec
from hpc_toolkit.submit.jobs import RunJob, read_jobs, record_job
from tests.fakeslurm import Programs, pending_line
from tests.toyrun import ToyRun, empty_campaign

# Counts its jobs from 101, says what a site's wrapper says, and keeps what it was called with.
SBATCH = """\
n=$(( $(cat "$0.count" 2>/dev/null || echo 100) + 1 )); echo $n > "$0.count"
echo "$*" >> "$0.calls"
echo "sbatch: lua: welcome" >&2; echo "Hello 2026"; echo "$n"
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run below an empty directory, with no cluster recognized."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HPCTK_CLUSTER", "generic")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HPCTK_RUN", raising=False)
    return here


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    folder = tmp_path / "bin"
    folder.mkdir()
    found = Programs(folder, monkeypatch)
    found.add("sbatch", SBATCH)
    return found


@pytest.fixture
def run(elsewhere: Path) -> ToyRun:
    (elsewhere / "runs").mkdir()
    return ToyRun(Path("runs/a"))


def call(*arguments: str, **settings: Any) -> Result:
    app = Commands(help="")
    submit_commands.register(app)
    return CliRunner().invoke(app, ["submit", *arguments], **settings)


def refused(*arguments: str) -> HpcToolkitError:
    error = call(*arguments).exception
    assert isinstance(error, HpcToolkitError), repr(error)
    return error


def sent(programs: Programs) -> list[list[str]]:
    """The words of each call, less the name and the comment, which every submission gives."""
    calls = [shlex.split(line) for line in programs.calls("sbatch")]
    common = ("--job-name=", "--comment=")
    return [[word for word in words if not word.startswith(common)] for words in calls]


def test_submit_prints_the_id_alone_and_notes_the_job(run: ToyRun, programs: Programs) -> None:
    result = call("--nodes", "2", "--run", "runs/a")

    assert (result.exit_code, result.stdout) == (0, "101\n"), repr(result.exception)
    ((parsable, script),) = sent(programs)
    assert parsable == "--parsable"
    assert Path(script).parent == run.paths.jobs.absolute()
    assert "#SBATCH --nodes=2\n" in Path(script).read_text()
    assert Path("slurm/logs").is_dir()
    assert not list(Path("slurm").glob("*.sbatch"))
    (job,) = read_jobs(run.paths)
    assert (job.job, job.name, job.array, job.excluded) == ("101", "work-queue", None, ())
    assert job.script == f"jobs/{Path(script).name}"
    assert job.argv == ("sbatch", "--parsable", "--job-name=work-queue", script)
    assert (job.cwd, job.log) == (str(Path.cwd()), "slurm/logs/%x-%j.out")
    assert abs(job.submitted - time.time()) < 60


def test_without_a_run_nothing_is_submitted(programs: Programs) -> None:
    assert "no run is named" in refused().message
    assert "is not a run" in refused("--run", "runs/missing").message
    assert sent(programs) == []


def test_a_dry_run_shows_all_and_leaves_nothing(run: ToyRun, programs: Programs) -> None:
    programs.add("sbatch", 'echo "$*" >> "$0.calls"; echo "sbatch: Job 5 to start at X" >&2')

    result = call("--nodes", "2", "--dry-run")

    assert result.stdout.startswith("#!/bin/bash\n")
    assert "#SBATCH --nodes=2\n" in result.stdout
    copy = next(word for word in result.stderr.split() if word.endswith(".sbatch"))
    assert f"would run: sbatch --parsable --job-name=work-queue {copy}\n" in result.stderr
    assert "Slurm: to start at X\n" in result.stderr
    ((test_only, *_),) = sent(programs)
    assert test_only == "--test-only"
    assert not run.paths.jobs.exists()
    assert not Path("slurm").exists()

    programs.add("sbatch", SBATCH)
    call("--nodes", "2")
    assert sent(programs)[-1] == ["--parsable", copy]
    assert Path(copy).read_text() == result.stdout


def test_a_campaign_whose_template_was_forgotten_is_refused(programs: Programs) -> None:
    empty_campaign(Path("toy"))

    error = refused("--run", "toy")

    assert error.message == "toy is a campaign; name the template"
    assert error.hint == "the template campaign searches; work-queue only adds workers"
    assert programs.calls("sbatch") == []


def test_a_chain_is_jobs_that_wait_for_each_other(run: ToyRun, programs: Programs) -> None:
    assert call("--jobs", "3", "--dependency", "afterany").stdout == "101\n102\n103\n"

    options = [words[1:-1] for words in sent(programs)]
    assert options == [[], ["--dependency=afterany:101"], ["--dependency=afterany:102"]]
    assert [job.job for job in read_jobs(run.paths)] == ["101", "102", "103"]


def test_an_array_beyond_slurms_limit_is_split(run: ToyRun, programs: Programs) -> None:
    Path("small.toml").write_text("max_array_size = 100\n[defaults]\ntime = '5'\n")

    result = call("array", "--array", "0-249%9", "--cluster", "small.toml")

    assert result.stdout == "101\n102\n103\n"
    assert "sent as 3 arrays, since an index is at most 99 here, and % holds" in result.stderr
    scripts = [Path(words[-1]).read_text() for words in sent(programs)]
    assert [line for text in scripts for line in text.splitlines() if "--array=" in line] == [
        "#SBATCH --array=0-99%9",
        "#SBATCH --array=0-99%9",
        "#SBATCH --array=0-49%9",
    ]
    assert [job.array for job in read_jobs(run.paths)] == ["0-99%9", "0-99%9", "0-49%9"]


def test_a_complete_run_is_refused_unless_forced(run: ToyRun, programs: Programs) -> None:
    worker = run.worker("w")
    worker.claim(run.unit_name(0))
    for item in range(4):
        worker.attempt(item)

    assert refused().message == "runs/a is complete: no items are left"
    assert sent(programs) == []
    assert call("--force").stdout == "101\n"


def test_a_run_that_others_could_change_is_refused(run: ToyRun, programs: Programs) -> None:
    run.root.chmod(0o777)

    assert "world-writable" in refused().message
    assert sent(programs) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--job-name=a\nb",), "--job-name: "),
        (("--job-name=$(reboot)",), "--job-name: "),
        (("--job-name=--x",), "--job-name: "),
        (("--dependency", "afterany"), "write afterany:JOB"),
        (("array", "--array", "0-9", "--jobs", "2"), "--jobs and --array exclude each other"),
    ],
)
def test_a_request_that_cannot_be_sent_is_refused_before_anything_is_written(
    run: ToyRun, programs: Programs, words: tuple[str, ...], said: str
) -> None:
    error = refused(*words)

    assert any(text.startswith(said) for text in (error.message, error.hint))
    assert sent(programs) == []
    assert not run.paths.jobs.exists()


def test_a_job_of_which_sbatch_printed_the_id_is_not_sent_twice(
    run: ToyRun, programs: Programs
) -> None:
    failing_node(run, "w", "n3", time.time() - 60)
    programs.answer("sbatch", "102", code=1, stderr="sbatch: error: x")

    result = call()

    assert isinstance(result.exception, SlurmError)
    assert "it printed the job id 102" in result.exception.hint
    assert (
        "note: 0 of 1 were taken; 'squeue --me' shows whether one more was accepted"
        in result.stderr
    )
    assert len(sent(programs)) == 1


def test_inside_a_job_its_variables_stay_out(
    run: ToyRun, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add("sbatch", 'env > "$0.env"; echo 5')
    for name in ("SLURM_JOB_ID", "SLURM_CPU_BIND", "SBATCH_ACCOUNT", "PMI_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")

    result = call()

    assert (result.stdout, "SBATCH_ACCOUNT" in result.stderr) == ("5\n", False)
    lines = (programs.root / "sbatch.env").read_text().splitlines()
    names = {line.partition("=")[0] for line in lines}
    assert {name for name in names if name.startswith(("SLURM", "SBATCH", "PMI"))} == {"SLURM_CONF"}
    assert read_jobs(run.paths)


def failing_node(
    run: ToyRun, name: str, host: str, at: float, explained: str = "node failure"
) -> None:
    """A worker that died on ``host``."""
    dead = run.worker(name, host=host, job="7", at=at)
    dead.claim(run.unit_name(0))
    heir = run.worker(f"heir-{name}")
    heir.claim(run.unit_name(0), 2)
    heir.death(item=0, generation=1, worker=name, host=host, explained=explained)


def test_a_node_that_failed_is_left_out_and_that_is_said(run: ToyRun, programs: Programs) -> None:
    failing_node(run, "w", "n3", time.time() - 60)

    result = call("--nodes", "2", "--sbatch", "exclude=n7")

    assert result.stdout == "101\n"
    note = "n3 is left out (--no-exclude-failed takes it): it failed under worker w of job 7"
    assert f"note: {note}\n" in result.stderr
    ((_, option, _),) = sent(programs)
    assert option == "--exclude=n7,n3"
    assert read_jobs(run.paths)[0].excluded == ("n3",)


@pytest.mark.parametrize(
    ("age_s", "explained", "words"),
    [
        pytest.param(60, "node failure", ("--no-exclude-failed",), id="on request"),
        pytest.param(60, "node failure", ("--sbatch", "nodelist=n3"), id="named in the request"),
        pytest.param(90_000, "node failure", (), id="failed on another day"),
        pytest.param(60, "", (), id="death not explained"),
        pytest.param(60, "preempted", (), id="death explained by preemption"),
    ],
)
def test_a_node_whose_failure_says_nothing_about_the_next_job_is_not_left_out(
    run: ToyRun, programs: Programs, age_s: float, explained: str, words: tuple[str, ...]
) -> None:
    failing_node(run, "w", "n3", time.time() - age_s, explained)

    assert "left out" not in call(*words).stderr
    assert len(sent(programs)[0]) == 2


def sick_notice(run: ToyRun, at: float, *, job: str | None = "7", **changes: Any) -> None:
    """Workers of host n3 left because everything failed there."""
    run.worker("w", host="n3", job=job)
    reason = "host n3 is sick: 8 items in a row failed there, and others finished them"
    fields = {"host": "n3", "worker": "w", "whole": True, "sure": True, "reason": reason}
    give_health_notice(run.paths, HealthNotice(**{**fields, "at": at, **changes}))


def test_a_sick_node_is_left_out_with_the_reason(run: ToyRun, programs: Programs) -> None:
    sick_notice(run, time.time() - 60)

    result = call()

    why = "8 items in a row failed there, and others finished them (job 7)"
    assert f"note: n3 is left out (--no-exclude-failed takes it): {why}\n" in result.stderr
    assert sent(programs)[0][1] == "--exclude=n3"
    call("--no-exclude-failed")
    assert len(sent(programs)[1]) == 2


def test_the_node_of_a_job_that_slurm_lost_is_left_out(run: ToyRun, programs: Programs) -> None:
    ended = str(int(time.time()) - 60)
    line = pending_line("7", State="NODE_FAIL", NodeList="n5", EndTime=ended)
    programs.answer("squeue", line)
    record_job(run.paths, RunJob(job="7", name="work-queue"))

    result = call()

    assert "note: n5 is left out" in result.stderr
    assert "job 7 ended with NODE_FAIL" in result.stderr
    assert sent(programs)[0][1] == "--exclude=n5"


def test_a_node_that_failed_under_an_earlier_start_is_known_by_the_accounting(
    run: ToyRun, programs: Programs
) -> None:
    at = int(time.time()) - 60
    rest = "me|x|work-queue"
    programs.answer(
        "sacct",
        f"7|7|NODE_FAIL|1:0|{at - 50}|{at - 40}|{at - 30}|n5|{rest}\n"
        f"7|7|COMPLETED|0:0|{at - 30}|{at - 20}|{at}|n6|{rest}",
    )
    programs.answer("squeue", "")
    record_job(run.paths, RunJob(job="7", name="work-queue"))

    assert "job 7 ended with NODE_FAIL" in call().stderr
    assert sent(programs)[0][1] == "--exclude=n5"


def test_a_script_is_sent_as_it_is(run: ToyRun, programs: Programs) -> None:
    text = "#!/bin/bash\n#SBATCH -J mine -o out/%j.log\n#SBATCH --nodes=2\necho $1\n"
    Path("own.sbatch").write_text(text)

    result = call("own.sbatch", "--run", "runs/a", "--dependency", "afterok:5")

    assert result.stdout == "101\n"
    ((_, option, script, argument),) = sent(programs)
    assert (option, argument) == ("--dependency=afterok:5", "runs/a")
    assert Path(script).read_text() == text
    assert Path("out").is_dir()
    (job,) = read_jobs(run.paths)
    assert (job.name, job.log) == ("mine", "out/%j.log")


@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        # Slurm 23.02 to 26.05, where no job of that number is known.
        ("Job dependency problem", "Slurm 23.02 and newer refuse to wait for a job that ended"),
        ("Invalid account or account/partition combination specified", "choose one with --account"),
        ("Invalid job array specification", "must be less than MaxArraySize"),
        ("Memory required by task is not available", "request less with --mem"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "less with --time"),
    ],
)
def test_a_refusal_of_slurm_is_explained(
    run: ToyRun, programs: Programs, refusal: str, remedy: str
) -> None:
    said = f"sbatch: error: Batch job submission failed: {refusal}"
    programs.add("sbatch", f'echo "{said}" >&2; exit 1')

    error = refused("--dependency", "afterok:5")

    assert error.message.endswith(f": {refusal}")
    assert remedy in error.hint
    assert "; the command was: sbatch " in error.hint


@pytest.mark.parametrize(
    ("text", "excluded"),
    [
        ("-x n7", ["--exclude=n7,n3"]),
        ("--exclude=n7", ["--exclude=n7,n3"]),
        ("-w n3", []),
        ("-F hosts", []),
    ],
)
def test_a_script_keeps_the_nodes_that_it_names_or_leaves_out(
    run: ToyRun, programs: Programs, text: str, excluded: list[str]
) -> None:
    failing_node(run, "w", "n3", time.time() - 60)
    Path("own.sbatch").write_text(f"#!/bin/bash\n#SBATCH {text}\ntrue\n")

    call("own.sbatch", "--run", "runs/a")

    assert [word for word in sent(programs)[0] if word.startswith("--exclude")] == excluded


@pytest.mark.parametrize("words", [(), ("own.sbatch", "--run", "runs/a")])
def test_nothing_is_sent_from_a_forbidden_directory(
    run: ToyRun,
    programs: Programs,
    elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    text = f"forbidden_submit_dirs = ['{elsewhere.parent}']\n[defaults]\ntime = '5'\n"
    Path("strict.toml").write_text(text)
    monkeypatch.setenv("HPCTK_CLUSTER", "./strict.toml")
    Path("own.sbatch").write_text("#!/bin/bash\ntrue\n")

    error = refused(*words)

    assert f"takes no jobs from below {elsewhere.parent}" in error.message
    assert "strict.toml: forbidden_submit_dirs" in error.message
    assert sent(programs) == []
    assert read_jobs(run.paths) == []


def test_a_script_whose_request_was_edited_names_no_run(run: ToyRun, programs: Programs) -> None:
    shown = call("--dry-run").stdout
    programs.add("sbatch", "echo 5")
    text = shown.replace("--run runs/a ", "--run runs/b --nodes x ")
    Path("own.sbatch").write_text(text)

    error = refused("own.sbatch")

    assert error.message == "own.sbatch: the request in its header was edited"
    assert "--run" in error.hint
    assert not read_jobs(run.paths)
    assert call("own.sbatch", "--run", "runs/a").stdout == "5\n"


def test_a_rendered_script_without_a_run_gets_the_only_run_as_its_argument(
    programs: Programs,
) -> None:
    script = Path("own.sbatch").absolute()
    script.write_text(render_script(ScriptSpec(python="/x/python"), load_cluster("generic")))

    assert refused("own.sbatch").message == "no run is named, and ./runs contains: none"
    assert sent(programs) == []

    Path("runs").mkdir()
    run = ToyRun(Path("runs/a"))
    assert call("own.sbatch").stdout == "101\n"
    assert [words[-1] for words in sent(programs)] == [str(run.root)]


@pytest.mark.parametrize(
    ("words", "directory"),
    [
        (("--job-name", "gpt"), "runs/gpt"),
        (("--run-dir", "runs/mine"), "runs/mine"),
        (("--run-dir", "mine", "--sbatch", "chdir={here}/else"), "else/mine"),
    ],
)
def test_a_training_notes_its_job_in_its_directory(
    programs: Programs, words: tuple[str, ...], directory: str
) -> None:
    given = [word.format(here=Path.cwd()) for word in words]

    result = call("train-single-gpu", "--time", "1:00:00", *given, "--", "train.py")

    assert result.stdout == "101\n", repr(result.exception)
    (job,) = read_jobs(RunPaths(Path(directory)))
    ((_, script),) = sent(programs)
    assert (job.job, Path(script)) == ("101", Path.cwd() / directory / job.script)
    assert "train.py" in Path(script).read_text()
