"""Claims: one owner for each generation, whatever a view believes (R1, R3)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.queue.claims import Claims, claim_name, parse_claim
from hpc_toolkit.rundir.layout import StagePaths
from tests.toyrun import all_at_once


@pytest.fixture
def paths(fast_dir: Path) -> StagePaths:
    found = StagePaths(fast_dir / "run" / "stages" / "items")
    found.make()
    return found


@given(st.integers(1, 10**7), st.integers(0, 10**9), st.integers(1, 10**6))
def test_a_claims_name_can_be_parsed(entry: int, first: int, generation: int) -> None:
    unit = f"{entry:06d}-{first}"

    assert parse_claim(claim_name(unit, generation)) == (unit, generation)


def test_i6_a_generation_has_one_owner_of_many_at_once(paths: StagePaths) -> None:
    won: list[str] = []

    def claim(number: int) -> None:
        if Claims(paths).create("000001-0", 1, f"w{number}"):
            won.append(f"w{number}")

    all_at_once(claim, 12)

    assert len(won) == 1
    assert Claims(paths).owner("000001-0", 1) == won[0]


def test_i6_a_view_that_knows_nothing_of_a_claim_cannot_take_it(paths: StagePaths) -> None:
    stale = Claims(paths)
    stale.refresh()
    assert Claims(paths).create("000001-0", 1, "first")

    assert stale.generation("000001-0") == 0
    assert not stale.create("000001-0", 1, "second")

    assert stale.owner("000001-0", 1) == "first"
    assert stale.generation("000001-0") == 1


def test_claims_of_one_worker_share_an_inode_on_a_local_filesystem_alone(paths: StagePaths) -> None:
    local, shared = Claims(paths, local=True), Claims(paths)

    for number in range(3):
        assert local.create(f"000001-{number}", 1, "me")
        assert local.create(f"000002-{number}", 1, "other")
        assert shared.create(f"000003-{number}", 1, "far")
    assert not local.create("000001-0", 1, "other")

    inodes = {path.name: path.lstat().st_ino for path in paths.claims.iterdir()}
    assert len({inodes[f"000001-{number}.1.lock"] for number in range(3)}) == 1
    assert len(set(inodes.values())) == 1 + 1 + 3
    found = Claims(paths)
    found.refresh()
    assert {found.owner(f"000001-{number}", 1) for number in range(3)} == {"me"}
    assert {found.owner(f"000002-{number}", 1) for number in range(3)} == {"other"}


def test_a_claim_whose_target_cannot_be_read_is_not_ours(paths: StagePaths) -> None:
    """A copy without symlinks, or a server that says "exists" and then errs, ends no worker."""
    (paths.claims / claim_name("000001-0", 1)).write_bytes(b"")
    claims = Claims(paths)

    assert not claims.create("000001-0", 1, "me")

    assert claims.generation("000001-0") == 1
    with pytest.raises(OSError, match="Invalid argument"):
        claims.owner("000001-0", 1)


def test_refresh_finds_the_newest_generation(paths: StagePaths) -> None:
    writer = Claims(paths)
    for generation in (1, 2, 10, 9):
        writer.create("000001-0", generation, f"w{generation}")
    writer.create("000001-5", 1, "w")
    (paths.claims / ".nfs000012").write_bytes(b"")

    claims = Claims(paths)
    claims.refresh()

    assert claims.newest == {"000001-0": 10, "000001-5": 1}
    assert claims.generation("000002-0") == 0


def test_a_listing_that_is_behind_never_lowers_a_generation(
    paths: StagePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = Claims(paths)
    claims.create("000001-0", 1, "w")
    claims.create("000001-0", 2, "w")
    monkeypatch.setattr(os, "listdir", lambda _: ["000001-0.1.lock"])

    claims.refresh()

    assert claims.generation("000001-0") == 2
