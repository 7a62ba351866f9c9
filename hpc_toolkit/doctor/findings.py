"""Findings of an examination, one for each thing that the queue needs, and their report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpc_toolkit.doctor.sides import Side


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


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Verdict
    found: str
    """The observation, with its numbers."""
    means: str = ""
    """What the observation means for a run."""
    fix: str = ""
    """What to do; "" if nothing is to be done."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def fine(check: str, found: str, means: str = "") -> Finding:
    return Finding(check, Verdict.FINE, found, means)


def judged(check: str, found: str, verdict: Verdict, means: str, fix: str, *, bad: bool) -> Finding:
    """Return a finding with this verdict, meaning and fix if ``bad``, else a fine one."""
    return Finding(check, verdict, found, means, fix) if bad else fine(check, found)


def worst(findings: Iterable[Finding]) -> Verdict:
    return max((Verdict.FINE, *(one.verdict for one in findings)), key=_ORDER.index)


@dataclass(slots=True)
class Report:
    """The result of examining one directory."""

    directory: str
    """The directory as it was given."""
    findings: list[Finding]
    sides: tuple[Side, ...] = ()
    """The sides, the lead first; empty if the directory is not writable."""
    apart: bool = False
    """Whether the sides stand for two hosts."""
    locks_proven: bool = False
    """Whether flock excluded another host, and became free at its holder's death."""
    delays_s: dict[str, float | None] = field(default_factory=dict)
    """Seconds until one side saw each change of the other side; None if it took too long."""

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}
