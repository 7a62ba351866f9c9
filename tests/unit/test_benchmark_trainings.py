"""The benchmark of trainings calls a promise kept only if it was."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What gives a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def made(run: Path, steps: list[int], *, at: float = 0.0, restart: int = 0, by: float = 0) -> Path:
    """Steps of a training, a second each; each loss is a tenth of its step and ``by`` more."""
    run.mkdir(exist_ok=True)
    with (run / "loss.jsonl").open("a") as file:
        for number, step in enumerate(steps):
            line = {"step": step, "loss": step / 10 + by, "at": at + number, "restart": restart}
            file.write(json.dumps(line) + "\n")
    return run


def saved(run: Path, *steps: int) -> None:
    (run / "checkpoints").mkdir()
    for step in steps:
        (run / "checkpoints" / f"step-{step:09}.pt").touch()


def test_losses_are_compared_by_the_last_of_each_step(part: Any, tmp_path: Path) -> None:
    runs = part("trainingruns")
    alone = made(tmp_path / "alone", [1, 2, 3])
    found = made(tmp_path / "found", [1, 2], by=1.0)
    made(found, [1, 2, 3], by=2e-6)
    with (found / "loss.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # being written

    assert runs.difference(found, alone) == pytest.approx(2e-6)
    assert runs.repeated(found) == 2


def test_a_training_that_lacks_steps_differs_without_limit(part: Any, tmp_path: Path) -> None:
    alone, short = made(tmp_path / "alone", [1, 2, 3]), made(tmp_path / "short", [1, 2])

    assert part("trainingruns").difference(short, alone) == math.inf
    assert part("trainingruns").difference(tmp_path / "none", tmp_path / "none") == math.inf


@pytest.mark.parametrize(
    ("again", "repeated", "lost"), [(11, 5, 0), (16, 0, 0), (6, 10, 5), (1, 15, 10)]
)
def test_a_restart_costs_the_steps_behind_its_checkpoint(
    part: Any, tmp_path: Path, again: int, repeated: int, lost: int
) -> None:
    runs = part("trainingruns")
    run = made(tmp_path / "run", list(range(1, 16)))
    saved(run, 5, 10)
    assert runs.saved_step(run) == 10
    assert runs.restart_after(run, 15.5, 10) is None

    made(run, [again, again + 1], at=20.0, restart=1)

    assert runs.restart_after(run, 15.5, 10) == runs.Restart(4.5, repeated, lost)


def rows(part: Any, **changes: Any) -> Any:
    given = {
        "model": "plain",
        "state": "COMPLETED",
        "code": 0,
        "requeues": 0,
        "steps": 30,
        "twice": 0,
    }
    return part("trainingjobs").Row(**{**given, "difference": 1e-6, **changes})


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"name": "nodes"}, True),
        ({"name": "nodes", "difference": 2e-5}, False),
        ({"name": "nodes", "difference": math.inf}, False),
        ({"name": "nodes", "requeues": 1}, False),
        ({"name": "nodes", "state": "FAILED"}, False),
        ({"name": "preempted", "requeues": 1}, True),
        ({"name": "preempted", "requeues": 0}, False),
        ({"name": "warned", "requeues": 1, "twice": 1}, False),
        ({"name": "killed", "twice": 7}, True),
    ],
)
def test_a_job_keeps_its_promise_only_as_it_should_have_ended(
    part: Any, changes: dict[str, Any], kept: bool
) -> None:
    assert rows(part, **changes).kept is kept


def measured(part: Any, **changes: Any) -> dict[str, Any]:
    restart = part("trainingruns").Restart
    one = {
        "model": "plain",
        "jobs": [rows(part, name="nodes")],
        "together": 20,
        "restart": restart(3.0, 4, 0),
    }
    tree = {"granted": 1, "threads": 1, "busy_cores": 1.0, "seconds": 4.0, "test_error": 0.03}
    trees = [tree, {**tree, "granted": 2, "threads": 2, "seconds": 2.0}]
    return {
        "losses": [one],
        "restarts": {"hpctk launch": [restart(2.0, 5, 0)], "torchrun": [restart(3.0, 5, 0), None]},
        "trees": [{"library": name, **one} for name in ("xgboost", "lightgbm") for one in trees],
        **changes,
    }


@pytest.mark.parametrize("found", [None, (31.0, 4, 0), (3.0, 14, 1)])
def test_a_killed_rank_that_is_slow_or_loses_a_checkpoint_breaks_the_promise(
    part: Any, found: tuple[float, int, int] | None
) -> None:
    restart = part("trainingruns").Restart(*found) if found else None
    missed = part("trainingpage").missed

    assert len(missed(measured(part, restarts={"hpctk launch": [restart], "torchrun": []}))) == 1
    assert missed(measured(part, restarts={"hpctk launch": [], "torchrun": [restart]})) == []
