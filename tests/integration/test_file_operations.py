"""What a worker costs: few file operations, and its throughput beside other queues."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_toolkit.run import Run

ITEMS = 10
MOST = 555
"""File operations of a worker and its items, beyond those of an interpreter that does nothing."""
NOOP = "hpc_toolkit.science.workloads.synthetic:Noop"


def file_operations(trace: Path, *words: str) -> int:
    """System calls with a file, of a Python program and its children."""
    environ = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("HPCTK_", "SLURM_")) and name != "PYTHONDONTWRITEBYTECODE"
    }
    # Compiled modules are kept as in an installed package, wherever this one may be written.
    environ["PYTHONPYCACHEPREFIX"] = str(trace.parent / "compiled")
    argv = ["strace", "-f", "-o", str(trace), "-e", "trace=%file", sys.executable, *words]
    subprocess.run(argv, cwd=trace.parent, env=environ, check=True, stdout=subprocess.DEVNULL)
    lines = trace.read_text(encoding="utf-8", errors="replace").splitlines()
    # getcwd(2) asks no filesystem.
    others = r" resumed>|^\d+ +(\+\+\+|---|getcwd)"
    return sum(not re.search(others, line) for line in lines)


def operations_of_work(trace: Path, name: str, bare: int) -> int:
    Run.create(name, [{"i": number} for number in range(ITEMS)], workload=NOOP)
    found = file_operations(trace, "-m", "hpc_toolkit", "work", name, "--workers", "1")
    assert Run.open(name).status().complete
    return found - bare


def test_a_worker_needs_few_file_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "trace"
    bare = file_operations(trace, "-c", "pass")
    operations_of_work(trace, "first", bare)  # compiles the modules

    # On a busy machine workers wait longer and look more often: the least of some runs counts.
    runs = (operations_of_work(trace, f"run{number}", bare) for number in range(10))
    least = next((found for found in runs if found <= MOST), MOST + 1)

    assert 0 < least <= MOST


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
