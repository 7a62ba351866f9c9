"""How many points were tried, for the table at the end of the tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Tried:
    """What was tried of one command."""

    changes: int = 0
    """Changes of files that it makes when nothing is cut; 0 where the disk itself is at fault."""
    cuts: int = 0
    """Points, each a change and a way, at which it was cut."""
    frozen: int = 0
    """Changes before which it was stopped while another did the work."""


COMMANDS: dict[str, Tried] = {}


def count(command: str, *, changes: int, cuts: int = 0, frozen: int = 0) -> None:
    """Add what one sweep tried, when it came to its end without a failure."""
    found = COMMANDS.setdefault(command, Tried())
    found.changes = max(found.changes, changes)
    found.cuts += cuts
    found.frozen += frozen


def lines() -> list[str]:
    """The table; nothing where no sweep came to its end."""
    if not COMMANDS:
        return []
    found = COMMANDS.values()
    rows = [("command", "changes", "cut", "frozen")]
    rows += [
        (name, f"{one.changes}", f"{one.cuts}", f"{one.frozen}") for name, one in COMMANDS.items()
    ]
    cuts, frozen = sum(one.cuts for one in found), sum(one.frozen for one in found)
    rows.append(("all", "", f"{cuts}", f"{frozen}"))
    return ["{:<22}{:>9}{:>8}{:>8}".format(*row) for row in rows]
