"""The tutorial of a lab does what it says."""

from __future__ import annotations

import json

import pytest

from tests.documents import REPOSITORY, read_blocks
from tests.integration.realrun import wait_until
from tests.integration.test_docs import Shell, blurred, transcript
from tests.slurm.test_weeks import own_lab, shell

__all__ = ["own_lab", "shell"]
pytestmark = [pytest.mark.slow]

SHOWN = {"init", "new", "crash", "gather", "report", "restore"}
"""Commands of which the page shows all that they print, whenever they run."""


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


def alive(lab: Shell) -> int:
    return int(json.loads(lab.type("hpctk status --json"))["workers"]["alive"])
