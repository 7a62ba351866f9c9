"""Commands that run when a run ends, pauses or stalls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from hpc_toolkit.cli import load_commands
from hpc_toolkit.cli.hooks import Hooks
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.results.progress import PAUSED, StageCounts, WorkerCounts
from hpc_toolkit.results.status import Status
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun

if TYPE_CHECKING:
    from pathlib import Path

KEYS = ("HPCTK_STATE", "HPCTK_DONE", "HPCTK_FAILED", "HPCTK_LEFT")


def status(done: int = 0, failed: int = 0, **changes: Any) -> Status:
    left = 10 - done - failed
    facts: dict[str, Any] = {
        "run": "runs/x",
        "stages": {"items": StageCounts(total=10, pending=left, done=done, failed=failed)},
        "workers": WorkerCounts(alive=2),
        "rate_per_s": 0.0,
        "eta_s": None,
        "complete": left == 0,
        "deaths": 0,
        "published": False,
        "reason": "",
    }
    return Status(**{**facts, **changes})


def noting(path: Path) -> str:
    """A command that adds its facts to a file."""
    return f"echo {' '.join(f'${key}' for key in KEYS)} >> {path}"


def noted(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


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

    assert noted(tmp_path / "out") == [line]


def test_a_run_that_pauses_again_after_a_retry_is_reported_again(tmp_path: Path) -> None:
    hooks = Hooks(noting(tmp_path / "out"))
    paused = status(1, halt=PAUSED, reason="paused: 25 failed")

    for now in (paused, status(1), paused):
        hooks.look(now)
        assert hooks.warnings(wait=True) == []

    assert len(noted(tmp_path / "out")) == 2


def test_a_stall_is_reported_once_until_something_is_done_again(tmp_path: Path) -> None:
    clock = ManualClock()
    hooks = Hooks(None, ("30min", noting(tmp_path / "out")), clock)

    def later(minutes: float, now: Status) -> list[str]:
        clock.advance(60 * minutes)
        hooks.look(now)
        hooks.finish()
        return noted(tmp_path / "out")

    assert later(0, status(1)) == []
    assert later(29, status(1)) == []
    assert later(2, status(1)) == ["stalled 1 0 9"]
    assert later(60, status(1)) == ["stalled 1 0 9"]
    assert later(1, status(2)) == ["stalled 1 0 9"]
    assert later(31, status(2)) == ["stalled 1 0 9", "stalled 2 0 8"]
    assert len(later(31, status(10))) == 2  # complete
    assert len(later(31, status(10))) == 2


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


def test_a_time_that_is_no_duration_is_refused() -> None:
    with pytest.raises(ConfigError, match="--on-stall"):
        Hooks(None, ("soon", "true"))


def call(*words: object) -> Any:
    return CliRunner().invoke(load_commands(str(words[0])), [*map(str, words)])


def test_a_watch_runs_the_commands_of_its_options(fast_dir: Path, tmp_path: Path) -> None:
    toy = ToyRun(fast_dir / "r", 2, unit=2)
    toy.worker("w").work(toy.unit_name(0), i0="done", i1="permanent")
    words = ("status", toy.root, "--watch", "--json", "--no-slurm")

    ended = call(*words, "--on-end", noting(tmp_path / "out"), "--on-stall", "1h", "exit 1")

    assert ended.exit_code == 0
    assert json.loads(ended.stdout)["complete"]
    assert noted(tmp_path / "out") == ["failed 1 1 0"]


@pytest.mark.parametrize("option", [("--on-end", "true"), ("--on-stall", "1h", "true")])
def test_commands_of_status_need_a_watch(fast_dir: Path, option: tuple[str, ...]) -> None:
    toy = ToyRun(fast_dir / "r")

    with pytest.raises(ConfigError, match=f"{option[0]} needs --watch"):
        CliRunner().invoke(
            load_commands("status"), ["status", str(toy.root), *option], catch_exceptions=False
        )
