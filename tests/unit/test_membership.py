"""A worker's membership: what it knows of the others when it starts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.system.ranks import RankInfo
from hpc_toolkit.worker.membership import Membership
from tests.countedcalls import CountedCalls
from tests.manualclock import ManualClock

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("world_size", "known", "lists"), [(1000, 1000, False), (1, 1, True)])
def test_a_rank_of_a_step_knows_how_many_they_are_without_listing_them(
    tmp_path: Path, world_size: int, known: int, *, lists: bool
) -> None:
    paths = RunPaths(tmp_path)
    paths.make([])
    rank = replace(RankInfo.from_environ({}), world_size=world_size)
    earlier = Membership(paths, rank, ManualClock(), 180.0)

    with CountedCalls() as counted:
        later = Membership(paths, rank, ManualClock(), 180.0)

    assert later.workers == known
    assert (("listdir", "workers") in counted.calls) is lists
    assert earlier.name != later.name
