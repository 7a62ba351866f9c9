"""Whole runs while calls of the C library fail below the run, in every process of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hpc_toolkit.run import Run
from tests.toyrun import ToyRun

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


def failures(library: Path, root: Path, rate: float) -> dict[str, str]:
    return {"LD_PRELOAD": str(library), "FAILING_RATE": str(rate), "FAILING_ROOT": str(root)}


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

    broken = {**env, **failures(failing, root, rate)}
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


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_reading_command_gives_the_whole_answer_or_none(
    failing: Path, toy: ToyRun, tmp_path: Path, error: int
) -> None:
    worker = toy.worker("a")
    worker.work(toy.unit_name(0), i0="done", i1="done", i2="done", i3="done")
    worker.finish()
    root, out = toy.paths.root, tmp_path / "rows.jsonl"
    hpctk = [sys.executable, "-m", "hpc_toolkit"]
    env = {**os.environ, **failures(failing, root, 0.1), "FAILING_ERROR": str(error)}
    gather = [*hpctk, "gather", str(root), "-o", str(out)]
    subprocess.run(gather, check=True)
    whole, codes = out.read_bytes(), Counter[int]()
    for _ in range(8):
        out.unlink(missing_ok=True)
        for argv in (gather, [*hpctk, "status", str(root), "--json"]):
            ended = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
            assert ended.returncode in (0, 75), ended.stderr
            codes[ended.returncode] += 1
            if not ended.returncode and argv is not gather:
                assert json.loads(ended.stdout)["stages"]["items"]["done"] == 4
        assert not out.exists() or out.read_bytes() == whole
    print(codes)
