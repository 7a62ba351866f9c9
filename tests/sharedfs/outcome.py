"""What a rehearsed run came to, and the table of all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MEASURED: list[str] = []
"""What the scenarios of this test run came to; shown at its end."""

_ROW = "{:10} {:16} {:>6} {:>5} {:>6} {:>10} {:>9} {:>8}  {}"
HEADER = [
    _ROW.format(
        *("filesystem", "scenario", "items", "lost", "begun", "duplicate", "gathered", "seconds"),
        "deaths",
    ),
    _ROW.format("", "", "", "", "twice", "results", "once", "to whole", "seen by"),
]


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
    executions: Counter[int]
    """How often each item was begun, by its id."""
    deaths: list[dict[str, Any]]
    """Death lines, once for each (unit, generation); ``by`` is the host of who wrote it."""
    ended: list[Ended]
    """The commands that worked, in the order of their end."""
    status: dict[str, Any]
    """What ``hpctk status --json`` says at the end."""
    seconds: float
    """From the disturbance until the run was whole."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What only one scenario knows."""

    @property
    def evidence(self) -> Counter[str]:
        return Counter(line["evidence"] for line in self.deaths)

    @property
    def gathered(self) -> Counter[int]:
        return Counter(row["item"]["id"] for row in self.rows if row["state"] == "done")

    def line(self, filesystem: str, scenario: str) -> str:
        """One row of the table."""
        gathered = self.gathered
        seen = ", ".join(f"{name} {number}" for name, number in sorted(self.evidence.items()))
        twice = sum(number > 1 for number in self.executions.values())
        duplicates = sum(number - 1 for number in self.done_lines.values())
        once = sum(number == 1 for number in gathered.values())
        return _ROW.format(
            *(
                filesystem,
                scenario,
                self.items,
                self.items - len(gathered),
                twice,
                duplicates,
                once,
            ),
            *(f"{self.seconds:.1f}", seen or "-"),
        )
