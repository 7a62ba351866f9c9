"""The benchmark beside other queues, at the smallest size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def test_the_benchmark_measures_ours_and_others_in_one_table(tmp_path: Path) -> None:
    argv = [sys.executable, "benchmarks/throughput.py", "--items", "60", "--workers", "2"]
    argv += ["--repeats", "1", "--peer-python", sys.executable, "--peer", "naive_filelock"]

    ended = subprocess.run(
        [*argv, "--dir", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )

    rows = [line.split("|") for line in ended.stdout.splitlines() if line.startswith("| ")]
    assert [row[1].split()[0] for row in rows] == ["queue", "---", "hpctk", "naive_filelock"]
    for row in rows[2:]:
        assert [cell.strip() for cell in row[5:7]] == ["0", "0"]
    assert "60 no-op items, 2 workers" in ended.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak  # it tests a benchmark; test_dispatch_benchmark.py tests its parts
def test_the_benchmark_of_sizes_compares_lists_and_pools_and_storms_through_the_longest(
    tmp_path: Path,
) -> None:
    argv = [sys.executable, "benchmarks/sizes.py", "--sizes", "30", "600", "--workers", "2"]
    argv += ["--pools", "1", "2", "--adders", "2", "--batch", "3"]

    ended = subprocess.run(
        [*argv, "--dir", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )

    rows = [line.split("|") for line in ended.stdout.splitlines() if line.startswith("| ")]
    first = [row[1].strip() for row in rows]
    assert first == ["items", "---", "30", "600", "workers", "---", "1", "2", "adders", "---", "2"]
    assert "600 items and " in ended.stdout
    assert list(tmp_path.iterdir()) == []
