"""The trace of a run: its columns, its formats, and runs that are not complete or are damaged."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.activity import Trace
from hpc_toolkit.results.tables import write_table
from hpc_toolkit.run import Run, create_run
from hpc_toolkit.rundir.layout import Manifest, RunPaths
from tests.hostile import HOSTILE
from tests.toyrun import ToyWorker, spec_of


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


def test_all_formats_have_the_same_rows(named: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for suffix in ("csv", "jsonl", "parquet"):
        traced(named, tmp_path / f"t.{suffix}")

    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    table = parquet.read_table(tmp_path / "t.parquet").to_pylist()

    for line, row, cells in zip(lines, table, rows_of(tmp_path / "t.csv"), strict=True):
        assert row["seed"] == line["item"].get("seed")
        for name in ("number", "begin", "end", "outcome", "worker", "error"):
            assert row[name] == line[name]
            assert str(row[name]) == cells[name]
    assert list(lines[0]) == ["item", *Trace.own]


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
