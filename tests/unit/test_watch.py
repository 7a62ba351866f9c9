"""What 'hpctk status --watch' shows when a run ends: Slurm's last words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from click.testing import CliRunner

from hpc_toolkit.cli import load_commands
from hpc_toolkit.slurm.records import JobRecord
from tests.toyrun import ToyRun

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class SlurmOfARunThatEnds:
    """Says that the job runs, and only to who asks anew that it has ended."""

    def __init__(self) -> None:
        self.questions = 0

    def __call__(self, _paths: object) -> Any:
        self.questions += 1
        state = "RUNNING" if self.questions == 1 else "COMPLETED"

        class States:
            def read(self, **_: object) -> list[JobRecord]:
                return [JobRecord(id="7", state=state)]

        return States()


def test_the_last_screen_of_a_run_asks_slurm_anew(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = ToyRun(fast_dir / "r", 1, unit=1)
    monkeypatch.setattr("hpc_toolkit.submit.jobs.JobStates", SlurmOfARunThatEnds())
    worker = toy.worker("w")

    def sleep(_seconds: float) -> None:
        if not toy.reopen().status().complete:
            worker.work(toy.unit_name(0), i0="done")

    monkeypatch.setattr("hpc_toolkit.cli.statusview.time.sleep", sleep)

    ended = CliRunner().invoke(load_commands("status"), ["status", str(toy.root), "--watch"])

    first, last = ended.stdout.split(f"{toy.root}: ")[1:]
    assert "job 7    RUNNING" in first
    assert last.startswith("complete")
    assert "job 7    COMPLETED" in last
