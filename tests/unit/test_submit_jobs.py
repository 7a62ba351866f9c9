"""The jobs of a run and of a training, as status shows and cancel ends them."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.records import JobRecord
from hpc_toolkit.submit.jobs import RunJob, known_jobs, own_login, read_jobs, record_job
from hpc_toolkit.submit.standstill import is_stuck, why_waiting
from tests.fakeslurm import Programs, pending_line
from tests.toyrun import ToyRun, tree
from tests.unit.jobcommands import call, refused

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

    result = call("status", str(toy.root))

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
        (
            [{"State": "SUSPENDED", "Reason": "None"}],
            "Slurm has suspended job 7: it continues when Slurm resumes it",
        ),
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

    assert why in call("status", str(toy.root)).stdout


def test_the_json_of_a_job_has_what_the_contract_says(toy: ToyRun, programs: Programs) -> None:
    programs.answer("squeue", pending_line(RestartCnt="2", EndTime="N/A"))
    record_job(toy.paths, JOB)

    (job,) = json.loads(call("status", str(toy.root), "--json").stdout)["jobs"]

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

    lines = call("status", str(toy.root)).stdout.splitlines()

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

    result = call("status", str(toy.root))

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

    found = " ".join(call("status", str(toy.root)).stdout.split())

    assert told in found


@pytest.mark.parametrize(
    ("state", "reason", "words", "stuck"),
    [
        ("PENDING", "JobHeldUser", "'scontrol release 7'", True),
        ("PENDING", "DependencyNeverSatisfied", "cancel it", True),
        ("PENDING", "MaxMemPerLimit", "use less --mem", True),
        ("PENDING", "BeginTime", "two minutes", False),
        ("PENDING", "ReqNodeNotAvail,_UnavailableNodes:n[1-4]", "down, drained", False),
        (
            "PENDING",
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved",
            "request others",
            False,
        ),
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

    result = call("cancel", str(toy.root), "--yes")

    assert (result.exit_code, result.stdout) == (0, "8\n")
    assert f"job 7 was not cancelled: {why}" in result.stderr
    assert programs.calls("scancel") == ["8"]


TRAINING = RunJob(job="7", name="gpt", log="slurm/%x-%j.out", submitted=100.0, by=own_login())


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a training below an empty directory."""
    monkeypatch.chdir(tmp_path)
    root = Path("runs/gpt")
    root.mkdir(parents=True)
    return root


def write(path: Path, text: str, *, age_s: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    at = time.time() - age_s
    os.utime(path, (at, at))


def status_lines() -> list[str]:
    """The lines of the training's status, without the ages in them."""
    return re.sub(r"[0-9][0-9.a-z ]* ago", "AGO", call("status", "runs/gpt").stdout).splitlines()


def note(root: Path, job: RunJob = TRAINING) -> None:
    record_job(RunPaths(root), RunJob(**{**asdict(job), "cwd": str(Path.cwd())}))


def running(programs: Programs, **cells: str) -> None:
    line = {"Name": "gpt", "State": "RUNNING", "NodeList": "n[1-2]", "Reason": "None", **cells}
    programs.answer("squeue", pending_line("7", **line))


def test_status_shows_the_job_the_last_output_and_the_last_checkpoint(
    root: Path, programs: Programs
) -> None:
    running(programs, RestartCnt="2", EndTime="N/A")
    note(root)
    launch = root / "logs" / "7.2.0"
    write(root / "logs/7.1.0/rank-0.restart-3.out", "step 9\n", age_s=900)
    write(launch / "rank-0.restart-0.out", "step 1\n", age_s=500)
    write(launch / "rank-0.restart-1.out", "step 20\rstep 21\rstep 22\n\n", age_s=40)
    write(launch / "rank-1.restart-1.err", "warning\n", age_s=80)
    for step in (100, 50):
        write(root / f"checkpoints/step-{step:09d}.pt", "", age_s=200 - step)
    (root / "checkpoints/.step-000000150.pt.1.tmp").touch()

    assert status_lines() == [
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
    running(programs, State=state)
    note(root)

    assert call("status", "runs/gpt", "--check").exit_code == code


@pytest.mark.parametrize("words", [("status",), ("logs",), ("cancel", "--yes")])
def test_a_directory_of_neither_kind_is_refused_as_before(
    root: Path, words: tuple[str, ...]
) -> None:
    (root / "logs").mkdir()

    error = refused(*words, "runs/gpt")

    assert error.message == "runs/gpt is not a run: it has no run.json"
