"""The weeks of users in examples/weeks that end on a Slurm."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.test_docs import Shell
from tests.integration.test_weeks import rows, run_week
from tests.slurm.reallab import LabUnderTest

pytestmark = [pytest.mark.slow]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "here").mkdir()
    return Shell(tmp_path / "here", tmp_path)


@pytest.fixture
def own_lab(lab: LabUnderTest, lab_directory: Path, shell: Shell) -> Iterator[Shell]:
    """A shell whose ``hpctk lab up`` makes a lab below a short directory of its own."""
    shell.environ["XDG_STATE_HOME"] = str(lab_directory)
    yield shell
    shell.run("hpctk", "lab", "down")


@pytest.mark.soak  # test_lab.py runs jobs
def test_a_learner_runs_two_jobs_on_a_lab(own_lab: Shell) -> None:
    printed = run_week(own_lab, "learner", COUNT=5)

    squares = [row["value.square"] for row in rows(own_lab.root / "job.csv")]
    assert squares == ["0", "1", "4", "9", "16"]
    assert {"task 0 of 2", "task 1 of 2"} <= set(printed.splitlines())
    assert "best arm        depth=4,lr=0.1  1.0000" in printed


@pytest.mark.soak  # test_training.py has the same events; this is the script at its full size
@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_a_training_goes_on_after_a_killed_rank_and_a_requeue(own_lab: Shell) -> None:
    printed = run_week(own_lab, "training")

    assert (
        "note: exit code 0; 2 ranks, 0 restarts; last checkpoint: step 3000, runs/first/" in printed
    )
    for status in ("runs/here: no job is known", "runs/there: COMPLETED"):
        assert re.search(
            r"checkpoint +step 3000", printed.partition(status)[2].partition("\n---")[0]
        )
    starts = [int(step) for step in re.findall(r"\[rank 0\] first step (\d+) on", printed)]
    # The first launch, the second, after the kill, in the job, and after the requeue.
    assert [step > 1 for step in starts] == [False, False, True, False, True]
    assert "#SBATCH --account=def-me" in printed
