"""What an item says of the place where it ran."""

from __future__ import annotations

import os
import time
from typing import Any


def place(item: dict[str, Any]) -> dict[str, Any]:
    """Sleep, and say on which node, as which rank, with which GPUs."""
    time.sleep(item["seconds"])
    return {
        "host": os.uname().nodename,
        "node": os.environ["SLURMD_NODENAME"],
        "rank": int(os.environ["SLURM_PROCID"]),
        "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
    }


def train(lr: int, seed: int, seconds: float) -> dict[str, int]:
    time.sleep(seconds)
    return {"checkpoint": 10 * lr + seed}


def evaluate(lr: int, seed: int, seconds: float, train: dict[str, int]) -> dict[str, int]:
    time.sleep(seconds)
    assert train == {"checkpoint": 10 * lr + seed}
    return {"score": seed}


def rank(lr: int, evaluate: list[dict[str, Any]]) -> dict[str, Any]:
    return {"lr": lr, "best": max(row["value"]["score"] for row in evaluate), "of": len(evaluate)}


def summary(rank: list[dict[str, Any]], train: list[dict[str, Any]]) -> dict[str, int]:
    assert {(row["value"]["best"], row["value"]["of"]) for row in rank} == {(9, 10)}
    return {"ranks": len(rank), "trained": len(train)}
