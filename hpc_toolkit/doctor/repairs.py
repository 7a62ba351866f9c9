"""Repairs of a run, as data.

A repair creates a missing name, rewrites a hint, or moves away files that no process reads. It
writes no journal, no log entry and no payload, so it cannot lose a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.doctor.findings import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHOWN = 3

Kind = Literal["directory", "claim", "head", "aside", "back"]

_ACTS: dict[Kind, str] = {
    "directory": "make",
    "claim": "make again",
    "head": "write anew",
    "aside": "move into repaired/",
    "back": "move back from repaired/",
}
_FOUND: dict[Kind, tuple[Verdict, str]] = {
    "directory": (Verdict.UNSAFE, "missing"),
    "claim": (Verdict.UNSAFE, "missing, and journals tell whose they were"),
    "head": (Verdict.SLOWER, "damaged, or not what the log says"),
    "aside": (Verdict.FINE, "left over"),
    "back": (Verdict.UNSAFE, "taken away, and named by the log"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One action for one or more files of a kind."""

    kind: Kind
    """``directory``: create it; ``claim``: create it again; ``head``: rewrite it; ``aside``: move
    it to the same path below ``repaired/``; ``back``: the reverse."""
    names: tuple[str, ...]
    """Paths below the run."""
    owners: tuple[str, ...] = ()
    """For claims: the worker of each."""
    stage: str = ""
    """The stage that the files belong to; "" for files of the run itself."""
    why: str
    """The cost of the damage, and the evidence for the repair."""

    @property
    def words(self) -> str:
        """The action in words: "make stages/items/claims"."""
        return f"{_ACTS[self.kind]} {self.some}"

    @property
    def some(self) -> str:
        """The first names, and the number of further ones."""
        more = f" and {len(self.names) - _SHOWN} more" if len(self.names) > _SHOWN else ""
        return ", ".join(self.names[:_SHOWN]) + more

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``hpctk doctor --repair --json`` prints them."""
        return {"kind": self.kind, "names": list(self.names), "stage": self.stage, "why": self.why}


@dataclass(frozen=True, slots=True)
class Plan:
    """The repairs of a run."""

    repairs: tuple[Repair, ...]
    """The repairs in their order of execution."""
    left: tuple[str, ...]
    """Damage that stays as it is, and why."""

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each repair, for the report of an examination."""
        for repair in self.repairs:
            verdict, what = _FOUND[repair.kind]
            fix = "'hpctk doctor RUN --repair' shows what it would do, and asks"
            found = f"{what}: {repair.some}"
            if verdict is Verdict.FINE:
                found += "; --repair takes it away"
            yield Finding(
                check="to repair", verdict=verdict, found=found, means=repair.why, fix=fix
            )
