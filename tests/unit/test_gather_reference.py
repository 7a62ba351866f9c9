"""Gathered bytes are those of a slow reader that knows only R8, R11 and the json module."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any
from zlib import crc32

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.results.tables import write_table
from hpc_toolkit.run import Run, create_run
from hpc_toolkit.rundir.layout import Manifest
from tests.toyrun import ToyWorker, spec_of, units_of

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


@settings(max_examples=50)
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
