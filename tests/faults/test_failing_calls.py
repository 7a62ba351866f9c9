"""Whole runs while calls of the C library fail below the run, in every process of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hpc_toolkit.run import Run

HERE = Path(__file__).parent
WORKLOAD = """
import os
from pathlib import Path

def note(name, text):
    fd = os.open(Path(os.environ["NOTES"]) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, f"{text}\\n".encode())
    os.close(fd)

class Twice:
    def load(self, group):
        note("loads", os.getpid())

    def run(self, context, items):
        for item in items:
            note("items", item["id"])
            yield {"twice": 2 * item["id"]}
"""


@pytest.fixture(scope="session")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that fails calls."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing")
    built = tmp_path_factory.mktemp("failing") / "failing.so"
    argv = ["gcc", "-O1", "-Wall", "-shared", "-fPIC", "-o", str(built), str(HERE / "failing.c")]
    subprocess.run([*argv, "-ldl"], check=True)
    return built


@pytest.mark.parametrize(
    ("rate", "items"),
    [
        (0.01, 100),
        *(pytest.param(rate, 500, marks=pytest.mark.soak) for rate in (0.002, 0.01, 0.03)),
    ],
)
def test_each_item_counts_once_while_calls_fail(
    failing: Path, tmp_path: Path, rate: float, items: int
) -> None:
    (tmp_path / "twice.py").write_text(WORKLOAD)
    notes, root = tmp_path / "notes", tmp_path / "run"
    notes.mkdir()
    listed = tmp_path / "items.jsonl"
    listed.write_text("".join(json.dumps({"id": n}) + "\n" for n in range(items)))
    env = {**os.environ, "NOTES": str(notes), "PYTHONPATH": str(tmp_path)}
    hpctk = [sys.executable, "-m", "hpc_toolkit"]
    init = [*hpctk, "init", str(root), "--workload", "twice:Twice", "--items", str(listed)]
    subprocess.run(init, check=True, cwd=tmp_path, env=env)

    broken = {**env, "LD_PRELOAD": str(failing), "FAILING_RATE": str(rate)}
    broken["FAILING_ROOT"] = str(root)
    work = [*hpctk, "work", str(root), "--workers", "3", "--lease", "5s"]
    starts = 0
    while not Run.open(root).status().complete:
        starts += 1
        assert starts < 60, "the run does not end"
        subprocess.run(work, cwd=tmp_path, env=broken, check=False)

    rows = Run.open(root).table().rows
    assert [(row["item"]["id"], row["value"]) for row in rows] == [
        (n, {"twice": 2 * n}) for n in range(items)
    ]
    times = Counter((notes / "items").read_text().split())
    loads = len((notes / "loads").read_text().split())
    again = sum(times.values()) - items
    print(f"{rate:.1%}: {starts} starts, {loads} loads, {again} items run again")
    assert loads <= 3 * starts, "an error of the filesystem cost a loaded model"
    assert sum(row["attempts"] - 1 for row in rows) <= again
