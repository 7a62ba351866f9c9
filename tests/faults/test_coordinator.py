"""The coordinator, cut at every change it makes: no ask is lost, made twice or another (R14)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hpc_toolkit.run import Run
from tests.faults.campaignrun import asked, make_campaign, play
from tests.faults.test_faults import EVERY, Place


def check_coordinator(home: Path, every: int) -> None:
    begin = partial(play, root=home / "run")
    place = Place(home, make_campaign, "campaign", "coordinate", "run", begin=begin)
    whole = place.without_a_cut()
    assert (whole.code, whole.err, whole.fired) == (0, "", "")
    sequence, rows = asked(place.run), table_of(place.run)
    assert len(set(sequence)) == 5
    for struck, _, where in place.sweep(every):
        so_far = asked(place.run)
        assert so_far == sequence[: len(so_far)], where
        assert struck.code != 0 or so_far == sequence, where

        again = place.call(*place.words, root=place.run)

        assert (again.code, again.err) == (0, ""), f"{where}\nthen: {again}"
        assert asked(place.run) == sequence, where
        assert table_of(place.run) == rows, where
        assert Run.open(place.run).status().complete, where


def table_of(root: Path) -> list[tuple[object, ...]]:
    """What the published table says, but for who did it."""
    table = Run.open(root).table(stage="tasks")
    assert table.published
    return [(row["item"], row["state"], row["value"], row["attempts"]) for row in table.rows]


def test_a_coordinator_that_is_cut_goes_on_with_the_same_sequence(fast_dir: Path) -> None:
    check_coordinator(fast_dir, 10 * EVERY)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_coordinator_that_is_cut_anywhere_goes_on_with_the_same_sequence(fast_dir: Path) -> None:
    check_coordinator(fast_dir, 1)
