"""A question that Slurm does not answer, in real processes; squeue is a stand-in that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_toolkit.queue.presence import Presence, PresenceFile
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.worker.slurmliveness import SlurmLiveness
from tests.integration.realrun import lives, wait_until


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in, which then hangs, writes down its process."""
    asked = tmp_path / "asked"
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/sh\necho $$ > {asked}.new\nmv {asked}.new {asked}\nexec sleep 600\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    return asked


@pytest.fixture
def silent(tmp_path: Path) -> Presence:
    """A worker of a job, in a run at the test's own place."""
    paths = RunPaths(tmp_path)
    paths.make([])
    silent = Presence(worker="a", host="n3", boot="b", pid=1, rank=0, job="17")
    PresenceFile(paths.worker("a"), silent)
    return silent


@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_a_question_without_an_answer_ends_with_the_worker_that_asked(
    tmp_path: Path, asked: Path, silent: Presence, end: str
) -> None:
    worker = os.fork()
    if worker == 0:
        witness = SlurmLiveness(tmp_path, SystemClock())
        witness.ask([silent], silent, 0)
        wait_until(asked.exists, "squeue to start")
        if end == "leaves":
            witness.close()
            os._exit(0)
        signal.pause()
    wait_until(asked.exists, "squeue to start")
    if end == "is killed":
        os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)

    pid = int(asked.read_text())
    wait_until(lambda: not lives(pid), "squeue to end")


# The signal comes while the program starts, before anybody can know its number.
SIGNALLED = """
import os, runpy, signal, subprocess, sys, time
start = subprocess.Popen.__init__
def started(self, *words, **options):
    start(self, *words, **options)
    while not os.path.exists("asked"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen.__init__ = started
runpy.run_module("hpc_toolkit.worker.slurmliveness", run_name="__main__")
"""


def test_a_question_that_is_ended_while_it_starts_leaves_nothing_behind(
    tmp_path: Path, asked: Path, silent: Presence
) -> None:
    argv = [sys.executable, "-c", SIGNALLED, str(tmp_path), f"{silent.worker}:{silent.heartbeat}"]

    ended = subprocess.run(argv, cwd=tmp_path, check=False)

    pid = int(asked.read_text())
    try:
        assert ended.returncode == 0
        wait_until(lambda: not lives(pid), "squeue to end")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
