"""A process that is stopped before each of its changes, while others do the work, and woken.

It was taken for dead, and what it does late does no harm (invariant I5): a table stays as it is, an
ask is made once, and it ends by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_toolkit.run import Run
from tests.faults import tally
from tests.faults.campaignrun import asked, table_of
from tests.faults.cut import Going, Struck, copy_of
from tests.faults.test_faults import (
    ITEMS,
    Place,
    at_every,
    check_rows,
    make_new,
    place_of,
    place_of_coordinator,
)

LEASE = ("--lease", "300ms")
OTHERS = ("gather", "add", "seal", "retry", "init", "drain")


def freeze(place: Place, every: int, name: str = "") -> Iterator[tuple[Going, str]]:
    """The command, stopped before one change after the other."""
    changes = place.without_a_cut().count
    frozen = 0
    for at in range(1, changes + 1, every):
        copy_of(place.template, place.run)
        one = place.call.start(*place.words, root=place.run, at=at, host="there")
        if not one.frozen():  # how often a worker beats is a matter of time
            assert one.end().code == 0
            continue
        frozen += 1
        yield one, f"{place.words[0]}, stopped before change {at} of {changes}"
    assert frozen > changes // every // 2
    tally.count(name or str(place.words[0]), changes=changes, frozen=frozen)


def woken(one: Going) -> Struck:
    one.wake()
    return one.end()


@at_every(8)
@pytest.mark.parametrize("gathered", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_i5_a_worker_that_is_frozen_changes_no_table(
    fast_dir: Path, every: int, gathered: bool
) -> None:
    """Its results come late, of a lower generation, before the table is published or after."""
    place = Place(fast_dir, make_new, "work", "run", *LEASE)
    for frozen, where in freeze(place, every, "" if gathered else "work, not gathered"):
        other = place.call("work", "run", *LEASE, root=place.run)
        assert (other.code, other.err) == (0, ""), f"{where}: {other}"
        table = Run.open(place.run).table() if gathered else None
        assert table is None or table.published, where

        late = woken(frozen)

        assert (late.code, late.err) == (0, ""), f"{where}: {late}"
        rows = check_rows(Run.open(place.run).results(), ITEMS, where)
        assert table is None or rows == table.rows, where
        assert Run.open(place.run).results() == rows, where
        counts = Run.open(place.run).status().stages["items"]
        assert (counts.done, counts.duplicates <= ITEMS) == (ITEMS, True), where


@at_every(5)
@pytest.mark.parametrize("command", OTHERS)
def test_i5_a_command_that_is_frozen_and_called_again_is_done_once(
    fast_dir: Path, command: str, every: int
) -> None:
    """Two people call the same command, and one is stopped in the middle."""
    place = place_of(command, fast_dir)
    for frozen, where in freeze(place, 13 if command == "init" and every > 1 else every):
        other = place.call(*place.words, root=place.run)
        late = woken(frozen)

        codes = {other.code, late.code}
        assert "Traceback" not in other.err + late.err, f"{where}: {other}, {late}"
        # Whoever comes second finds the items, or the run, there already.
        assert codes == ({0, 1} if command in ("add", "init") else {0}), f"{where}: {other}, {late}"
        run = Run.open(place.run / "new" if command == "init" else place.run)
        counts = run.status().stages["items"]
        if command == "gather":
            lines = (place.run / "rows.jsonl").read_text().splitlines()
            rows = [json.loads(line) for line in lines]
            assert rows == run.results(), where
            assert len(list(run.paths.stage("items").results.iterdir())) == 1, where
        elif command == "retry":
            assert (counts.done, counts.failed, counts.pending) == (2, 0, 2), where
        elif command in ("add", "init"):
            assert counts.total == 4, where
            assert len(list(run.paths.stage("items").items.iterdir())) == 1 + (command == "add")


@at_every(37, limit_s=1800)
@pytest.mark.parametrize("rivals", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_i5_of_three_coordinators_with_one_frozen_each_ask_is_made_once(
    fast_dir: Path, rivals: int, every: int
) -> None:
    place = place_of_coordinator(fast_dir)
    assert place.without_a_cut().code == 0
    sequence, rows = asked(place.run), table_of(place.run)
    name = f"coordinator beside {rivals}"
    for frozen, where in freeze(place, every, name):
        others = [place.call.start(*place.words, root=place.run) for _ in range(rivals)]
        ended = [other.end() for other in others]
        check_ends(ended, where)
        assert asked(place.run) == sequence, where

        late = woken(frozen)

        check_ends([*ended, late], where)
        assert asked(place.run) == sequence, where
        assert table_of(place.run) == rows, where
        trials = (place.run / "bandit/trials.jsonl").read_text().splitlines()
        told = [json.loads(line) for line in trials]
        assert [arm for one in told if one["type"] == "ask" for arm in one["arms"]] == sequence


def check_ends(ended: list[Struck], where: str) -> None:
    """One coordinates to the end; whoever meets its asks ends at once, and says why."""
    assert 0 in [one.code for one in ended], f"{where}: {ended}"
    for one in ended:
        assert one.code in (0, 75), f"{where}: {one}"
        wanted = "" if one.code == 0 else "error: another coordinator is running"
        assert one.err.startswith(wanted), f"{where}: {one}"
        assert "Traceback" not in one.err, f"{where}: {one}"
