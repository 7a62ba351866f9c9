"""The weeks of users in examples/weeks: each script runs at reduced size and has its results."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.documents import REPOSITORY
from tests.integration.test_docs import Shell

pytestmark = [pytest.mark.slow]


def run_week(shell: Shell, name: str, **sizes: object) -> str:
    """Run a script; what it prints."""
    shell.environ |= {key: str(size) for key, size in sizes.items()}
    return shell.run("bash", str(REPOSITORY / f"examples/weeks/{name}.sh"))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """A shell in an empty directory, on a machine where no Slurm answers."""
    (tmp_path / "here").mkdir()
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\nexit 1\n")
    sinfo.chmod(0o755)
    return Shell(tmp_path / "here", tmp_path)


def test_a_list_is_complete_after_failures_and_a_kill(shell: Shell) -> None:
    printed = run_week(shell, "list", COUNT=20, WORKERS=2)

    for table in ("results.csv", "program.csv", "long.csv"):
        assert [row["state"] for row in rows(shell.root / table)] == ["done"] * 20
    assert "1 x RuntimeError: exit code 3; its output ends with: no such seed: 13" in printed
    assert "#SBATCH --ntasks-per-node=1" in printed


@pytest.mark.soak  # unit/test_campaign_arms.py extends searches, test_campaign.py runs them
def test_a_search_is_rehearsed_run_and_extended_by_a_task(shell: Shell) -> None:
    small = {"STEPS": "0,16000:143000:16000", "BUDGET": 24, "NODES": 2, "GPUS": 1}

    printed = run_week(shell, "researcher", CAMPAIGN="rehearsal.toml", **small)

    assert "campaign        pythia: 324 arms, 2 tasks, 648 evaluations in all" in printed
    assert "exhaustive best EleutherAI/pythia-" in printed
    # Of 36 arms in the larger search, 24 were known for two of three tasks.
    assert "known           48 evaluations" in printed
    scores = [*rows(shell.root / "scores.csv"), *rows(shell.root / "more.csv")]
    assert len([row for row in scores if row["task"] == "headlines:Headlines"]) == 36
    assert len(scores) == 36 * 3
    assert len({(row["checkpoint"], row["layer"], row["task"]) for row in scores}) == len(scores)


@pytest.mark.soak  # docs/how-to/scaling.md has these commands
@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_a_scaling_has_an_advice(shell: Shell) -> None:
    printed = run_week(shell, "scaling", REPEATS=1)

    page = (shell.root / "scaling.md").read_text()
    assert "| cost per 1,000 samples |" in page
    mine = printed.partition("## mytrain.py")[2]
    assert "efficiency, at least 85% wanted" in mine.partition("\n- ")[0]
    assert "**Use 8** (fair on 8: 88.2% efficiency, at least 85% wanted)" in printed
