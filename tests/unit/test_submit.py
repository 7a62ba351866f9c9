"""'hpctk submit': what is sent and noted, and what status and cancel make of such jobs."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hpc_toolkit.queue.control import HealthNotice, give_health_notice
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.records import JobRecord
from hpc_toolkit.submit import RunJob, known_jobs, own_login, read_jobs, record_job
from hpc_toolkit.submit.keeping import CANCELLED
from hpc_toolkit.submit.standstill import is_stuck, why_waiting
from tests.fakeslurm import Programs, pending_line
from tests.toyrun import ToyRun, tree
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
    run.worker("w").work(run.unit_name(0), i0="done", i1="done", i2="done", i3="done")

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


def test_a_sick_node_is_left_out_with_the_reason(run: ToyRun, programs: Programs) -> None:
    run.worker("w", host="n3", job="7")
    why = "8 items in a row failed there, and others finished them"
    notice = HealthNotice(
        host="n3",
        worker="w",
        whole=True,
        sure=True,
        reason=f"host n3 is sick: {why}",
        at=time.time() - 60,
    )
    give_health_notice(run.paths, notice)

    result = call()

    said = f"note: n3 is left out (--no-exclude-failed takes it): {why} (job 7)\n"
    assert said in result.stderr
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


def test_a_job_that_is_accepted_while_cancel_ends_its_chain_is_cancelled(
    programs: Programs, run: ToyRun
) -> None:
    programs.answer("squeue", "")
    programs.answer("scancel", "")
    words = ("keep", "runs/a", "--jobs", "1", "--once")
    jobcommands.call(*words)
    assert programs.calls("scancel") == []

    # As 'hpctk cancel' ends the chain while sbatch accepts a job of it.
    (record,) = run.paths.jobs.glob("keep-*.json")
    ended = programs.root / "ended.json"
    ended.write_text(json.dumps({**json.loads(record.read_text()), "ended": CANCELLED}))
    programs.add("sbatch", f"cat {ended} > {record.absolute()}\n{SBATCH}")
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


JOB = RunJob(
    job="7",
    name="work-queue",
    script="jobs/work-queue-0.sbatch",
    argv=("sbatch", "--parsable", "/x y"),
    cwd="/scratch",
    log="logs/%x-%j.out",
    excluded=("n3",),
    submitted=100.0,
    by=own_login(),
)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"format": 1}',
        '{"job": "--all"}',
        '{"job": 7}',
        '{"job": "7", "cluster": "a b"}',
        '{"job": "7", "submitted": "yesterday"}',
        '{"job": "7", "argv": 5}',
    ],
)
def test_a_job_is_read_as_it_was_noted_and_a_damaged_note_is_left_out(
    toy: ToyRun, content: str
) -> None:
    record_job(toy.paths, JOB)
    (toy.paths.jobs / "8.json").write_text(content)

    assert read_jobs(toy.paths) == [JOB]
    assert json.loads((toy.root / "jobs/7.json").read_text())["format"] == 1


def test_workers_name_the_jobs_that_were_submitted_by_hand(toy: ToyRun) -> None:
    record_job(toy.paths, JOB)
    toy.worker("a", job="7", started=150.0)
    toy.worker("b", job="9", started=50.0)
    toy.worker("c", job="9", started=60.0)
    toy.worker("d", job=None)
    toy.worker("e", job="; rm -rf /")

    assert [(job.job, job.submitted) for job in known_jobs(toy.paths)] == [
        ("9", 50.0),
        ("7", 100.0),
    ]


def test_i7_status_shows_jobs_and_changes_nothing_below_the_run(
    toy: ToyRun, programs: Programs
) -> None:
    programs.answer("squeue", pending_line(StartTime=str(int(time.time()) + 60)))
    record_job(toy.paths, JOB)
    before = tree(toy.root)

    result = jobcommands.call("status", str(toy.root))

    assert "  job 7    PENDING (Priority), starts about " in result.stdout
    assert "no worker is alive, and job 7 waits: other jobs have a higher priority" in result.stdout
    assert len(programs.calls("squeue")) == 1
    assert tree(toy.root) == before


@pytest.mark.parametrize(
    ("jobs", "why"),
    [
        (
            [{"State": "PREEMPTED", "Reason": "None"}],
            "no worker is alive: job 7 was preempted and does not restart; 'hpctk submit'",
        ),
        ([{"State": "SUSPENDED", "Reason": "None"}], "Slurm has suspended job 7: it continues"),
        ([{"State": "RUNNING", "NodeList": "n1"}], "'hpctk logs --job 7' tells why not"),
        (  # the job that can start by itself is the better hope
            [{"Reason": "JobHeldUser"}, {"Reason": "Resources"}],
            "job 8 waits: the nodes that it needs are busy",
        ),
    ],
)
def test_status_says_what_the_jobs_show_of_a_standstill(
    toy: ToyRun, programs: Programs, jobs: list[dict[str, str]], why: str
) -> None:
    lines = [pending_line(str(number), **cells) for number, cells in enumerate(jobs, 7)]
    programs.answer("squeue", "\n".join(lines))
    for number in range(7, 7 + len(jobs)):
        record_job(toy.paths, replace(JOB, job=str(number)))

    assert why in jobcommands.call("status", str(toy.root)).stdout


def test_the_json_of_a_job_has_what_the_contract_says(toy: ToyRun, programs: Programs) -> None:
    programs.answer("squeue", pending_line(RestartCnt="2", EndTime="N/A"))
    record_job(toy.paths, JOB)

    (job,) = json.loads(jobcommands.call("status", str(toy.root), "--json").stdout)["jobs"]

    waits = {"id": "7", "state": "PENDING", "reason": "Priority", "nodes": "", "restarts": 2}
    assert job == {**waits, "start": None, "end": None}


@pytest.mark.parametrize("array", ["0-3", None])  # $SBATCH_ARRAY_INX is not in the record
def test_a_submitted_array_stands_for_its_elements(
    toy: ToyRun, programs: Programs, array: str | None
) -> None:
    record_job(toy.paths, replace(JOB, array=array))
    for worker, job in [("a", "7_1"), ("b", "7_3"), ("c", "8_1")]:
        toy.worker(worker, job=job, started=150.0)
    programs.answer("squeue", pending_line("7", State="RUNNING"))

    lines = jobcommands.call("status", str(toy.root)).stdout.splitlines()

    assert [line.split()[1] for line in lines if line.startswith("  job ")] == ["7", "8_1"]


@pytest.mark.parametrize(
    "cells", [{"Name": "other"}, {"UserName": "eve"}, {"Cluster": "beta"}], ids=str
)
def test_the_job_of_another_with_the_same_id_is_unknown(
    toy: ToyRun, programs: Programs, cells: dict[str, str]
) -> None:
    line = {"Name": "mine", "Cluster": "alpha", "State": "RUNNING", "NodeList": "n1", **cells}
    programs.answer("squeue", pending_line("9", **line))
    toy.worker("a", job="9", job_name="mine", cluster="alpha")
    if "UserName" in cells:
        record_job(toy.paths, replace(JOB, job="9", name="mine"))

    result = jobcommands.call("status", str(toy.root))

    assert "  job 9    unknown (another job has this id, or it was renamed)\n" in result.stdout


@pytest.mark.parametrize(
    ("cells", "log", "told"),
    [
        (
            {"State": "FAILED", "exit_code": "256"},
            "start\n\n50%\r99%\nImportError\n\x1b[31mred\n",
            "FAILED with exit code 1; its log ends: 99% | ImportError | \\x1b[31mred; see 'hpctk",
        ),
        ({"State": "TIMEOUT"}, "", "job 7 ended as TIMEOUT; see 'hpctk logs --job 7', then start"),
        ({"State": "CANCELLED"}, None, "job 7 ended as CANCELLED; see 'hpctk logs --job 7'"),
        ({"State": "COMPLETED"}, "done\n", "no worker is alive: start some with 'hpctk work'"),
    ],
)
def test_status_says_how_the_last_job_failed_and_what_it_printed_last(
    toy: ToyRun, programs: Programs, tmp_path: Path, cells: dict[str, str], log: str, told: str
) -> None:
    programs.answer("squeue", pending_line(**cells))
    if log is not None:
        (tmp_path / "work-queue-7.out").write_text(log)
    record_job(toy.paths, replace(JOB, cwd=str(tmp_path), log="%x-%j.out"))

    found = " ".join(jobcommands.call("status", str(toy.root)).stdout.split())

    assert told in found


@pytest.mark.parametrize(
    ("state", "reason", "words", "stuck"),
    [
        ("PENDING", "JobHeldUser", "'scontrol release 7'", True),
        ("PENDING", "DependencyNeverSatisfied", "cancel it", True),
        ("PENDING", "MaxMemPerLimit", "use less --mem", True),
        ("PENDING", "BeginTime", "two minutes", False),
        ("PENDING", "ReqNodeNotAvail,_UnavailableNodes:n[1-4]", "down, drained", False),
        ("PENDING", "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved", "request other", False),
        ("PENDING", "AssocGrpCPUMinutesLimit", "another --account", False),
        ("PENDING", "QOSMaxJobsPerUserLimit", "quality of service", False),
        ("PENDING", "", "has not looked at it", False),
        ("PENDING", "Licenses", "licenses that it needs are in use", False),
        ("PENDING", "Reservation", "its reservation to begin", False),
        ("PENDING", "Prolog", "being prepared", False),
        ("PENDING", "PartitionConfig", "change --partition", True),
        ("PENDING", "BurstBufferStageIn", "burst buffer", False),
        ("PENDING", "QOSMaxWallDurationPerJobLimit", "allows no such job: cancel it", True),
        ("PENDING", "AssocMaxGRESPerNode", "allows no such job: cancel it", True),
        ("PENDING", "QOSMinGRES", "allows no such job: cancel it", True),
        ("PENDING", "NonZeroExitCode", "'hpctk logs --job 7'", False),
        ("PENDING", "JobLaunchFailure", "could not be started", False),
        ("PENDING", "Brand_New_Reason", "Slurm says Brand_New_Reason", False),
        ("REQUEUE_HOLD", "None", "requeued and is held", True),
        ("REQUEUE_HOLD", "JobHoldMaxRequeue", "requeued too often", True),
        ("SPECIAL_EXIT", "", "needs a look", True),
        ("PENDING", "launch_failed_requeued_held", "could not be started", False),
    ],
)
def test_a_reason_becomes_a_sentence_with_a_remedy(
    state: str, reason: str, words: str, stuck: bool
) -> None:
    record = JobRecord(id="7", state=state, reason=reason)

    assert words in why_waiting(record)
    assert "{id}" not in why_waiting(record)
    assert is_stuck(record) is stuck


@pytest.mark.parametrize(
    ("presence", "cells", "why"),
    [
        ({}, {}, "its workers did not note its name"),
        ({"job_name": "mine"}, {"UserName": ""}, "Slurm did not say whose it is"),
        ({"job_name": "mine"}, {"Name": ""}, "Slurm did not say whose it is"),
        (
            {"job_name": "mine"},
            {"Name": "other"},
            "it is called other, not mine; if it was renamed, 'scancel 7' takes it\n",
        ),
        ({"job_name": "mine"}, {"UserName": "eve"}, "it is eve's"),
        (
            {"job_name": "mine", "cluster": "alpha"},
            {"Cluster": "beta"},
            "this is a job of cluster beta, not alpha",
        ),
    ],
)
def test_cancel_leaves_a_job_alone_that_may_be_anothers(
    toy: ToyRun, programs: Programs, presence: dict[str, str], cells: dict[str, str], why: str
) -> None:
    toy.worker("a", job="7", **presence)
    toy.worker("b", job="8", job_name="mine", cluster="alpha")
    told = {"Name": "mine", "Cluster": "alpha"}
    lines = [pending_line("7", **{**told, **cells}), pending_line("8", **told)]
    programs.answer("squeue", "\n".join(lines))
    programs.answer("scancel", "")

    result = jobcommands.call("cancel", str(toy.root), "--yes")

    assert (result.exit_code, result.stdout) == (0, "8\n")
    assert f"job 7 was not cancelled: {why}" in result.stderr
    assert programs.calls("scancel") == ["8"]


@pytest.fixture
def root() -> Path:
    """The directory of a training below an empty directory."""
    root = Path("runs/gpt")
    root.mkdir(parents=True)
    return root


def write(path: Path, text: str, *, age_s: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    at = time.time() - age_s
    os.utime(path, (at, at))


def running(root: Path, programs: Programs, **cells: str) -> None:
    """The job of the training is noted, and Slurm knows it."""
    line = {"Name": "gpt", "State": "RUNNING", "NodeList": "n[1-2]", "Reason": "None", **cells}
    programs.answer("squeue", pending_line("7", **line))
    job = RunJob(job="7", name="gpt", log="slurm/%x-%j.out", submitted=100.0, by=own_login())
    record_job(RunPaths(root), replace(job, cwd=str(Path.cwd())))


def test_status_shows_the_job_the_last_output_and_the_last_checkpoint(
    root: Path, programs: Programs
) -> None:
    running(root, programs, RestartCnt="2", EndTime="N/A")
    launch = root / "logs" / "7.2.0"
    write(root / "logs/7.1.0/rank-0.restart-3.out", "step 9\n", age_s=900)
    write(launch / "rank-0.restart-0.out", "step 1\n", age_s=500)
    write(launch / "rank-0.restart-1.out", "step 20\rstep 21\rstep 22\n\n", age_s=40)
    write(launch / "rank-1.restart-1.err", "warning\n", age_s=80)
    for step in (100, 50):
        write(root / f"checkpoints/step-{step:09d}.pt", "", age_s=200 - step)
    (root / "checkpoints/.step-000000150.pt.1.tmp").touch()

    shown = jobcommands.call("status", "runs/gpt").stdout
    assert re.sub(r"[0-9][0-9.a-z ]* ago", "AGO", shown).splitlines() == [
        "runs/gpt: RUNNING",
        "  job 7       RUNNING on n[1-2], 2 restarts",
        "  restarts    the ranks of the latest launch were restarted once",
        "  output      AGO: step 22",
        "  checkpoint  step 100, AGO: runs/gpt/checkpoints/step-000000100.pt",
    ]


@pytest.mark.parametrize(("state", "code"), [("FAILED", 1), ("COMPLETED", 0), ("RUNNING", 0)])
def test_check_fails_after_a_job_that_did_not_complete(
    root: Path, programs: Programs, state: str, code: int
) -> None:
    running(root, programs, State=state)

    assert jobcommands.call("status", "runs/gpt", "--check").exit_code == code


@pytest.mark.parametrize("words", [("status",), ("logs",), ("cancel", "--yes")])
def test_a_directory_of_neither_kind_is_refused_as_before(
    root: Path, words: tuple[str, ...]
) -> None:
    (root / "logs").mkdir()

    error = jobcommands.refused(*words, "runs/gpt")

    assert error.message == "runs/gpt is not a run: it has no run.json"
