"""Processes of 'hpctk work': options, needs of the kernel, a coordinator that is killed."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_toolkit.cli.campaigns import work_campaign
from hpc_toolkit.cli.working import monitored, read_shares, with_progress
from hpc_toolkit.errors import TRY_AGAIN, HpcToolkitError
from hpc_toolkit.run import Run
from hpc_toolkit.system.binding import Shares, limit_memory
from hpc_toolkit.system.processes import readable
from hpc_toolkit.system.ranks import RankInfo
from hpc_toolkit.worker.worker import WorkerOptions
from tests.toyrun import ToyRun

MOST = 1024
"""Descriptors that select(2) knows."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe whose reading end has a number that select(2) does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= MOST:
        pytest.skip("this user may open no more than 1024 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MOST + 8), hard))
    read, write = os.pipe()
    high = fcntl.fcntl(read, fcntl.F_DUPFD, MOST)
    os.close(read)
    yield high, write
    os.close(high)
    os.close(write)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_readable_takes_the_descriptors_of_a_process_with_many_files(pipe: tuple[int, int]) -> None:
    read, write = pipe
    assert readable(read, timeout_s=0.0) == set()

    os.write(write, b"x")

    assert readable(read, timeout_s=10.0) == {read}


@pytest.fixture
def told() -> Iterator[list[int]]:
    """The SIGTERMs that this process sends to itself."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def test_a_coordinator_that_is_killed_again_and_again_is_given_up_unless_it_lived_long(
    tmp_path: Path, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, starts = tmp_path / "coordinator", tmp_path / "starts"
    program.write_text(f"#!/bin/sh\necho >> {starts}\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    def drained(_workers: int, _options: WorkerOptions, *, on_tick: Callable[[], None]) -> int:
        while not told:
            on_tick()
            if starts.exists() and len(starts.read_text()) >= long_lives:
                monkeypatch.setattr("hpc_toolkit.system.processes._LONG_S", 600.0)
        return TRY_AGAIN

    run: Any = SimpleNamespace(root=tmp_path, work=drained)
    long_lives = 1000
    with pytest.raises(HpcToolkitError, match=r"the coordinator of .* ended with exit code 137"):
        work_campaign(run, 1, WorkerOptions())
    assert len(starts.read_text()) == 6

    starts.unlink()
    told.clear()
    long_lives = 10
    monkeypatch.setattr("hpc_toolkit.system.processes._LONG_S", -1.0)
    with pytest.raises(HpcToolkitError, match=r"the coordinator of .* ended with exit code 137"):
        work_campaign(run, 1, WorkerOptions())
    assert len(starts.read_text()) >= 14


ALONE = RankInfo()
IN_STEP = RankInfo(in_step=True, local_rank=1, rank=1, world_size=2)


def test_shares_are_read_and_a_rank_of_slurm_takes_its_memory_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HPCTK_MEMORY_PER_WORKER", "")

    assert read_shares(2, 0.5, "1G", ALONE) == Shares(cpus=2, gpus=0.5, memory_bytes=1 << 30)
    assert os.environ["HPCTK_MEMORY_PER_WORKER"] == ""
    assert read_shares(None, None, "1G", IN_STEP) == Shares(memory_bytes=1 << 30)
    assert os.environ["HPCTK_MEMORY_PER_WORKER"] == str(1 << 30)


def test_the_limit_of_memory_holds_in_a_process_and_raises_there() -> None:
    child = os.fork()
    if child == 0:
        code = 2
        try:
            limit_memory({"HPCTK_MEMORY_PER_WORKER": str(1 << 30)})
            bytes(1 << 29)
            bytearray(3 << 29)
        except MemoryError:
            code = 0
        finally:
            os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_monitor_is_one_of_each_node_and_only_where_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTK_HOST", "n1")
    run = ToyRun(tmp_path / "run").reopen()

    def written(rank: RankInfo, *, wanted: bool) -> list[str]:
        with monitored(run.paths, rank, wanted=wanted):
            pass
        return [path.name for path in run.paths.logs.glob("monitor-*")]

    assert written(ALONE, wanted=False) == []
    assert written(IN_STEP, wanted=True) == []
    assert written(ALONE, wanted=True) == [f"monitor-n1-{os.getpid()}.jsonl"]


def test_a_run_that_cannot_be_read_at_the_end_leaves_the_exit_code_of_its_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.open(ToyRun(tmp_path / "run").root)
    # As root, no permission fails, and a run that was deleted looks like one without items.
    fails = partial(os.open, "/proc/self/mem/x", os.O_RDONLY)
    monkeypatch.setattr(run.view, "poll", fails)

    assert with_progress(run, lambda: 3) == 3
    assert f"{run.root}: cannot be read now: Not a directory" in capsys.readouterr().err
