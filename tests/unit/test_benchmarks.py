"""The queue that benchmarks compare with hpctk really runs every item."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
