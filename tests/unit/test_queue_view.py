"""What a process sees of a run when one journal cannot be read (I8)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.status import read_status
from tests.manualclock import ManualClock
from tests.replacedcalls import Unreadable
from tests.toyrun import ToyRun


def done(view: RunView) -> int:
    return read_status(view, ManualClock(), given="r").stages["items"].done


@pytest.fixture
def two(fast_dir: Path) -> ToyRun:
    """Two workers finished a unit each."""
    toy = ToyRun(fast_dir / "r", 4, unit=2)
    toy.worker("a").work(toy.unit_name(0), i0="done", i1="done")
    toy.worker("b").work(toy.unit_name(2), i2="done", i3="done")
    return toy


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_i8_a_journal_that_cannot_be_read_is_skipped_and_named_and_the_others_count(
    two: ToyRun, number: int
) -> None:
    path = two.paths.journal("a")
    with Unreadable(path, number):
        view = two.view()

        assert done(view) == 2
        assert read_status(view, ManualClock(), given="r").warnings == [
            f"{path}: cannot be read ({os.strerror(number)}); what it says is not counted"
        ]
        assert list(view.unreadable) == ["a"]
        assert not view.complete
    assert done(view) == 4
    assert view.unreadable == {}


def test_status_shows_the_failures_of_a_journal_that_became_unreadable(toy: ToyRun) -> None:
    toy.worker("w").work(toy.unit_name(0), i0="failed", i1="done", i2="done", i3="done")
    view = toy.view()

    with Unreadable(toy.paths.journal("w"), errno.EIO):
        (found,) = read_status(view, ManualClock(), given="r").failures or [{}]

    assert found["retrying"] == 1


def test_i2_no_table_is_published_while_a_journal_cannot_be_read(two: ToyRun) -> None:
    two.worker("c").work(two.unit_name(0), 2, i0="done", i1="done")

    with Unreadable(two.paths.journal("a"), errno.EIO):
        with pytest.raises(OSError, match=r"a\.jsonl"):
            gather(two.view(), "items")
        found = gather(two.view(), "items", partial=True)

    assert not found.published
    assert {row["worker"] for row in found.rows} == {"b", "c"}
    assert gather(two.view(), "items").published


def test_a_published_table_needs_no_journal(two: ToyRun) -> None:
    rows = two.rows()

    with Unreadable(two.paths.journal("a"), errno.EIO):
        assert gather(two.view(), "items").rows == rows


def test_i5_a_clean_pass_is_kept_when_its_journal_cannot_be_read_again(two: ToyRun) -> None:
    """A second source speaks of the unit, whose lines must be read one by one now."""
    view = two.view()
    late = two.worker("late")
    late.claim(two.unit_name(0), 2)
    late.attempt(0)

    with Unreadable(two.paths.journal("a"), errno.EIO):
        view.poll()

        assert view.complete
        assert done(view) == 4
        assert len(read_status(view, ManualClock(), given="r").warnings) == 1
    assert read_status(view, ManualClock(), given="r").stages["items"].duplicates == 1
    assert view.unreadable == {}


def test_i8_a_line_is_counted_once_when_the_one_behind_it_could_not_be_taken_in(
    two: ToyRun,
) -> None:
    view = two.view()
    late = two.worker("late")
    late.begin(two.unit_name(2), 2)
    late.attempt(2)
    late.begin(two.unit_name(0), 2)
    late.attempt(0)

    with Unreadable(two.paths.journal("a"), errno.EIO):
        view.poll()
        view.poll()
    view.poll()

    assert read_status(view, ManualClock(), given="r").stages["items"].duplicates == 2
