"""The report of one examination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.doctor.findings import worst

if TYPE_CHECKING:
    from hpc_toolkit.doctor.findings import Finding, Verdict
    from hpc_toolkit.doctor.sides import Side


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of examining one directory."""

    directory: str
    """The directory as it was given."""
    sides: tuple[Side, ...]
    """The sides, the lead first; empty if the directory is not writable."""
    apart: bool
    """Whether the sides stand for two hosts."""
    locks_proven: bool
    """Whether flock excluded another host, and became free at its holder's death."""
    delays_s: dict[str, float | None]
    """Seconds until one side saw each change of the other side; None if it took too long."""
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``hpctk doctor --json`` prints them."""
        return {
            "directory": self.directory,
            "verdict": self.verdict,
            "sides": [side.to_json() for side in self.sides],
            "apart": self.apart,
            "locks_proven": self.locks_proven,
            "delays_s": self.delays_s,
            "findings": [finding.to_json() for finding in self.findings],
        }
