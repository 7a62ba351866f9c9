"""Test names that only one process can create: every claim relies on them."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_toolkit.doctor.findings import Finding, Verdict, fine
from hpc_toolkit.rundir import files

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.doctor.sides import Pair

RACE_S = 1.0
_MOST_NAMES = 600
_CHOOSE = "choose a directory on another filesystem"


def race(directory: Path, own: str) -> dict[str, int]:
    """Create names in the same order as the other side; return the counts.

    ``won`` and ``lost`` count names, ``nowhere`` the lost names that nobody got, and ``tried`` is
    the index after the last name. The loser of a name skips ahead, so that both sides keep meeting.
    """
    end = time.monotonic() + RACE_S
    index, counts = 0, Counter(won=0, lost=0, nowhere=0)
    while counts["won"] < _MOST_NAMES and time.monotonic() < end:
        try:
            won = files.create_name(directory / str(index), own) == own
        except FileNotFoundError:
            # GlusterFS may refuse a name to both racing sides, and not have it afterwards.
            won = False
            counts["nowhere"] += 1
        counts["won" if won else "lost"] += 1
        index += 1 if won else random.randint(1, 3)
    return {**counts, "tried": index}


def check_names(pair: Pair) -> list[Finding]:
    """Check that symlinks work; then race for names."""
    refusal = files.symlink_refusal(pair.area)
    if refusal:
        means = "claims and log entries are symlinks; no run can be made here"
        found = f"cannot be made: {refusal}"
        return [Finding("symlinks", Verdict.UNSAFE, found, means, _CHOOSE)]
    return [_check_race(pair)]


def _check_race(pair: Pair) -> Finding:
    check, directory = "exclusive names", pair.area / "race"
    directory.mkdir()
    asked = time.monotonic()
    pair.ask("where")
    pair.start("race", own="other")
    # Wait until the other side has read the request: otherwise a fast disk would see no race.
    time.sleep(min(RACE_S / 2, (time.monotonic() - asked) / 2))
    began = time.monotonic()
    mine = race(directory, "lead")
    seconds = max(time.monotonic() - began, 1e-6)
    theirs: dict[str, int] = pair.finish()
    owners = Counter(_owner(directory / str(i)) for i in range(max(mine["tried"], theirs["tried"])))
    del owners[""]
    claimed = {"lead": mine["won"], "other": theirs["won"]}
    names, lost = sum(claimed.values()), mine["lost"] + theirs["lost"]
    rate = (mine["won"] + mine["lost"]) / seconds
    if {name: count for name, count in claimed.items() if count} != dict(owners):
        found = f"{names} names were won, but they belong to {dict(owners)}"
        means = "two workers can own one claim; a run here repeats work or loses its order"
        return Finding(check, Verdict.UNSAFE, found, means, _CHOOSE)
    nowhere = mine["nowhere"] + theirs["nowhere"]
    if nowhere:
        found = f"{names} names were won, each by one; {nowhere} were refused and are not there"
        means = "no claim has two owners, but a worker that meets such a name ends with 75"
        fix = "start workers again when they ended so; nothing is lost"
        return Finding(check, Verdict.SLOWER, found, means, fix)
    found = f"{names:,} names, {lost:,} of which both sides tried to create: each has one owner "
    found += f"({rate:,.0f} tries/s)"
    if lost:
        return fine(check, found, "a claim has one owner")
    means = "the two sides never met at a name"
    return Finding(check, Verdict.UNKNOWN, found, means, "run it again")


def _owner(path: Path) -> str:
    """The target of a name; "" if both sides skipped it."""
    with suppress(FileNotFoundError):
        return os.readlink(path)
    return ""
