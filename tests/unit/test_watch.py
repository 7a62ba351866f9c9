"""What 'hpctk status --watch' shows: no more than the terminal holds, and Slurm's last words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner

from hpc_toolkit.cli import load_commands
from hpc_toolkit.cli.statusview import fit, status_parts
from hpc_toolkit.results.status import StageCounts, Status, WorkerCounts
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
    assert "job 7         RUNNING" in first
    assert last.startswith("complete")
    assert "job 7         COMPLETED" in last


def failing(**changes: object) -> Status:
    """A run with more to say than a small terminal holds."""
    return Status(
        run="runs/bench",
        stages={"items": StageCounts(total=9, done=4, failed=5)},
        workers=WorkerCounts(dead=2),
        rate_per_s=0.0,
        eta_s=None,
        complete=False,
        deaths=0,
        published=False,
        reason="no worker is alive; 2 died: start some with 'hpctk work' or sbatch",
        failures=[
            {"error": f"Error{n}: " + "long " * 30, "items": 1, "example": {"n": n}}
            for n in range(5)
        ],
        warnings=["runs/bench/journals/w.jsonl: damaged line at byte 7 is skipped"],
    )


def test_a_reason_is_whole_and_each_error_has_one_row() -> None:
    shown = fit(*status_parts(failing()), columns=60, rows=24)

    assert shown[3:5] == [
        "  why      no worker is alive; 2 died: start some with",
        "           'hpctk work' or sbatch",
    ]
    assert fit(*status_parts(failing()), columns=60, rows=9) == shown[:8]
    assert [row[:25] for row in shown[-5:]] == [f"  failure  1 x Error{n}: lo" for n in range(5)]


def test_results_that_are_not_shown_yet_stand_with_the_workers() -> None:
    now = failing()
    now.old_copies = 3

    workers = status_parts(now)[0][2]
    now.complete = True
    complete = status_parts(now)[0][2]

    assert workers == "  workers  0 alive, 2 dead, 3 with results not shown here yet"
    assert complete == "  workers  0 alive, 2 dead"


def test_all_labels_of_a_status_have_one_width() -> None:
    lines = [line for part in status_parts(failing()) for line in part]

    assert {line[2:11].strip() for line in lines[1:]} == {
        *("items", "workers", "why", "warning", "failure"),
    }
    assert all(line[10] == " " != line[11] or line[2:7] == "items" for line in lines[1:])
