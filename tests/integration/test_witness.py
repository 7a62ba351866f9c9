"""A question that Slurm does not answer, in real processes; squeue is a stand-in that hangs."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.clock import SystemClock
from hpc_toolkit.layout import RunPaths
from hpc_toolkit.queue.presence import Presence, PresenceFile
from hpc_toolkit.witness import Witness
from tests.integration.realrun import lives, wait_until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_a_question_without_an_answer_ends_with_the_worker_that_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    asked = tmp_path / "asked"
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/sh\necho $$ > {asked}.new\nmv {asked}.new {asked}\nexec sleep 60\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    paths = RunPaths(tmp_path)
    paths.make([])
    silent = Presence(worker="a", host="n3", boot="b", pid=1, rank=0, job="17")
    PresenceFile(paths.worker("a"), silent)

    worker = os.fork()
    if worker == 0:
        witness = Witness(paths.root, SystemClock())
        witness.ask([silent])
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
    wait_until(lambda: not lives(pid), "squeue to end", limit_s=10)
