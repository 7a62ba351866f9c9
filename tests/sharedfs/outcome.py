"""What a rehearsed run came to, and the table of all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Container

Cells = tuple[str, ...]
"""One row of the table."""

MEASURED: list[tuple[str, str, Outcome]] = []
"""Filesystem, scenario, and what it came to: all of this test run, which shows them at its end."""
NOTED: list[str] = []
"""Other measurements, a line each."""
SAID: dict[str, str] = {}
"""What ``hpctk doctor`` said of each filesystem."""

COLUMNS = (
    "filesystem",
    "doctor",
    "queue",
    "scenario",
    "items",
    "lost",
    "executed twice",
    "duplicate results",
    "gathered once",
    "seconds",
    "deaths seen by",
    "longest standstill",
    "taken over after",
)


@dataclass(frozen=True)
class Ended:
    """A command that came to its end."""

    host: str
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Outcome:
    """What a scenario came to."""

    items: int
    rows: list[dict[str, Any]]
    """As gathered at the end."""
    done_lines: Counter[str]
    """How many done lines each item has, by unit's segment and position."""
    executions: Counter[str]
    """How often each item was begun, by its name."""
    deaths: list[dict[str, Any]]
    """Death lines, once for each (unit, generation): ``by`` is the host of who wrote it, and
    ``found_by`` the hosts of this one and of whoever told all workers of the death."""
    untold: list[tuple[str, int]]
    """Units and generations that were claimed anew, with neither a release nor a death line."""
    ended: list[Ended]
    """The commands that worked, in the order of their end."""
    status: dict[str, Any]
    """What ``hpctk status --json`` says at the end."""
    seconds: float
    """From the disturbance until the run was whole."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What only one scenario knows."""
    standstill_s: float | None = None
    """See :func:`standstill`; None where nobody could stand still, or nobody else was disturbed."""
    taken_over_s: list[float] = field(default_factory=list)
    """From the disturbance until each death was seen, in order; empty where that means nothing."""

    @property
    def evidence(self) -> Counter[str]:
        return Counter(line["evidence"] for line in self.deaths)

    @property
    def gathered(self) -> Counter[str]:
        """How many rows each item that is done has."""
        return Counter(name_of(row["item"]) for row in self.rows if row["state"] == "done")

    def cells(self, filesystem: str, doctor: str, scenario: str) -> Cells:
        """One row of the table."""
        gathered = self.gathered
        seen = ", ".join(f"{name} {number}" for name, number in sorted(self.evidence.items()))
        counts = (
            self.items,
            self.items - len(gathered),
            sum(number > 1 for number in self.executions.values()),
            sum(number - 1 for number in self.done_lines.values()),
            sum(number == 1 for number in gathered.values()),
        )
        return (
            *(filesystem, doctor, "hpctk", scenario),
            *map(str, counts),
            *(f"{self.seconds:.1f}", seen or "-"),
            "-" if self.standstill_s is None else f"{self.standstill_s:.1f}",
            ", ".join(f"{one:.1f}" for one in self.taken_over_s) or "-",
        )


def standstill(records: list[dict[str, Any]], living: Container[str], since: float) -> float:
    """Seconds of the longest gap in which no worker of those given had a result.

    Counted from an epoch second until the last result that they could have without a takeover:
    after it they may have to wait until the others count as dead.
    """
    lost = {record["unit"] for record in records if record["type"] == "death"}
    ends = sorted(
        (record["at"], record["unit"] not in lost)
        for record in records
        if record["type"] == "done" and record["by"] in living and record["at"] > since
    )
    last = max((at for at, theirs in ends if theirs), default=since)
    times = [since, *(at for at, _ in ends if at <= last)]
    return max((after - before for before, after in pairwise(times)), default=0.0)


def name_of(item: dict[str, Any]) -> str:
    """What an item calls itself in its trace; see :mod:`tests.sharedfs.arms` for a campaign's."""
    if "id" in item:
        return str(item["id"])
    parts = [
        item["checkpoint"],
        f"layer{item['layer']}",
        *([item["task"]] if "task" in item else []),
    ]
    return ":".join(parts)


def text_table(rows: list[Cells]) -> list[str]:
    """Lines for a terminal."""
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(COLUMNS))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    ]


def said_by(report: dict[str, Any]) -> str:
    """A report of ``hpctk doctor --json`` in a few words.

    Unknown is not said: it is of Slurm and GPUs, which these hosts lack.
    """
    verdicts = {one["verdict"] for one in report["findings"]}
    verdict = next((one for one in ("unsafe", "slower") if one in verdicts), "fine")
    return f"{verdict}, locks {'proven' if report['locks_proven'] else 'not proven'}"
