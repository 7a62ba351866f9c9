"""The tutorials of a lab and of a cluster, and the weeks in examples/weeks that end on a Slurm."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpc_toolkit.run import Run
from tests.documents import REPOSITORY, read_blocks
from tests.integration.realrun import wait_until
from tests.integration.test_docs import Shell, blurred, transcript
from tests.integration.test_weeks import rows, run_week
from tests.slurm.reallab import LabUnderTest

pytestmark = [pytest.mark.slow]

SHOWN = {"init", "new", "crash", "gather", "report", "restore"}
"""Commands of which the page shows all that they print, whenever they run."""


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


@pytest.mark.soak  # test_scenarios.py loses a node as well
def test_a_run_survives_the_loss_of_a_node_as_the_tutorial_says(own_lab: Shell) -> None:
    page = REPOSITORY / "docs/tutorials/lab.md"
    blocks = [block for block in read_blocks(page) if block.language == "console"]

    for command, printed in (pair for block in blocks for pair in transcript(block.text)):
        if "lab crash" in command:
            wait_until(lambda: alive(own_lab) == 8, "8 workers")
        # Each command has a shell of its own.
        found = own_lab.type(f'eval "$(hpctk lab env)"; {command}')
        if SHOWN & set(command.split()):
            assert blurred(found) == blurred(printed), command

    rows = (own_lab.root / "results.csv").read_text().splitlines()
    assert len(rows) == len(set(rows)) == 201
    assert "died" in (own_lab.root / "report.html").read_text()


@pytest.mark.soak
def test_a_user_describes_a_cluster_and_sizes_a_job_as_the_tutorial_says(own_lab: Shell) -> None:
    page = REPOSITORY / "docs/tutorials/cluster.md"
    blocks = [one.text for one in read_blocks(page) if one.language == "sh"][1:]  # 0: installs
    own_lab.environ["XDG_CONFIG_HOME"] = str(own_lab.root / "config")
    own_lab.type("hpctk lab up --nodes 4 --gpus-per-node 4")
    said, exports = [], ['eval "$(hpctk lab env)"']

    for block in blocks:
        if "hpctk plan" in block:
            wait_until(partial(measured, own_lab.root / "runs/all"), "items with a time")
        said.append(own_lab.type("\n".join([*exports, block]), "-euo", "pipefail"))
        exports += [line for line in block.splitlines() if line.startswith("export ")]

    described, examined, _, first, _, planned, _ = said
    assert "kinds 4 l40sx4\n" in described
    assert "n1 and n2" in examined
    assert "complete after" in first.splitlines()[-4], first
    assert "\n4      16 " in planned
    rows = (own_lab.root / "results.csv").read_text().splitlines()
    assert len(rows) == len(set(rows)) == 501


def alive(lab: Shell) -> int:
    (run,) = (lab.root / "runs").iterdir()
    return Run.open(run).status().workers.alive


def measured(run: Path) -> bool:
    return Run.open(run).status().stages["items"].done >= 8
