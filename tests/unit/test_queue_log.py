"""The log of a stage (R2) and its claims: one owner for each generation (R1, R3)."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.items import encode_segment
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.units import Claims, claim_name, parse_claim
from hpc_toolkit.rundir.layout import StagePaths
from tests.replacedcalls import CountedCalls
from tests.toyrun import FAULTS, all_at_once, every_fault


@pytest.fixture
def paths(fast_dir: Path) -> StagePaths:
    found = StagePaths(fast_dir / "run" / "stages" / "items")
    found.make()
    return found


def segment(*ids: int) -> list[bytes]:
    return list(encode_segment([{"id": number} for number in ids], group_by=None))


def reader(paths: StagePaths) -> StageLog:
    log = StageLog(paths)
    log.poll()
    return log


def ids(log: StageLog) -> dict[int, list[int]]:
    return {
        number: [json.loads(line)["id"] for line in found.items()]
        for number, found in log.segments.items()
    }


def test_all_readers_see_the_entries_in_one_order(paths: StagePaths) -> None:
    writer, follower = StageLog(paths), StageLog(paths)

    assert writer.add_segment(segment(1))
    assert follower.poll()
    assert writer.add_segment(segment(2, 3))
    writer.seal()
    assert follower.poll()

    assert ids(writer) == ids(follower) == ids(reader(paths)) == {1: [1], 2: [2, 3]}
    assert follower.sealed
    assert [path.name for path in sorted(paths.log.iterdir())] == ["000001", "000002", "000003"]


def test_an_entry_lost_to_another_process_is_prepared_again(paths: StagePaths) -> None:
    slow, quick = StageLog(paths), StageLog(paths)
    assert quick.add_segment(segment(1))

    assert not slow.add_segment(segment(2))
    assert ids(slow) == {1: [1]}, "the loser reads what won"
    assert len(list(paths.items.iterdir())) == 1, "the loser's own payload is gone"
    assert slow.add_segment(segment(2))

    assert ids(reader(paths)) == {1: [1], 2: [2]}


def test_i6_of_many_writers_at_once_every_segment_is_there_once(paths: StagePaths) -> None:
    def write(number: int) -> None:
        log = StageLog(paths)
        while not log.add_segment(segment(number)):
            pass

    all_at_once(write, 8)

    log = reader(paths)
    assert sorted(ids(log)) == list(range(1, 9))
    assert sorted(found for (found,) in ids(log).values()) == list(range(8))
    assert len(list(paths.items.iterdir())) == 8


def test_add_after_the_seal_is_refused_with_the_way_out(paths: StagePaths) -> None:
    log = StageLog(paths)
    log.seal()

    with pytest.raises(RunError, match=r"stage 'items' of .*run is sealed") as caught:
        log.add_segment(segment(1))

    assert "--open" in caught.value.hint
    assert list(paths.items.iterdir()) == []


def test_an_entry_whose_payload_is_not_visible_is_waited_for(paths: StagePaths) -> None:
    payload = paths.items / "late.jsonl"
    paths.entry(1).symlink_to("items/late.jsonl")
    paths.entry(2).symlink_to("sealed")
    log = StageLog(paths)

    assert not log.poll()
    assert (log.length, log.sealed) == (0, False), "nothing behind it may be read"
    assert not log.append("sealed"), "nor written in its place"
    payload.write_bytes(b"".join(segment(5)))
    assert log.poll()

    assert ids(log) == {1: [5]}
    assert log.sealed


def test_an_unknown_entry_asks_for_an_upgrade(paths: StagePaths) -> None:
    paths.entry(1).symlink_to("votes/1.json")

    with pytest.raises(RunError, match=r"000001: unknown entry 'votes/1\.json'") as caught:
        StageLog(paths).poll()

    assert "upgrade" in caught.value.hint


def test_a_name_that_is_cached_as_missing_is_found_by_the_listing(
    paths: StagePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    StageLog(paths).seal()
    answers = [True]
    real = os.readlink

    def readlink(path: Path) -> str:
        if answers and answers.pop():
            raise FileNotFoundError(errno.ENOENT, "cached as missing")
        return real(path)

    monkeypatch.setattr(os, "readlink", readlink)

    assert reader(paths).sealed


def test_head_never_points_back_after_an_older_writer(paths: StagePaths) -> None:
    StageLog(paths).seal()
    StageLog(paths).show(7)

    late = reader(paths)
    late.add_retry([(1, 0, 1)])

    assert late.hint() == 7


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("items", '{"format": 1}'),
        ("items", '{"format": 1, "units": [["a", "b", "c", "d"]]}'),
        ("items", "[]"),
        ("retries", '{"format": 1}'),
        ("retries", '{"format": 1, "floors": [[1, 0]]}'),
        ("retries", '{"format": 1, "floors": [[1, 0, "x"]]}'),
    ],
)
def test_a_payload_that_is_whole_and_wrong_is_named_and_not_waited_for(
    paths: StagePaths, kind: str, text: str
) -> None:
    (paths.root.parents[1] / "run.json").touch()
    log = StageLog(paths)
    target = log.write_payload(kind, ".json", [text.encode() + b"\n"])
    log.append(target)

    with pytest.raises(RunError, match=f"{target} is damaged"):
        log.poll()
    with pytest.raises(RunError, match=f"{target} is damaged") as caught:
        log.poll()

    assert f"'hpctk doctor {paths.root.parents[1]}'" in caught.value.hint
    assert (caught.value.exit_code, log.length, log.hidden) == (1, 0, "")


@pytest.mark.parametrize("kind", ["items", "retries"])
def test_a_payload_of_which_any_part_is_visible_is_waited_for(paths: StagePaths, kind: str) -> None:
    log = StageLog(paths)
    retry = [json.dumps({"format": 1, "floors": [[1, 0, 1]]}).encode()]
    target = log.write_payload(kind, ".json", segment(1, 2) if kind == "items" else retry)
    log.append(target)
    whole = (paths.root / target).read_bytes()

    for size in range(len(whole)):
        (paths.root / target).write_bytes(whole[:size])
        assert not log.poll()
        assert log.hidden == target

    (paths.root / target).write_bytes(whole)
    assert log.poll()


@pytest.mark.parametrize("kind", FAULTS, ids=str)
@pytest.mark.parametrize("what", ["segment", "seal", "retry", "table"])
def test_an_entry_that_fails_anywhere_is_there_whole_or_not_at_all(
    fast_dir: Path, what: str, kind: int | str
) -> None:
    for faults in every_fault(kind):
        paths = StagePaths(fast_dir / str(faults.at) / "stages" / "items")
        paths.make()
        StageLog(paths).add_segment(segment(1))
        log = reader(paths)
        failed = False
        with faults:
            try:
                _write_entry(log, what)
            except OSError:
                failed = True
        found = reader(paths)
        assert found.length in ((1, 2) if failed else (2,))
        assert len(list(paths.log.iterdir())) == found.length
        if found.length == 2:
            _assert_whole(found, what)
        if found.length == 1:
            _write_entry(found, what)
            _assert_whole(reader(paths), what)
    assert faults.at > 1 or (what, kind) == ("seal", "short"), "a seal writes nothing but its name"


def _write_entry(log: StageLog, what: str) -> None:
    match what:
        case "segment":
            assert log.add_segment(segment(2, 3))
        case "seal":
            log.seal()
        case "retry":
            assert log.add_retry([(1, 0, 4)])
        case _:
            assert log.add_table([b"table\n", b"row\n"])


def _assert_whole(log: StageLog, what: str) -> None:
    assert ids(log) == ({1: [1], 2: [2, 3]} if what == "segment" else {1: [1]})
    assert log.sealed == (what == "seal")
    assert log.floors == ({(1, 0): 4} if what == "retry" else {})
    if what == "table":
        assert log.table is not None
        assert (log.paths.root / log.table[1]).read_bytes() == b"table\nrow\n"


def test_an_entry_changes_the_time_of_its_directory_in_a_tick_of_its_own(
    paths: StagePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of NFSv3 that looked within the tick of the entry would not find it otherwise."""
    monkeypatch.setenv("HPCTK_FILESYSTEM", "shared")

    StageLog(paths).seal()

    made = paths.entry(1).lstat().st_mtime_ns
    assert paths.log.stat().st_mtime_ns >= made + 10_000_000


def test_one_hinted_look_in_60_lists_the_log_and_writes_the_hint_that_was_lost(
    paths: StagePaths,
) -> None:
    """The process that added the entry died before it wrote ``head``."""
    writer, waiting = StageLog(paths), StageLog(paths)
    writer.add_segment(segment(1))
    waiting.poll()
    before = paths.head.read_bytes()
    writer.add_segment(segment(2))
    paths.head.write_bytes(before)

    with CountedCalls() as counted:
        looks = [waiting.poll(hinted=True) for _ in range(600)]

    assert looks.index(True) < 60
    assert waiting.length == StageLog(paths).hint() == 2
    assert counted.calls.count(("listdir", "log")) <= 10
    assert len(counted.calls) < 600 * 1.1


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
    assert claims.owner("000001-0", 1) == ""


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
