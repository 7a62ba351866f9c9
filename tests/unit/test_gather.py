"""Rows and the table that binds (R11, R12)."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import RunError, TryAgainLaterError
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.results.gather import NotCompleteError
from hpc_toolkit.rundir.journal import seal_line
from tests.toyrun import FAULTS, Faults, ToyRun, ToyWorker, tree


def finished(toy: ToyRun) -> ToyWorker:
    """A worker that did all, but item 2, which failed for good."""
    worker = toy.worker("w")
    worker.work(toy.unit_name(0), i0="done", i1="done", i2="permanent", i3="done")
    return worker


def ids(rows: list[dict[str, Any]]) -> list[int]:
    return [row["item"]["id"] for row in rows]


class OldCopy:
    """A journal of which this host shows less than its worker has synced, until ``shown_after``
    looks; stands in for a mount whose attributes are cached."""

    def __init__(self, toy: ToyRun, worker: ToyWorker, shown_after: int) -> None:
        self._path = toy.paths.journal(worker.name)
        self._whole = self._path.read_bytes()
        self._left = shown_after
        self.now = 0.0
        worker.presence.update(state="finished", journal=len(self._whole))
        lines = self._whole.splitlines(keepends=True)
        self._path.write_bytes(b"".join(lines[: len(lines) // 2]))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._left -= 1
        if self._left == 0:
            self._path.write_bytes(self._whole)


def test_gather_waits_for_lines_that_their_worker_told_of(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hpc_toolkit.results.gather.time", OldCopy(toy, finished(toy), shown_after=3)
    )

    assert len(toy.reopen().results()) == 4


@pytest.mark.parametrize("partial", [True, False])
def test_partial_rows_and_those_of_a_reader_without_write_access_are_provisional(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, *, partial: bool
) -> None:
    def refuse(_log: StageLog, _chunks: object) -> bool:
        raise OSError(errno.EROFS, "no")

    if partial:
        toy.worker("w").work(toy.unit_name(0), i0="done", i2="done")
    else:
        finished(toy)
        monkeypatch.setattr(StageLog, "add_table", refuse)
    before = tree(toy.root)

    table = toy.reopen().table(partial=partial)

    assert (ids(table.rows), table.published) == ([0, 2] if partial else [0, 1, 2, 3], False)
    assert tree(toy.root) == before


def test_i2_the_first_gather_publishes_and_all_others_copy(toy: ToyRun) -> None:
    finished(toy)

    first = toy.reopen().table()
    second = toy.reopen().table()

    assert first.published
    assert first.rows == second.rows
    assert len(list(toy.stage_paths.results.iterdir())) == 1


def replace_line(toy: ToyRun, number: int, line: bytes) -> Path:
    """Put another line into the published table."""
    (table,) = (toy.stage_paths.root / "results").iterdir()
    lines = table.read_bytes().splitlines(keepends=True)
    lines[number] = line + b"\n"
    table.write_bytes(b"".join(lines))
    return table


@pytest.mark.parametrize(
    "line",
    [
        *(b"junk", b"[]", b'{"rows":4,"segments":[1]}'),
        *(b'{"rows":4,"segments":[],"failed":[[1,0]]}', b'{"rows":"x","segments":[1],"failed":[]}'),
    ],
)
def test_a_table_whose_first_line_is_damaged_is_refused_by_all(toy: ToyRun, line: bytes) -> None:
    finished(toy)
    toy.reopen().results()
    table = replace_line(toy, 0, line)
    run = toy.reopen()

    for read in (run.status, run.results, run.status):
        with pytest.raises(RunError, match=f"{table} is damaged") as caught:
            read()
        assert f"'hpctk doctor {toy.root}'" in caught.value.hint
        assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("line", "error", "says"),
    [
        *((one, RunError, ": a row does not say") for one in (b"7", b'{"at":[1]}')),
        (b"\0" * 20, TryAgainLaterError, ""),
    ],
)
def test_a_row_that_is_damaged_is_no_answer(
    toy: ToyRun, line: bytes, error: type[RunError], says: str
) -> None:
    finished(toy)
    toy.reopen().results()
    table = replace_line(toy, 2, line)

    with pytest.raises(error, match=f"{table} is damaged{says}") as caught:
        toy.reopen().results()

    assert "hpctk doctor" in caught.value.hint if says else caught.value.hint


def test_i2_a_published_row_stays_when_a_better_line_arrives_late(toy: ToyRun) -> None:
    slow = toy.worker("aaa")
    slow.claim(toy.unit_name(0), 1)
    toy.worker("w").work(toy.unit_name(0), 2, i0="done", i1="done", i2="permanent", i3="done")
    published = toy.reopen().table().rows

    for item in range(4):
        slow.attempt(item, "done", value={"late": item})
    slow.release()

    assert toy.reopen().table().rows == published
    assert toy.reopen().status().stages["items"].failed == 1


def test_i2_a_new_table_keeps_the_rows_of_the_last_but_those_retried(toy: ToyRun) -> None:
    worker = finished(toy)
    before = toy.reopen().results()
    assert toy.reopen().retry() == 1
    late = toy.worker("aaa")
    late.begin(toy.unit_name(0), 1)
    late.attempt(0, "done", value={"late": 1})
    worker.work(toy.unit_name(0), 2, i2="done")

    after = toy.reopen().table()

    assert after.published
    assert [after.rows[index] for index in (0, 1, 3)] == [before[index] for index in (0, 1, 3)]
    assert (after.rows[2]["state"], after.rows[2]["attempts"]) == ("done", 1)


def test_gather_after_a_retry_waits_for_the_items_it_names(toy: ToyRun) -> None:
    finished(toy)
    toy.reopen().results()
    toy.reopen().retry()

    with pytest.raises(
        NotCompleteError, match="1 item of stage 'items' has no result yet"
    ) as caught:
        toy.reopen().results()

    assert caught.value.pending == [{"id": 2}]
    assert ids(toy.reopen().results(partial=True)) == [0, 1, 3]
    assert toy.states()[1, 2] == "pending"


def test_i2_a_retry_between_computing_and_publishing_is_not_passed_over(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an item would be failed in the table and pending in the log at once."""
    finished(toy)
    real = StageLog.add_table
    entered: list[int] = []

    def retry_first(log: StageLog, chunks: Any) -> str:
        if not entered:
            entered.append(1)
            toy.reopen().retry()
        return real(log, chunks)

    monkeypatch.setattr(StageLog, "add_table", retry_first)

    with pytest.raises(NotCompleteError, match="1 item of stage 'items' has no result yet"):
        toy.reopen().results()

    assert toy.states()[1, 2] == "pending"
    assert list(toy.stage_paths.results.iterdir()) == []


@pytest.mark.parametrize("kind", FAULTS, ids=str)
def test_a_publication_that_fails_anywhere_leaves_a_whole_table_or_none(
    fast_dir: Path, kind: int | str
) -> None:
    at = 0
    while True:
        at += 1
        toy = ToyRun(fast_dir / str(at))
        finished(toy)
        run = toy.reopen()
        rows: list[dict[str, Any]] = []
        with Faults(at, kind) as faults, suppress(RunError):
            rows = run.results()
        if not faults.fired:
            assert len(rows) == 4
            break
        again = toy.reopen().table()
        assert again.published
        assert ids(again.rows) == [0, 1, 2, 3]
        assert rows in ([], again.rows)
        assert toy.log().length in (3, 4)
    assert at > 1


def test_a_table_stays_when_a_power_loss_takes_the_lines(fast_dir: Path) -> None:
    """It holds the values; the failure that a retry lifted must not be looked for."""
    toy = ToyRun(fast_dir / "r", 2, unit=2, max_attempts=3)
    first, second = toy.worker("first"), toy.worker("second")
    first.work(toy.unit_name(0), 1, i0="failed", i1="permanent")
    toy.reopen().retry()
    second.work(toy.unit_name(0), 2, i0="done", i1="permanent")
    before = toy.reopen().results()
    assert [row["state"] for row in before] == ["done", "failed"]
    toy.reopen().retry()
    toy.worker("third").work(toy.unit_name(0), 3, i1="done")
    os.truncate(toy.paths.journal("second"), 0)

    after = toy.reopen().results()

    assert after[0] == before[0]
    assert after[1]["state"] == "done"


def test_a_line_that_is_not_strict_json_does_not_count(toy: ToyRun) -> None:
    """Its checksum is right, so its writer was no worker of ours; NaN would spoil the table."""
    worker = toy.worker("w")
    worker.work(toy.unit_name(0), i0="done", i1="done", i2="done")
    body = b'{"type":"done","unit":"items/000001-0","generation":2,"item":3,"at":0.0,"seconds":1.0,'
    worker.journal.append(seal_line(body + b'"value":{"loss":NaN}'))

    with pytest.raises(NotCompleteError, match="1 item of stage 'items' has no result yet"):
        toy.reopen().results()

    assert list(toy.stage_paths.results.iterdir()) == []
