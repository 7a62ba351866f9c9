"""A workload that prints."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def work(item: dict[str, Any]) -> dict[str, Any]:
    print(f"item {item['id']} is at work")
    return {"twice": 2 * item["id"]}


def long(item: dict[str, Any]) -> dict[str, Any]:
    """A result that takes nearly a page of the disk."""
    print(f"item {item['id']} is at work")
    return {"text": chr(65 + item["id"]) * 3500}


class Held:
    """An object that JSON does not have."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return type(other) is Held and other.text == self.text

    __hash__ = None  # type: ignore[assignment] # it can change


def hold(item: dict[str, Any]) -> tuple[Held, bytes]:
    """A result whose parts are in a value file."""
    print(f"item {item['id']} is at work")
    return Held(chr(65 + item["id"]) * 3500), bytes([item["id"]]) * 70_000


def held(item: dict[str, Any]) -> Held:
    """A result that takes nearly a page of the disk, in a value file."""
    return hold(item)[0]


class Loaded:
    """A model whose loads are counted in a file beside the run; its 31st item waits for a gate."""

    done = 0

    def load(self, group: Any) -> int:
        with Path(os.environ["HPCTK_LOADS"]).open("a") as file:
            file.write("loaded\n")
        time.sleep(0.3)
        return 2

    def run(self, context: int, items: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for item in items:
            time.sleep(0.005)
            # Which item that is depends on the worker's name, from which the order of units comes.
            while self.done == 30 and not Path(os.environ["HPCTK_GATE"]).exists():
                time.sleep(0.005)
            self.done += 1
            yield {"twice": context * item["id"]}
