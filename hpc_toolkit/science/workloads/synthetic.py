"""Workloads for trials, tests and benchmarks."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.system.processes import parent_of


def Noop(item: dict[str, Any], /) -> dict[str, Any]:  # noqa: N802 - named like the others
    """Return the item unchanged."""
    return item


def Sleep(item: dict[str, Any], /) -> dict[str, Any]:  # noqa: N802 - named like the others
    """Sleep for ``seconds``; with ``trace``, append a line to that file before and after."""
    trace = item.get("trace")
    if trace is not None:
        _note(trace, "start", item)
    time.sleep(item["seconds"])
    if trace is not None:
        _note(trace, "end", item)
    return {"slept": item["seconds"]}


def _note(path: str, what: str, item: dict[str, Any]) -> None:
    worker, _ = parent_of(os.getppid())  # between them is the executor's guard
    line = f"{what} {item.get('id')} {os.getpid()} {worker} {time.time():.6f}\n".encode()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


class Flaky:
    """Fails at random; ``fail``, ``permanent``, ``crash`` and ``hang`` are probabilities.

    An item can override a probability by a key of the same name, such as ``{"crash": 1}``.
    """

    def __init__(
        self,
        *,
        fail: float = 0.0,
        permanent: float = 0.0,
        crash: float = 0.0,
        hang: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self._chances = {"fail": fail, "permanent": permanent, "crash": crash, "hang": hang}
        self._random = random.Random(seed)

    def load(self, group: Any) -> None:
        """Do nothing: there is no context."""

    def run(self, context: None, items: Any) -> Any:
        """Yield one result per item, or fail as drawn."""
        for item in items:
            for what, chance in self._chances.items():
                if self._random.random() < item.get(what, chance):
                    self._act(what)
            time.sleep(item.get("seconds", 0.0))
            yield {"ok": True}

    @staticmethod
    def _act(what: str) -> None:
        if what == "fail":
            raise RuntimeError("flaky: failed by chance")
        if what == "permanent":
            raise PermanentError("flaky: cannot succeed")
        if what == "crash":
            os.abort()
        time.sleep(3600)
