"""The training example: losses that do not depend on ranks, signals or kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from tests.integration.realrun import REPOSITORY, wait_until
from tests.integration.startedranks import LIMIT_S, ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROGRAM = REPOSITORY / "examples" / "train_ddp.py"
STEPS = 30
QUICK = (
    *("--model", "plain", "--texts", "40", "--batch-size", "8", "--steps", str(STEPS)),
    *("--optimizer", "sgd", "--lr", "0.5", "--precision", "float32"),
)
CLOSE = 1e-5
"""How far a loss may be from that of one process: another order of the same sums."""


def lines(output: Path) -> list[dict[str, Any]]:
    path = output / "loss.jsonl"
    if not path.exists():
        return []
    # The last line may be in the making.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def losses(output: Path) -> dict[int, float]:
    """The loss of each step, the last one where it was made again."""
    return {line["step"]: line["loss"] for line in lines(output)}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process."""
    output = tmp_path_factory.mktemp("one")
    with ranks(1, PROGRAM, "--output", str(output), *QUICK) as started:
        [printed] = started.ended()
    found = losses(output)
    assert json.loads(printed)["world_size"] == 1
    assert list(found) == list(range(1, STEPS + 1))
    assert found[STEPS] < found[1]
    return found


def assert_same(found: dict[int, float], one: dict[int, float]) -> None:
    assert found.keys() == one.keys()
    assert max(abs(found[step] - one[step]) for step in one) <= CLOSE


def test_a_signal_at_one_of_two_ranks_saves_and_the_curve_goes_on(
    tmp_path: Path, one: dict[int, float]
) -> None:
    options = ("--output", str(tmp_path), *QUICK, "--accumulate", "2", "--checkpoint-every", "0")
    with ranks(2, PROGRAM, *options) as started:
        wait_until(lambda: len(lines(tmp_path)) >= 3, "three steps", limit_s=LIMIT_S)
        started.processes[1].send_signal(signal.SIGUSR1)
        started.ended(expected=75)
    made = len(lines(tmp_path))
    assert 3 <= made < STEPS

    with ranks(2, PROGRAM, *options) as started:
        started.ended()

    # No step was lost or made twice, and 30 steps of two ranks are those of one process.
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, STEPS + 1))
    assert_same(losses(tmp_path), one)


def test_a_killed_rank_is_started_again_and_no_saved_step_is_lost(
    tmp_path: Path, one: dict[int, float]
) -> None:
    options = ("--output", str(tmp_path), *QUICK, "--checkpoint-every", "2")
    launch = ("launch", "--nproc-per-node", "2", "--max-restarts", "1", "--backend", "gloo")
    process = subprocess.Popen(
        [sys.executable, "-m", "hpc_toolkit", *launch, str(PROGRAM), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: len(lines(tmp_path)) >= 6, "six steps", limit_s=LIMIT_S)
        os.kill(pid_of(tmp_path, rank=1), signal.SIGKILL)
        printed, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, printed
    finally:
        process.kill()
        process.communicate()

    assert_same(losses(tmp_path), one)
    made = [line for line in lines(tmp_path) if line["restart"] == 0]
    again = [line for line in lines(tmp_path) if line["restart"] == 1]
    last = made[-1]["step"]
    # The step after the last checkpoint is the earliest that may be made again.
    assert last - 1 <= again[0]["step"] <= last + 1


def pid_of(output: Path, *, rank: int) -> int:
    """The process that wrote a rank's log."""
    log = output / "logs" / f"rank-{rank}.log"
    first = log.read_text().splitlines()[0]
    return int(first.rpartition(" process ")[2])


def test_a_batch_that_ranks_cannot_share_is_named(tmp_path: Path) -> None:
    options = ("--output", str(tmp_path), *QUICK, "--accumulate", "3")
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), *options],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 1
    assert "--batch-size 8 has no equal part for each of 3 passes" in ended.stderr
    assert "hint: 1 ranks times --accumulate 3 must divide it" in ended.stderr
