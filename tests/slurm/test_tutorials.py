"""The tutorials of a lab and of a cluster do what they say."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hpc_toolkit.run import Run
from tests.documents import REPOSITORY, read_blocks
from tests.integration.realrun import wait_until
from tests.integration.test_docs import Shell, blurred, transcript
from tests.slurm.test_weeks import own_lab, shell

__all__ = ["own_lab", "shell"]
pytestmark = [pytest.mark.slow]

SHOWN = {"init", "new", "crash", "gather", "report", "restore"}
"""Commands of which the page shows all that they print, whenever they run."""


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
