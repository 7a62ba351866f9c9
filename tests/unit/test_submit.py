"""'hpctk submit': what is checked, kept, sent and printed, with a stand-in for sbatch."""

from __future__ import annotations

import json
import shlex
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.queue.control import HealthNotice, give_health_notice
from hpc_toolkit.submit.jobs import read_jobs
from hpc_toolkit.submit.keeping import CANCELLED
from tests.fakeslurm import Programs, pending_line
from tests.toyrun import ToyRun
from tests.unit import jobcommands

pytestmark = pytest.mark.usefixtures("elsewhere")

# Counts its jobs from 101, says what a site's wrapper says, and keeps what it was called with.
SBATCH = """\
n=$(( $(cat "$0.count" 2>/dev/null || echo 100) + 1 )); echo $n > "$0.count"
echo "$*" >> "$0.calls"
echo "sbatch: lua: welcome" >&2; echo "Hello 2026"; echo "$n"
"""


@pytest.fixture
def programs(programs: Programs) -> Programs:
    programs.add("sbatch", SBATCH)
    return programs


@pytest.fixture
def run(elsewhere: Path) -> ToyRun:
    (elsewhere / "runs").mkdir()
    return ToyRun(Path("runs/a"))


call = partial(jobcommands.call, "submit")
refused = partial(jobcommands.refused, "submit")


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
        (("--dependency", "afterany"), "write afterok:JOB"),
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


def failing_node(
    run: ToyRun, name: str, host: str, at: float, explained: str = "node failure"
) -> None:
    """A worker that died on ``host``."""
    dead = run.worker(name, host=host, job="7", at=at)
    dead.claim(run.unit_name(0))
    heir = run.worker(f"heir-{name}")
    heir.claim(run.unit_name(0), 2)
    heir.death(item=0, generation=1, worker=name, host=host, explained=explained)


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


def cancelling(programs: Programs, run: ToyRun) -> None:
    """Let 'hpctk cancel' end the chain while sbatch accepts a job of it."""
    (record,) = run.paths.jobs.glob("keep-*.json")
    ended = programs.root / "ended.json"
    ended.write_text(json.dumps({**json.loads(record.read_text()), "ended": CANCELLED}))
    programs.add("sbatch", f"cat {ended} > {record.absolute()}\n{SBATCH}")


def test_a_job_that_is_accepted_while_cancel_ends_its_chain_is_cancelled(
    programs: Programs, run: ToyRun
) -> None:
    programs.answer("squeue", "")
    programs.answer("scancel", "")
    words = ("keep", "runs/a", "--jobs", "1", "--once")
    jobcommands.call(*words)
    assert programs.calls("scancel") == []

    cancelling(programs, run)
    result = jobcommands.call(*words)

    assert f"no more jobs are sent: {CANCELLED}" in result.output
    assert programs.calls("scancel") == ["102"]


def test_cancel_takes_the_jobs_that_were_sent_while_it_looked(
    programs: Programs, elsewhere: Path
) -> None:
    programs.answer("squeue", "")
    programs.answer("scancel", "")
    ToyRun(elsewhere / "b", 4, unit=1)
    jobcommands.call("keep", "b", "--jobs", "2", "--once")
    first, both = pending_line("101"), f"{pending_line('101')}\n{pending_line('102')}"
    later = f"[ -e $0.first ] && {{ cat <<'E'\n{both}\nE\n}} || cat <<'E'\n{first}\nE\n"
    programs.add("squeue", f"{later}echo > $0.first")

    result = jobcommands.call("cancel", "b", "--yes")

    assert result.stdout.split() == ["101", "102"]
    assert programs.calls("scancel") == ["101 102"]
