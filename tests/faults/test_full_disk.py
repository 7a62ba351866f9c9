"""A real filesystem that is full in the middle of a run, and gets space again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import WorkloadSpec
from tests.faults import tally
from tests.faults.cut import Commands, Struck, copy_of
from tests.faults.smalldisk import fill, on_disk
from tests.faults.test_faults import at_every, check_end, check_parts, check_rows, done_lines
from tests.toyrun import ToyRun

ITEMS = 12
LEASE = ("--lease", "300ms")
SOON = ("--idle-exit", "500ms")
"""A worker waits for space as long as it would wait for items."""
SIZES = "size=1m,nr_inodes=200"


def check_told(ended: Struck, where: str) -> None:
    check_end(ended, "a full disk", f"{where}: {ended}")
    assert ended.code == 0 or "No space left on device" in ended.err, f"{where}: {ended}"


def check_full(disk: Path, template: Path, rooms: Iterable[dict[str, int]]) -> None:
    """Work, gather and add with so much room each; then there is space, and all is whole."""
    call = Commands(disk.parent)  # what the commands say is kept elsewhere
    codes = []
    for room in rooms:
        run = copy_of(template, disk / "run")
        give_back = fill(disk, **room)

        full = call("work", run, *LEASE, *SOON, root=run)

        check_told(full, f"work, {room}")
        codes.append(full.code)
        kept = done_lines(run)
        Run.open(run).status()
        give_back()
        again = call("work", run, *LEASE, root=run)
        assert (again.code, again.err) == (0, ""), f"{room}: {again}"
        give_back = fill(disk, **room)
        gathered = call("gather", run, "-o", "disk/run/rows.jsonl", root=run)
        check_told(gathered, f"gather, {room}")
        give_back()
        assert call("gather", run, "-o", "disk/run/rows.jsonl", root=run).code == 0, room
        check_kept(run, kept, room)
    assert codes[0] == 75, "it was never full"


def check_kept(run: Path, kept: dict[int, dict[str, Any]], room: object) -> None:
    rows = [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]
    assert rows == Run.open(run).table().rows, room
    check_parts(run, rows, str(room))
    check_rows(rows, ITEMS, room)
    for item, line in kept.items():
        assert (rows[item]["worker"], rows[item]["value"]) == (line["worker"], line["value"]), room


@at_every(38)
@pytest.mark.parametrize("function", ["long", "held"])
def test_a_disk_that_gets_space_again_has_the_whole_run(
    fast_dir: Path, function: str, every: int
) -> None:
    workload = WorkloadSpec(function=f"tests.faults.loud:{function}")
    ToyRun(fast_dir / "template", ITEMS, unit=3, workload=workload)
    disk = fast_dir / "disk"
    disk.mkdir()
    rooms = [{"pages": n} for n in range(36)] + [{"inodes": n} for n in range(24)]
    some = rooms[7::every] if every > 1 else rooms
    on_disk(disk, SIZES, partial(check_full, disk, fast_dir / "template", some))
    tally.count("a full disk", changes=0, cuts=2 * len(some))
