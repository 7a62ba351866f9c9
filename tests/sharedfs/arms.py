"""The workload of a small campaign: what it does leaves a trace, as the items of Sleep do."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.science.workloads.synthetic import Sleep
from hpc_toolkit.system.processes import parent_of
from tests.sharedfs.outcome import name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CAMPAIGN = """
name = "arms"
seed = 3

[[models]]
name = "s"
layers = 1
size = 1000
steps = {steps}

[metrics]
workload = "arms:Arms"
options = {{ seconds = {seconds}, trace = "{trace}" }}

[tasks]
workload = "arms:Arms"
options = {{ seconds = {seconds}, trace = "{trace}", together = {together} }}
names = {names}

[search]
policy = "gp-ucb"
budget = {asks}
pending = 1
"""
LAYERS = 2
_MEET_S = 300.0
"""Longer than a busy machine needs; a worker that never comes must not block the run for ever."""


class Arms:
    """Sleeps, and prefers late layers.

    The tasks of an arm wait for each other, so that each of ``together`` workers has one of them.
    """

    def __init__(self, *, seconds: float, trace: str, together: int = 1) -> None:
        self._told = {"seconds": seconds, "trace": trace}
        self._trace = Path(trace)
        self._together = together

    def load(self, group: str) -> None:
        """Nothing to prepare."""

    def run(self, context: None, items: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for item in items:
            if "task" in item:
                self._meet(name_of(item).rpartition(":")[0])
            Sleep({**self._told, "id": name_of(item)})
            yield {"score": float(item["layer"])}

    def _meet(self, arm: str) -> None:
        line = f"meet {arm} {os.getpid()} {parent_of(os.getppid())[0]} {time.time():.6f}\n"
        with self._trace.open("a") as file:
            file.write(line)
        end = time.monotonic() + _MEET_S
        while self._met(arm) < self._together:
            if time.monotonic() > end:
                message = f"not all workers came to a task of {arm}"
                raise TimeoutError(message)
            time.sleep(0.02)

    def _met(self, arm: str) -> int:
        """How many came to an arm, on all hosts; its own host's file has two names."""
        texts = [path.read_text() for path in self._trace.parents[1].glob(f"*/{self._trace.name}")]
        return len({line for text in texts for line in text.splitlines() if f"meet {arm} " in line})
