"""The directory of a training: its jobs, last output and last checkpoint, as the commands show."""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.submit.jobs import RunJob, own_login, record_job
from tests.fakeslurm import Programs, pending_line
from tests.unit.jobcommands import call, refused

JOB = RunJob(job="7", name="gpt", log="slurm/%x-%j.out", submitted=100.0, by=own_login())


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


def note(root: Path, job: RunJob = JOB) -> None:
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
