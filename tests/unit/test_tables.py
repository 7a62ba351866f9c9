"""Rows and traces to files that others read."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.activity import Trace
from hpc_toolkit.results.tables import columns_of, write_table, writer_for
from hpc_toolkit.run import Run, create_run
from hpc_toolkit.rundir.layout import Manifest, RunPaths
from tests.hostile import HOSTILE
from tests.toyrun import ToyWorker, spec_of


def row(item: dict[str, Any], value: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    return {
        "item": item,
        "state": "done" if value is not None else "failed",
        "value": value,
        "error": None if value is not None else 'ValueError: x,\n"y"',
        "attempts": 1,
        "seconds": 0.5,
        "worker": "w",
        **changes,
    }


def test_a_column_means_the_same_in_all_rows(tmp_path: Path) -> None:
    rows = [row({"id": 0}, {"a": 1}), row({"id": 1, "state": "Ohio", "value.a": 5}, {"a": 2})]
    write_table(tmp_path / "t.csv", rows)

    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        head, *found = csv.reader(file)
    assert head == [
        *("id", "state", "value.a"),
        *("hpctk.state", "error", "attempts", "seconds", "worker", "hpctk.value.a"),
    ]
    assert [(one[1], one[2], one[3], one[-1]) for one in found] == [
        ("", "", "done", "1"),
        ("Ohio", "5", "done", "2"),
    ]


def test_numbers_that_are_not_finite_are_text_beside_text_in_parquet(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    words = {"nan": "nan", "inf": "inf", "text": "x", "none": None}
    types = {"nan": {"/a": "nan"}, "inf": {"/a": "numpy.float32 inf"}}
    rows = [
        row({"id": word}, {"a": value if word == "text" else None})
        | ({"types": types[word]} if word in types else {})
        for word, value in words.items()
    ]

    write_table(tmp_path / "t.parquet", rows)

    found = pq.read_table(tmp_path / "t.parquet")
    assert found["value.a"].to_pylist() == [*words.values()]


def test_an_unknown_ending_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown format") as caught:
        writer_for(tmp_path / "t.jsnl")

    assert "jsonl" in caught.value.hint


@pytest.mark.parametrize(
    ("item", "names"),
    [
        ({"function": "f", "args": [1], "stored": {"same": {}}}, ["function", "args"]),
        # Keys of the same names in a user's list are columns like others.
        ({"function": "f", "args": 1, "stored": 2}, ["function", "args", "stored"]),
        (
            {"function": "f", "args": [], "stored": {"same": 1}, "lr": 2},
            ["function", "args", "stored", "lr"],
        ),
        ({"stored": {"at": 1}}, ["stored"]),
    ],
)
def test_only_the_part_of_a_call_that_its_executor_reads_is_no_column(
    item: dict[str, Any], names: list[str]
) -> None:
    found = [*columns_of([row(item, {"score": 1})])]

    assert found[: len(names) + 1] == [*names, "state"]


def traced(root: Path, file: Path, stage: str | None = None) -> int:
    run = Run.open(root)
    rows = Trace(RunView(run.paths, run.manifest), stage)
    write_table(file, rows)
    return rows.count


def rows_of(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def begun(root: Path, items: list[dict[str, Any]]) -> ToyWorker:
    """A worker that has all items of a run."""
    manifest = Manifest(run="r", stages=(spec_of(items_per_claim=len(items)),))
    create_run(root, manifest, {"items": items}, sealed=True)
    worker = ToyWorker(RunPaths(root), "wa", host="n1", job="77")
    worker.claim("000001-0")
    return worker


@pytest.fixture
def named(fast_dir: Path) -> Path:
    """A run whose items have columns of their own, one with the name of one of ours."""
    items = [{"seed": number, "host": {"a": number}} for number in range(3)] + [{"text": "x,y"}]
    worker = begun(fast_dir / "run", items)
    worker.attempt(0, at=103.5, seconds=1.25)
    worker.attempt(1, "failed", at=104.0, error='ValueError: x\n"y"')
    worker.attempt(3, at=105.0)
    return fast_dir / "run"


def test_a_trace_has_the_items_keys_and_then_ours_for_each_attempt(
    named: Path, tmp_path: Path
) -> None:
    assert traced(named, tmp_path / "t.csv") == 3

    first, second, third = rows_of(tmp_path / "t.csv")
    own = ["hpctk.host" if name == "host" else name for name in Trace.own]
    assert list(first) == ["seed", "host", "text", *own]
    assert (first["seed"], first["host"], first["hpctk.host"]) == ("0", '{"a": 0}', "n1")
    assert (first["begin"], first["end"], first["seconds"]) == ("102.25", "103.5", "1.25")
    assert (first["worker"], first["job"], first["attempt"]) == ("wa", "77", "1")
    assert (second["outcome"], second["error"]) == ("failed", "ValueError: x")
    assert (third["number"], third["seed"], third["text"]) == ("3", "", "x,y")


def test_hostile_texts_survive_every_format(fast_dir: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    items = [{"text": text, "odd": value} for text, value in zip(HOSTILE, range(999), strict=False)]
    items[3]["odd"] = "text among numbers"
    worker = begun(fast_dir / "run", items)
    for number, text in enumerate(HOSTILE):
        worker.attempt(number, "failed", error=text)

    for suffix in ("csv", "jsonl", "parquet"):
        assert traced(fast_dir / "run", tmp_path / f"t.{suffix}") == len(HOSTILE)

    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [line["item"]["text"] for line in lines] == list(HOSTILE)
    assert (tmp_path / "t.jsonl").read_text().isascii()
    table = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert table[3]["odd"] == "text among numbers"
    assert table[4]["odd"] == "4"
    assert len(rows_of(tmp_path / "t.csv")) == len(HOSTILE)
