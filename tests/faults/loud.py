"""A workload that prints."""

from __future__ import annotations

from typing import Any


def work(item: dict[str, Any]) -> dict[str, Any]:
    print(f"item {item['id']} is at work")
    return {"twice": 2 * item["id"]}


def long(item: dict[str, Any]) -> dict[str, Any]:
    """A result that takes nearly a page of the disk."""
    print(f"item {item['id']} is at work")
    return {"text": chr(65 + item["id"]) * 3500}


def score(item: dict[str, Any]) -> dict[str, Any]:
    """The later the step the better."""
    step = int(item["checkpoint"].rpartition("step")[2])
    return {"score": 0.1 * step + 0.01 * item["layer"]}
