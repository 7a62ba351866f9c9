"""Commands at the end of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.cli.hooks import Hooks
from hpc_toolkit.results.progress import PAUSED, StageCounts, WorkerCounts
from hpc_toolkit.results.status import Status
from tests.toyrun import ToyRun
from tests.unit.jobcommands import call, refused

KEYS = ("HPCTK_STATE", "HPCTK_DONE", "HPCTK_FAILED", "HPCTK_LEFT")


def status(done: int = 0, failed: int = 0, **changes: Any) -> Status:
    left = 10 - done - failed
    counts = StageCounts(total=10, pending=left, done=done, failed=failed)
    facts: dict[str, Any] = {"run": "runs/x", "stages": {"items": counts}, "complete": left == 0}
    facts |= {"workers": WorkerCounts(alive=2), "rate_per_s": 0.0, "eta_s": None}
    facts |= {"deaths": 0, "published": False, "reason": ""}
    return Status(**{**facts, **changes})


def noting(path: Path) -> str:
    """A command that adds its facts to a file."""
    return f"echo {' '.join(f'${key}' for key in KEYS)} >> {path}"


@pytest.mark.parametrize(
    ("last", "line"),
    [
        (status(10), "complete 10 0 0"),
        (status(7, 3), "failed 7 3 0"),
        (status(2, 1, halt=PAUSED, reason="paused: 25 failed"), "paused 2 1 7"),
    ],
)
def test_an_end_is_reported_once_with_what_came_of_the_run(
    tmp_path: Path, last: Status, line: str
) -> None:
    hooks = Hooks(noting(tmp_path / "out"))

    for now in (status(1), last, last):
        hooks.look(now)
    hooks.finish()

    assert (tmp_path / "out").read_text() == f"{line}\n"


def test_text_of_a_run_reaches_a_command_only_as_a_value(tmp_path: Path) -> None:
    hooks = Hooks(f'printf %s "$HPCTK_RUN" > {tmp_path}/run')
    name = f"/x/$(touch {tmp_path}/hacked); `touch {tmp_path}/hacked`"

    hooks.look(status(10, run=name))
    hooks.finish()

    assert (tmp_path / "run").read_text() == name
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("exit 3", "failed with exit code 3"),
        ("kill -9 $$", "was killed by SIGKILL"),
        # A real-time signal without a name.
        ("kill -40 $$", "was killed by signal 40"),
    ],
)
def test_a_command_that_fails_is_a_warning_with_its_last_line(end: str, how: str) -> None:
    hooks = Hooks(f"echo first; echo no such host >&2; {end}")
    hooks.quiet = True

    hooks.look(status(10))

    assert hooks.warnings(wait=True) == [f"the command of --on-end {how}: no such host"]


def test_a_watch_runs_the_commands_of_its_options(fast_dir: Path, tmp_path: Path) -> None:
    toy = ToyRun(fast_dir / "r", 2, unit=2)
    toy.worker("w").work(toy.unit_name(0), i0="done", i1="permanent")
    words = ("status", toy.root, "--watch", "--json", "--no-slurm")

    ended = call(*words, "--on-end", noting(tmp_path / "out"))

    assert ended.exit_code == 0
    assert json.loads(ended.stdout)["complete"]
    assert (tmp_path / "out").read_text() == "failed 1 1 0\n"


def test_a_command_needs_a_watch_and_a_run(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r")
    (fast_dir / "train" / "jobs").mkdir(parents=True)

    error = refused("status", fast_dir / "train", "--watch", "--on-end", "true")

    assert "directory of a training: --on-end is for runs" in error.message
    assert refused("status", toy.root, "--on-end", "true").message == "--on-end needs --watch"
