"""Benchmarks count failures as failures, and the queue beside ours really runs every item."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What gives a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_a_drain_that_fails_is_a_row_and_the_next_ones_are_measured(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharedfs = part("sharedfs")

    def play(drain: Any, *, kill: bool) -> Any:
        if not kill:
            message = "workers left:\n [code | 1]"
            raise AssertionError(message)
        return part("sharedfs_peers").Came(1, 0, 0, 1, 0, 1.0, capped=False, person=0)

    monkeypatch.setattr(sharedfs, "play_ours", play)
    filesystem = SimpleNamespace(name="none")
    directories = sharedfs.Directories(tmp_path)

    found = sharedfs.drains(filesystem, Path("python"), directories, ["hpctk"], sharedfs.SMALL)

    table = sharedfs.Table()
    for name, _, came in found:
        table.add("none", "fine", name, "two a host", *sharedfs.cells_of(came))
    assert [len(cells) for cells in table.rows] == [len(sharedfs.COLUMNS) + 1] * 2
    assert table.rows[0][5] == "failed: workers left: [code / 1]"
    assert table.rows[1][5] == "0"
    assert table.lost


def test_another_queue_that_fails_is_left_out_and_the_rest_is_measured(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    throughput = part("throughput")

    asked = []

    def peer(name: str, *_: Any) -> dict[str, Any]:
        asked.append(name)
        if name == "bad":
            throughput.timed([sys.executable, "-c", "import sys; sys.exit('no | luck')"])
        return {"items_per_s": 1.0}

    monkeypatch.setattr(throughput, "ours", lambda *_: {"items_per_s": 2.0})
    monkeypatch.setattr(throughput, "peer", peer)
    options = SimpleNamespace(dir=tmp_path, repeats=2, items=1, workers=1)

    found, failed = throughput.measure(options, ["bad", "hpctk", "good"])

    assert {name: len(runs) for name, runs in found.items()} == {"hpctk": 2, "good": 2}
    assert asked.count("bad") == 1
    assert failed["bad"].seen.startswith("failed: no / luck (exit code 1 of ")


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_naive_queue_runs_every_item_once_and_says_how_fast(tmp_path: Path) -> None:
    argv = [sys.executable, str(BENCHMARKS / "peers.py"), "naive_filelock", "--items", "40"]

    ended = subprocess.run(
        [*argv, "--workers", "2", "--dir", str(tmp_path / "q")], capture_output=True, check=True
    )

    found = json.loads(ended.stdout)
    assert (found["done"], found["twice"], found["capped"]) == (40, 0, False)
    assert found["items_per_s"] > 0
    assert len(list((tmp_path / "q" / "results").iterdir())) == 40


def test_a_queue_that_does_not_end_is_cut_at_the_cap(tmp_path: Path) -> None:
    argv = [sys.executable, str(BENCHMARKS / "peers.py"), "naive_filelock", "--items", "1000000"]

    ended = subprocess.run(
        [*argv, "--workers", "1", "--cap", "0.2", "--dir", str(tmp_path / "q")],
        capture_output=True,
        check=True,
    )

    found = json.loads(ended.stdout)
    assert found["capped"]
    assert 0 < found["done"] < 1_000_000
