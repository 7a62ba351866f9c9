"""Findings of an examination: one verdict for each thing that the queue needs of a directory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class Verdict(StrEnum):
    """How well the checked thing suits a run."""

    FINE = "fine"
    SLOWER = "slower"
    """Nothing is lost, but work takes longer or is repeated."""
    UNSAFE = "unsafe"
    """A run cannot work here, or can lose data that was reported as stored."""
    UNKNOWN = "unknown"
    """The check was not made, or is not possible."""
    SKIPPED = "skipped"
    """The checked thing does not exist here, and a run can do without it."""


_ORDER = [Verdict.SKIPPED, Verdict.FINE, Verdict.UNKNOWN, Verdict.SLOWER, Verdict.UNSAFE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    """Name of the check."""
    verdict: Verdict
    """How well the checked thing suits a run."""
    found: str
    """The observation, with its numbers."""
    means: str = ""
    """What the observation means for a run."""
    fix: str = ""
    """What to do; "" if nothing is to be done."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict of all findings; fine if there are none."""
    return max((Verdict.FINE, *(one.verdict for one in findings)), key=_ORDER.index)
