"""What can be mended of a run, as data.

A repair makes a name that is missing, writes a hint anew, or takes away what nobody reads. It
writes no journal, no log entry and no payload, so that no result can be lost by it.
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
    """One thing to do to one or more files of a kind."""

    kind: Kind
    """``directory``: make it; ``claim``: make it again; ``head``: write it anew; ``aside``: move it
    to the same place below ``repaired/``; ``back``: the reverse."""
    names: tuple[str, ...]
    """Paths below the run."""
    owners: tuple[str, ...] = ()
    """Of claims: the worker of each."""
    stage: str = ""
    """Whose; "" for the run's."""
    why: str
    """What the damage costs, and what the repair rests on."""

    @property
    def words(self) -> str:
        """What would be done: "make stages/items/claims"."""
        return f"{_ACTS[self.kind]} {self.some}"

    @property
    def some(self) -> str:
        """The first names, and how many more there are."""
        more = f" and {len(self.names) - _SHOWN} more" if len(self.names) > _SHOWN else ""
        return ", ".join(self.names[:_SHOWN]) + more

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``hpctk doctor --repair --json`` prints them."""
        return {"kind": self.kind, "names": list(self.names), "stage": self.stage, "why": self.why}


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to do."""

    repairs: tuple[Repair, ...]
    """In the order in which they are done."""
    left: tuple[str, ...]
    """What stays as it is, and why."""

    def findings(self) -> Iterator[Finding]:
        """What an examination says of the repairs."""
        for repair in self.repairs:
            verdict, what = _FOUND[repair.kind]
            mend = "'hpctk doctor RUN --repair' shows what it would do, and asks"
            found = f"{what}: {repair.some}"
            if verdict is Verdict.FINE:
                found += "; --repair takes it away"
            yield Finding(
                check="to mend", verdict=verdict, found=found, means=repair.why, mend=mend
            )
