"""One pass of the real UnitRunner, whose executor does what a script says."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.queue.units import claim_name
from hpc_toolkit.rundir.journal import JournalWriter
from hpc_toolkit.worker import unitruns
from hpc_toolkit.worker.attempts import END, Report
from hpc_toolkit.worker.hosthealth import FailureCount
from hpc_toolkit.worker.membership import Drain
from hpc_toolkit.worker.unitlines import Outcome
from hpc_toolkit.worker.unitruns import UnitRunner
from tests.manualclock import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.queue.assignment import Assignment
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.rundir.layout import Manifest
    from tests.model.memorydisk import Disk

KINDS = ("done", "failed", "short", "permanent")
"""Ways in which an item ends."""


class _ScriptIsOver(BaseException):
    """The pass goes on, but not now."""


class PlayedExecutor:
    """The pipes of an executor, as its worker has them; what it does is up to a test."""

    starting = False

    def __init__(self) -> None:
        self.results, self._write = os.pipe()
        os.set_blocking(self.results, False)
        self.ended, self._life = os.pipe()
        self.report: Report | None = None

    def has_ended(self) -> bool:
        return True

    def start(self, request: dict[str, Any], lines: list[bytes]) -> None:
        assert len(lines) == len(request["positions"])
        self.report = Report(request, self.send)

    def send(self, kind: bytes, text: bytes = b"") -> None:
        os.write(self._write, kind + text + b"\n")

    def die(self) -> None:
        os.close(self._life)
        self._life = -1

    def close(self) -> None:
        for fd in (self.results, self._write, self.ended, self._life):
            if fd >= 0:
                os.close(fd)


class _Executor(PlayedExecutor):
    """Says what the script says, whenever its worker looks up."""

    def __init__(self, hands: Hands) -> None:
        super().__init__()
        self._hands = hands
        self._left = 0
        hands.executor = self

    def start(self, request: dict[str, Any], lines: list[bytes]) -> None:
        super().start(request, lines)
        self._hands.positions = list(request["positions"])
        self._left = len(lines)

    def act(self, what: str) -> None:
        assert self.report is not None
        if what == "die":
            self.die()
        elif what == "end":
            self.send(END, b"stopped" if self._left else b"")
        elif what in KINDS:
            self._left -= 1
            if what == "done":
                self.report.result({"by": self._hands.worker, "g": self._hands.generation})
            else:
                errors = {"permanent": PermanentError("no"), "short": MemoryError("no")}
                self.report.failure(errors.get(what, ValueError("no")))

    def stop(self) -> None:
        pass

    def end(self) -> str:
        return "killed by SIGKILL"


class Hands:
    """Plays a pass on a disk of its own."""

    def __init__(self, worker: str, manifest: Manifest, view: RunView, disk: Disk) -> None:
        self.worker = worker
        self.generation = 0
        self.positions: list[int] = []
        """What the executor was asked to run."""
        self.executor: _Executor | None = None
        self._view = view
        self._disk = disk
        self._manifest = manifest

    def _open_journal(self, path: Path) -> JournalWriter:
        """As the worker has it open, who made it at its start."""
        journal = JournalWriter.__new__(JournalWriter)
        journal._fd = self._disk.open(path, os.O_WRONLY | os.O_APPEND)
        journal.size = journal.synced = len(self._disk.image[str(path)])
        journal.unsynced = []
        return journal

    def play(self, found: Assignment, script: tuple[str, ...]) -> tuple[bytes, Outcome | None]:
        """What is appended to the journal, and how the pass ended; None if it goes on."""
        self.generation = found.generation
        path = self._view.paths.journal(self.worker)
        journal = self._open_journal(path)
        before = journal.size
        clock, left = ManualClock(), list(script)
        drain = Drain(clock)
        wake, awaken = os.pipe()

        def tick() -> None:
            if not left:
                raise _ScriptIsOver
            what = left.pop(0)
            if what in ("asked", "abort"):
                drain.request(what, 0.0 if what == "abort" else math.inf)
                os.write(awaken, b"x")
            elif what == "look":
                name = claim_name(found.unit.name, found.generation + 1)
                self._disk.image.setdefault(str(found.stage.paths.claims / name), "other")
                clock.advance(2.0)
                os.write(awaken, b"x")
            else:
                assert self.executor is not None
                self.executor.act(what)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(unitruns, "Executor", lambda *_: _Executor(self))
            runner = UnitRunner(
                worker=self.worker,
                host=f"host-of-{self.worker}",
                view=self._view,
                journal=journal,
                clock=clock,
                drain=drain,
                failures=FailureCount(),
                next_group=lambda _: None,
                wake_fd=wake,
                tick=tick,
                stages=dict,
                look_s=1.0,
            )
            try:
                outcome = runner.run(found)
            except _ScriptIsOver:
                outcome = None
            finally:
                runner.close()
                os.close(wake)
                os.close(awaken)
        ended = outcome is not None
        assert not (ended and left), f"the pass ended before {left}"
        assert self._disk.synced or not ended, "I1: a pass returned before its lines were synced"
        written = self._disk.image[str(path)]
        assert isinstance(written, bytes)
        return written[before:], outcome
