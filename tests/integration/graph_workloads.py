"""Workloads of the tests of items that follow each other; imported by the executors of workers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np


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
