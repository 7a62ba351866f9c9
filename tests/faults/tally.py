"""How many points were tried, for the table at the end of the tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Tried:
    """What was tried of one command."""

    changes: int = 0
    """Changes of files that it makes when nothing is cut."""
    cuts: int = 0
    """Points, each a change and a way, at which it was cut."""
    frozen: int = 0
    """Changes before which it was stopped while another did the work."""


COMMANDS: dict[str, Tried] = {}


def count(command: str, *, changes: int, cuts: int = 0, frozen: int = 0) -> None:
    """Add what one sweep tried."""
    found = COMMANDS.setdefault(command, Tried())
    found.changes = max(found.changes, changes)
    found.cuts += cuts
    found.frozen += frozen


def lines() -> list[str]:
    """The table; nothing where no sweep came to its end."""
    if not COMMANDS:
        return []
    rows = [("command", "changes", "cut", "frozen")]
    rows += [(name, one.changes, one.cuts, one.frozen) for name, one in COMMANDS.items()]  # type: ignore[misc]
    found = COMMANDS.values()
    rows.append(("all", "", sum(one.cuts for one in found), sum(one.frozen for one in found)))  # type: ignore[arg-type]
    return ["{:<22}{:>9}{:>8}{:>8}".format(*row) for row in rows]
