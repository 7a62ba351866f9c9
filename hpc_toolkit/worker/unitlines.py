"""The journal lines of one unit run: attempts, deaths, release (R4, R5, R15)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hpc_toolkit.queue.probes import host_part
from hpc_toolkit.rundir.journal import encode_line, release_line
from hpc_toolkit.system.quantities import format_duration

if TYPE_CHECKING:
    from hpc_toolkit.queue.assignment import Assignment
    from hpc_toolkit.queue.state import Death
    from hpc_toolkit.rundir.journal import JournalWriter
    from hpc_toolkit.system.clock import Clock


class Counts(NamedTuple):
    """What a worker has done since its start."""

    done: int
    """Items done."""
    failed: int
    """Attempts that failed."""
    deaths: int
    """Executors that died."""


@dataclass(slots=True)
class Tally:
    """Counts of one unit run."""

    done: int = 0
    failed: int = 0
    permanent: int = 0
    deaths: int = 0


class UnitLines:
    """Writes the lines of one unit run into its worker's journal."""

    def __init__(self, journal: JournalWriter, clock: Clock, assignment: Assignment) -> None:
        self._journal = journal
        self._clock = clock
        self._assignment = assignment
        self._began = clock.monotonic()
        self._start = journal.size
        self._written: list[bytes] = []
        self.tally = Tally()

    @property
    def stage(self) -> str:
        return self._assignment.stage.paths.name

    def append(self, data: bytes) -> None:
        self._journal.append(data)
        self._written.append(data)

    def owner_died(self, order: list[int]) -> None:
        """Record that the previous generation's owner died with the items ``order`` still to run.

        The line precedes the unit run, whose ``sum`` does not cover it.
        """
        assert self._assignment.died is not None
        owner, verdict = self._assignment.died
        # The file server may never have shown the file that names the owner's host.
        host = verdict.host or host_part(owner) or owner
        facts = {"evidence": verdict.evidence, "explained": verdict.explained}
        died = self._assignment.generation - 1
        self._journal.append(self._death_line(order, died, worker=owner, host=host, **facts))
        self._start = self._journal.size

    def executor_died(self, left: list[int], how: str, *, worker: str, host: str) -> None:
        """Record that this worker's executor died with the items ``left`` still to run."""
        self.tally.deaths += 1
        facts = {"worker": worker, "host": host, "evidence": f"executor {how}", "explained": ""}
        self.append(self._death_line(left, self._assignment.generation, **facts))

    def _death_line(self, left: list[int], generation: int, **facts: str) -> bytes:
        suspects = self._assignment.stage.state.suspects(self._assignment.unit.name)
        return encode_line(
            {
                "type": "death",
                "unit": self._assignment.name,
                "generation": generation,
                "item": left[0],
                # Of several killers in one unit, none is ever the only pending item.
                "alone": len(left) == 1 or all(item in suspects for item in left),
                "at": round(self._clock.wall(), 3),
                **facts,
            }
        )

    def killer(self, item: int, deaths: int, last: Death | None = None) -> None:
        """Fail an item permanently because it killed its worker or executor too often."""
        self.tally.permanent += 1
        error = f"killed its worker {deaths} times"
        if last is not None:
            error += f", last: {last.evidence} on {last.host}"
        self._failure("permanent", item, error, 0.0)

    def timed_out(self, item: int, limit_s: float, *, permanent: bool) -> None:
        self.tally.failed += 1
        error = f"took longer than the timeout of {format_duration(limit_s)}"
        self._failure("permanent" if permanent else "failed", item, error, limit_s)

    def _failure(self, kind: str, item: int, error: str, seconds: float) -> None:
        record = {
            "type": kind,
            "unit": self._assignment.name,
            "generation": self._assignment.generation,
            "item": item,
            "at": round(self._clock.wall(), 3),
            "seconds": round(seconds, 6),
            "error": error,
        }
        self.append(encode_line(record))

    def release(self) -> None:
        failed = self.tally.failed + self.tally.permanent
        facts = {
            "unit": self._assignment.name,
            "generation": self._assignment.generation,
            "lines": self.tally.done + failed + self.tally.deaths,
            "done": self.tally.done,
            "failed": failed,
            # From the start of the unit run, loading included.
            "seconds": round(self._clock.monotonic() - self._began, 6),
            "at": round(self._clock.wall(), 3),
        }
        self._journal.append(release_line(self._start, b"".join(self._written), **facts))
