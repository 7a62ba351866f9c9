"""What an examination found: one verdict for each thing that the queue needs of a directory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class Verdict(StrEnum):
    """How well something serves a run."""

    FINE = "fine"
    SLOWER = "slower"
    """Nothing is lost by it; something takes longer, or is done again."""
    UNSAFE = "unsafe"
    """A run here cannot work, or can lose what it was told is kept."""
    UNKNOWN = "unknown"
    """It was not, or cannot be, found out."""
    SKIPPED = "skipped"
    """It is not here, and a run may do without."""


_ORDER = [Verdict.SKIPPED, Verdict.FINE, Verdict.UNKNOWN, Verdict.SLOWER, Verdict.UNSAFE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    """What was looked at."""
    verdict: Verdict
    """How well it serves."""
    found: str
    """What was seen, with its numbers."""
    means: str = ""
    """What that is for a run."""
    mend: str = ""
    """What to do; "" where there is nothing to do."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict of all findings together; fine without any."""
    return max((Verdict.FINE, *(one.verdict for one in findings)), key=_ORDER.index)
