"""What the files of a training tell: its losses, its checkpoints, and what a killed rank cost."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).parents[1]
DDP = str(REPOSITORY / "examples/train_ddp.py")
TREES = str(REPOSITORY / "examples/train_trees.py")
HELD = str(REPOSITORY / "tests/slurm/held_training.py")
"""``DDP``, that waits after some step until it is told to stop."""

_SAYS_PROCESS = re.compile(r" INFO process (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Size:
    """How much is trained; every training has the same."""

    steps: int
    every: int = 10
    """Steps between two checkpoints."""
    batch: int = 8
    """Sequences of 128 tokens a step, over all ranks."""
    texts: int = 256

    def words(self, model: str) -> tuple[str, ...]:
        """Arguments of ``examples/train_ddp.py``."""
        return (
            *("--model", model, "--texts", str(self.texts), "--steps", str(self.steps)),
            *("--batch-size", str(self.batch), "--checkpoint-every", str(self.every)),
            *("--optimizer", "sgd", "--lr", "0.1", "--precision", "float32"),
        )


def loss_lines(run: Path) -> list[dict[str, Any]]:
    """A line per step that was made; one that is being written is left out."""
    path = run / "loss.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def difference(run: Path, alone: Path) -> float:
    """The largest difference of a step's last loss; inf where steps are missing."""
    found, wanted = (
        {line["step"]: line["loss"] for line in loss_lines(one)} for one in (run, alone)
    )
    if not wanted or found.keys() != wanted.keys():
        return math.inf
    return float(max(abs(found[step] - loss) for step, loss in wanted.items()))


def repeated(run: Path) -> int:
    """Steps that were made more than once."""
    steps = [line["step"] for line in loss_lines(run)]
    return len(steps) - len(set(steps))


def overlap(one: Path, other: Path) -> int:
    """Steps of a training that were made between the first and the last of another."""
    times = [line["at"] for line in loss_lines(other)]
    return sum(times[0] <= line["at"] <= times[-1] for line in loss_lines(one)) if times else 0


def saved_step(run: Path) -> int:
    """The step of the latest checkpoint on disk; 0 without any."""
    names = [path.stem for path in (run / "checkpoints").glob("step-*.pt")]
    return max((int(name.rpartition("-")[2]) for name in names), default=0)


def process_of(run: Path, rank: int) -> int:
    """The process of a rank, as it said last."""
    return int(_SAYS_PROCESS.findall((run / "logs" / f"rank-{rank}.log").read_text())[-1])


@dataclass(frozen=True)
class Restart:
    """What a killed rank cost."""

    seconds: float
    """From SIGKILL until the next step was made."""
    again: int
    """Steps made twice: those behind the checkpoint from which it went on."""
    lost: int
    """Steps of the last checkpoint on disk that were made again all the same."""


def kill_rank(run: Path, rank: int) -> tuple[float, int]:
    """End a rank by SIGKILL; when, and the step of the checkpoint that was on disk then."""
    process, saved = process_of(run, rank), saved_step(run)
    at = time.time()
    os.kill(process, signal.SIGKILL)
    return at, saved


def restart_after(run: Path, killed_at: float, saved: int) -> Restart | None:
    """What the restart cost; None as long as it has made no step."""
    lines = loss_lines(run)
    # The line of the step that was made as the rank was killed may be younger than the kill.
    after = [line for line in lines if line["restart"] and line["at"] > killed_at]
    if not after:
        return None
    first, last = after[0], max((line["step"] for line in lines if not line["restart"]), default=0)
    again = max(0, last + 1 - first["step"])
    return Restart(first["at"] - killed_at, again, max(0, saved + 1 - first["step"]))


def wait_for(condition: Callable[[], bool], limit_s: float) -> bool:
    """Whether it became true within the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True
