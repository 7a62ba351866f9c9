"""Rows and the table that binds (R11, R12)."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.errors import RunError, TryAgainLaterError
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.results.gather import NotCompleteError
from hpc_toolkit.results.tables import write_table
from hpc_toolkit.run import Run, create_run
from hpc_toolkit.rundir.journal import seal_line
from hpc_toolkit.rundir.layout import Manifest
from tests.toyrun import FAULTS, ToyRun, ToyWorker, every_fault, spec_of, tree, units_of
from tests.unit.test_status import old_copy


def finished(toy: ToyRun) -> ToyWorker:
    """A worker that did all, but item 2, which failed for good."""
    worker = toy.worker("w")
    worker.work(toy.unit_name(0), i0="done", i1="done", i2="permanent", i3="done")
    return worker


def ids(rows: list[dict[str, Any]]) -> list[int]:
    return [row["item"]["id"] for row in rows]


def test_gather_waits_for_lines_that_their_worker_told_of(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, slept = finished(toy), list[float]()
    whole = old_copy(toy, worker, lines=2)
    worker.presence.update(state="finished")

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            toy.paths.journal(worker.name).write_bytes(whole)

    played = SimpleNamespace(sleep=sleep, monotonic=lambda: sum(slept))
    monkeypatch.setattr("hpc_toolkit.results.gather.time", played)

    assert len(toy.reopen().results()) == 4
    assert len(slept) == 3


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
    for faults in every_fault(kind):
        toy = ToyRun(fast_dir / str(faults.at))
        finished(toy)
        run = toy.reopen()
        rows: list[dict[str, Any]] = []
        with faults, suppress(RunError):
            rows = run.results()
        assert faults.fired or len(rows) == 4
        again = toy.reopen().table()
        assert again.published
        assert ids(again.rows) == [0, 1, 2, 3]
        assert rows in ([], again.rows)
        assert toy.log().length in (3, 4)
    assert faults.at > 1


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


ATTEMPTS = 2
TEXT = st.text(st.characters(exclude_categories=()), max_size=4) | st.just('a":{')
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
FINITE = SCALARS.filter(lambda one: one not in (float("inf"), float("-inf")))
VALUES = st.dictionaries(
    TEXT | st.integers(0, 1) | st.sampled_from(["0", "1", "a"]),
    FINITE | st.lists(FINITE, max_size=2) | st.dictionaries(TEXT, FINITE, max_size=2),
    max_size=3,
)
ITEM_COUNT, UNIT = 8, 4


def attempts_of(kinds: list[str | None]) -> st.SearchStrategy[list[Any]]:
    one = st.tuples(st.sampled_from(kinds), VALUES, st.floats(0, 1e9))
    return st.lists(one, min_size=UNIT, max_size=UNIT)


RUNS = st.tuples(
    st.sampled_from("abc"),
    st.integers(0, ITEM_COUNT // UNIT - 1),
    st.integers(1, 4),
    attempts_of(["done"]) | attempts_of(["done", "failed", "permanent", None]),
    st.booleans(),
)


def lines_of(run: Run) -> dict[tuple[str, int], list[tuple[int, str, int, dict[str, Any]]]]:
    """The attempts at each item: generation, worker, place in the journal, record."""
    found = defaultdict(list)
    for path in sorted(run.paths.journals.iterdir()):
        for number, line in enumerate(path.read_bytes().splitlines()):
            body, record = line[:-18], json.loads(line)
            assert line[-18:] == b',"crc":"%08x"}' % crc32(body)
            if record["type"] != "release":
                key = record["unit"].rpartition("/")[2], record["item"]
                found[key].append((record["generation"], path.stem, number, record))
    return found


def row_of(item: Any, attempts: list[Any], floor: int) -> dict[str, Any] | None:
    """The row of an item by R8 and R11; None while it is pending."""
    done = min((one for one in attempts if one[3]["type"] == "done"), default=None)
    bad = [one for one in attempts if one[3]["type"] != "done" and one[0] > floor]
    counting = {one[0] for one in bad}
    final = {one[0] for one in bad if one[3]["type"] == "permanent"}
    if done is None and not final and len(counting) < ATTEMPTS:
        return None
    shown = done or next(
        one
        for one in (reversed(bad) if final else bad)
        if one[0] == max(final or counting) and (one[3]["type"] == "permanent") == bool(final)
    )
    record = shown[3]
    return {
        "item": item,
        "state": "done" if done else "failed",
        "value": record["value"] if done else None,
        "error": None if done else record["error"],
        "attempts": len(counting) + (done is not None),
        "seconds": record["seconds"],
        "worker": shown[1],
    }


def expected(run: Run, floors: dict[tuple[str, int], int]) -> list[tuple[list[int], Any]]:
    """Key and row of each finished item, in the order in which the items were given."""
    attempts = lines_of(run)
    segment = run.root / "stages/items" / os.readlink(run.root / "stages/items/log/000001")
    first, *lines = segment.read_bytes().splitlines()
    header = json.loads(first)
    rows = []
    for position, line in enumerate(lines):
        key = f"000001-{position // UNIT * UNIT}", position
        row = row_of(json.loads(line), attempts[key], floors.get(key, 0))
        order = header.get("order")
        rows.append((order[position] if order else position, position, row))
    return [([1, position], row) for _, position, row in sorted(rows, key=lambda one: one[0])]


def compact(record: Any) -> bytes:
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    """CSV of rows, column by column."""

    def cell(value: Any) -> Any:
        return value if isinstance(value, str | int | float | None) else json.dumps(value)

    keys = list(dict.fromkeys(key for row in rows for key in row["item"]))

    def beside(name: str) -> str:
        return beside(f"hpctk.{name}") if name in keys else name

    columns = [[key, *(cell(row["item"].get(key)) for row in rows)] for key in keys]
    own = ("state", "error", "attempts", "seconds", "worker")
    columns += [[beside(key), *(row[key] for row in rows)] for key in own]
    for key in dict.fromkeys(key for row in rows for key in row["value"] or ()):
        cells = (cell((row["value"] or {}).get(key)) for row in rows)
        columns.append([beside(f"value.{key}"), *cells])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(zip(*columns, strict=True))
    return text.getvalue().encode(errors="backslashreplace")


def check(run: Run, floors: dict[tuple[str, int], int], out: Path) -> None:
    wanted = expected(run, floors)
    rows = [row for _, row in wanted if row is not None]
    table = run.table(partial=True)
    finished = len(rows) == ITEM_COUNT
    assert (table.count, table.published) == (len(rows), finished)
    assert table.failed == sum(row["state"] == "failed" for row in rows)
    again = [table, Run.open(run.root).table(partial=True)]
    for one in again:
        write_table(out / "t.jsonl", one)
        assert (out / "t.jsonl").read_bytes() == b"".join(map(compact, rows))
        write_table(out / "t.csv", one)
        assert (out / "t.csv").read_bytes() == as_csv(rows)
        assert repr(one.rows) == repr(rows)
    if finished:
        (path,) = (run.root / "stages/items/results").iterdir()
        failed = sorted(key for key, row in wanted if row["state"] == "failed")
        header = {"format": 1, "segments": [1], "rows": ITEM_COUNT, "failed": failed}
        lines = [compact({"at": key, **row}) for key, row in sorted(wanted, key=lambda one: one[0])]
        assert path.read_bytes() == json.dumps(header).encode() + b"\n" + b"".join(lines)


@settings(max_examples=25)
@given(
    st.lists(VALUES, min_size=ITEM_COUNT, max_size=ITEM_COUNT),
    st.sampled_from([None, "g"]),
    st.lists(RUNS, min_size=1, max_size=6),
    st.lists(RUNS, max_size=3),
)
def test_gathered_bytes_are_those_of_a_slow_reader(
    fast_dir: Path, values: list[Any], group_by: str | None, runs: list[Any], more: list[Any]
) -> None:
    out = fast_dir / os.urandom(6).hex()
    out.mkdir()
    items = [{**value, "g": at % 2, "id": at} for at, value in enumerate(values)]
    manifest = Manifest(run="r", stages=(spec_of(group_by=group_by, max_attempts=ATTEMPTS),))
    with units_of(UNIT):
        run = create_run(out / "r", manifest, {"items": items}, sealed=True)
    workers = {name: ToyWorker(run.paths, name) for name in "abc"}

    def work(parts: list[Any]) -> None:
        for name, unit, generation, attempts, is_released in parts:
            worker = workers[name]
            # A generation has one owner (R3); with two, which of two failures is shown is open.
            owned = generation * len(workers) + "abc".index(name)
            worker.begin(f"000001-{unit * UNIT}", owned)
            for position, (kind, value, seconds) in enumerate(attempts, unit * UNIT):
                fields = {"value": value} if kind == "done" else {"error": f"at {seconds}"}
                if kind is not None:
                    worker.attempt(position, kind, seconds=seconds, **fields)
            if is_released:
                worker.release()

    work(runs)
    floors: dict[tuple[str, int], int] = {}
    if len([row for _, row in expected(run, floors) if row is not None]) < ITEM_COUNT:
        check(Run.open(run.root), floors, out)
        run.retry()
        for key, attempts in lines_of(run).items():
            row = row_of(None, attempts, 0)
            bad = [one[0] for one in attempts if one[3]["type"] != "done"]
            if bad and (row is None or row["state"] == "failed"):
                floors[key] = max(bad)
        work(more)
    check(Run.open(run.root), floors, out)
