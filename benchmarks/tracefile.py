"""What items say of their own executions, read while a run goes on.

``hpc_toolkit.science.workloads.synthetic:Sleep`` appends a line to its item's ``trace`` file when
it starts and when it ends. The journal plays no part in it, so it can be a witness against the
journal.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class Execution:
    """One execution of one item."""

    item: int
    """The item's ``id``."""
    executor: int
    """Process that ran it."""
    worker: int
    """That process's parent, the worker."""
    started: float
    """Epoch seconds."""
    ended: float | None = None
    """Epoch seconds; None while it runs, and for ever if it was killed."""


class Trace:
    """Follows a trace file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.executions: list[Execution] = []
        """In the order of their starts."""
        self._running: dict[int, Execution] = {}

    def poll(self) -> None:
        """Read what was added."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.decode().splitlines():
                self._take(line.split())

    def _take(self, words: list[str]) -> None:
        what, item, executor, worker, at = words
        if what == "start":
            execution = Execution(int(item), int(executor), int(worker), float(at))
            self.executions.append(execution)
            self._running[execution.executor] = execution
        else:
            self._running.pop(int(executor)).ended = float(at)

    @property
    def finished(self) -> int:
        """Executions that came to their end."""
        return sum(execution.ended is not None for execution in self.executions)

    def inside(self) -> list[Execution]:
        """Executions that run now, as far as their processes live."""
        self.poll()
        return [one for one in self._running.values() if lives(one.executor) and lives(one.worker)]


def lives(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def send(sig: int, *pids: int) -> None:
    """Send a signal to processes that may be gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, sig)


def wait_for(condition: Callable[[], bool], what: str, *, limit_s: float = 60.0) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: it never did; the limit only guards against hanging for ever.
    """
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            message = f"waited {limit_s:g} s for: {what}"
            raise TimeoutError(message)
        time.sleep(0.002)
