"""The benchmark beside other queues, at the smallest size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_benchmark_measures_ours_and_others_in_one_table(tmp_path: Path) -> None:
    argv = [sys.executable, "benchmarks/throughput.py", "--items", "60", "--workers", "2"]
    argv += ["--repeats", "1", "--peer-python", sys.executable, "--peer", "naive_filelock"]

    ended = subprocess.run(
        [*argv, "--dir", str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )

    rows = [line.split("|") for line in ended.stdout.splitlines() if line.startswith("| ")]
    assert [row[1].split()[0] for row in rows] == ["queue", "---", "hpctk", "naive_filelock"]
    for row in rows[2:]:
        assert [cell.strip() for cell in row[5:7]] == ["0", "0"]
    assert "60 no-op items, 2 workers" in ended.stdout
    assert list(tmp_path.iterdir()) == []
