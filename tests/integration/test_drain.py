"""Asking workers to leave by a file (rule R16)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hpc_toolkit.run import Run
from tests.integration.realrun import wait_until

ROOT = Path(__file__).parents[2]


def test_drain_lets_the_workers_of_now_leave_and_later_ones_finish(tmp_path: Path) -> None:
    items = [{"id": i, "seconds": 0.1} for i in range(400)]
    run = Run.create(
        tmp_path / "r", items, workload="hpc_toolkit.science.workloads.synthetic:Sleep"
    )
    argv = [sys.executable, "-m", "hpc_toolkit", "work", str(run.root), "--workers", "2"]
    process = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_until(lambda: run.status().workers.alive == 2, "both workers")
        wait_until(lambda: run.status().stages["items"].done, "the first item")

        asked = run.drain()

        assert asked == 2
        assert process.wait() == 75
    finally:
        process.kill()
        process.wait()
    status = run.status()
    assert 0 < status.stages["items"].done < 400
    assert status.workers.finished == 2
    assert status.deaths == 0
    (request,) = run.paths.control.iterdir()
    assert json.loads(request.read_text())["request"] == "drain"
    assert run.work(8) == 0
    assert [row["attempts"] for row in run.results()] == [1] * 400
