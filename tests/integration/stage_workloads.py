"""Workloads of the tests of stages and of items that follow each other, for executors."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np


def train(lr: int, seed: int) -> dict[str, Any]:
    time.sleep(0.02)
    if (lr, seed) == (1, 3) and Path("bad").exists():
        raise ValueError("no such file")
    return {"weights": np.full(3000, lr), "text": json.dumps({"score": 100 * lr + seed})}


def rank(lr: int, evaluate: list[dict[str, Any]]) -> dict[str, Any]:
    for row in evaluate:
        item = row["item"]
        assert row["value"] == {"score": 100 * lr + item["seed"]}
        assert item["train"]["weights"].sum() == 3000 * lr
    return {"seeds": sorted(row["item"]["seed"] for row in evaluate)}


def summary(item: dict[str, Any]) -> dict[str, Any]:
    assert all(isinstance(row["value"]["weights"], np.ndarray) for row in item["train"])
    return {"ranks": len(item["rank"]), "trained": len(item["train"])}


def split(name: str) -> list[Any]:
    if name == "none":
        return []
    rows: list[Any] = [{"number": number, "rows": np.full(2000, number)} for number in (1, 2)]
    return [*rows, (name, np.zeros(2))]


def part(item: dict[str, Any]) -> float:
    if "split" in item:
        assert item["split"] == (item["name"], item["split"][1])
        return 0.0
    return float(item["rows"].sum())


def count(name: str, part: list[dict[str, Any]]) -> dict[str, Any]:
    assert {row["item"]["name"] for row in part} == {name}
    return {"sum": sum(row["value"] for row in part), "parts": len(part)}


def widen(seed: int) -> Any:
    return [{"seed": 7, "more": 1}, {"more": 2}] if seed == 0 else {"seed": 8}


def plain(id: int) -> int:  # noqa: A002 - the key of the items
    return id


def total(id: str, results: dict[str, Any]) -> dict[str, Any]:  # noqa: A002
    if id == "b" and Path("bad").exists():
        raise ValueError("no such file")
    rows = sum(one["rows"].sum() for one in results.values()) + 1
    return {"rows": np.full(2000, rows), "path": f"{id} {sorted(results)}"}


def whole(item: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.002)
    assert "after" not in item
    return {"depth": 1 + max((one["depth"] for one in item["results"].values()), default=0)}


def ends(length: list[dict[str, Any]]) -> int:
    return len(length)
