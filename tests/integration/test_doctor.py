"""``hpctk doctor`` as a user starts it: alone, killed, as two tasks of a step, beside a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.integration.realrun import wait_until
from tests.toyrun import ToyRun

if TYPE_CHECKING:
    from pathlib import Path

STEP = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}


def start(*words: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hpc_toolkit", "doctor", *words],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


def test_a_killed_examination_is_cleaned_up_by_the_next_one(tmp_path: Path) -> None:
    first = start(str(tmp_path))
    wait_until(lambda: [*tmp_path.glob(".hpctk-doctor-*/said-other")], "both sides")
    first.kill()
    first.communicate()
    assert os.listdir(tmp_path)

    code, out, _ = ended(start(str(tmp_path), "--json"))

    assert code == 0
    assert "left over" in {finding["check"] for finding in json.loads(out)["findings"]}
    assert os.listdir(tmp_path) == []


def test_an_examination_that_is_asked_to_end_cleans_up_itself(tmp_path: Path) -> None:
    process = start(str(tmp_path))
    wait_until(lambda: [*tmp_path.glob(".hpctk-doctor-*/said-other")], "both sides")

    process.send_signal(signal.SIGTERM)

    assert ended(process)[0] == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == []


def test_two_tasks_of_a_step_examine_together_and_one_reports(tmp_path: Path) -> None:
    tasks = [
        start(str(tmp_path), "--json", **STEP, SLURM_PROCID=str(rank), HPCTK_HOST=f"n{rank}")
        for rank in (1, 0)
    ]

    (other_code, other_out, other_err), (code, out, err) = map(ended, tasks)

    assert (other_code, other_out, other_err) == (0, "", "")
    assert (code, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    assert [side["host"] for side in report["sides"]] == ["n0", "n1"]
    assert report["apart"] is False, "two names of one kernel prove nothing"
    assert os.listdir(tmp_path) == []


def test_an_unsafe_run_exits_with_1_and_says_so_in_its_first_line(tmp_path: Path) -> None:
    toy = ToyRun(tmp_path / "run")
    toy.stage_paths.entry(1).unlink()

    code, out, err = ended(start(str(toy.root)))

    assert (code, err) == (1, "")
    assert out.splitlines()[0] == f"{toy.root}: unsafe"
    assert "log (items)" in out


def test_the_run_is_found_as_by_every_command_that_reads(tmp_path: Path) -> None:
    toy = ToyRun(tmp_path / "run")

    code, out, _ = ended(start("--json", HPCTK_RUN=str(toy.root)))

    assert code == 0
    assert json.loads(out)["directory"] == str(toy.root)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    code, out, err = ended(start(str(tmp_path / "nothing")))

    assert (code, out) == (1, "")
    assert "is not a directory" in err
    assert "hint: name a run" in err
