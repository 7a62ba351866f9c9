"""Options of ``hpctk work`` that say what workers have, and what happens beside them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from hpc_toolkit.cli.working import monitored, read_shares, with_progress
from hpc_toolkit.run import Run
from hpc_toolkit.system.binding import Shares, limit_memory
from hpc_toolkit.system.ranks import RankInfo
from tests.toyrun import ToyRun
from tests.unit.jobcommands import call

ALONE = RankInfo()
IN_STEP = RankInfo(in_step=True, local_rank=1, rank=1, world_size=2)


def called(*words: object) -> tuple[int, str]:
    """Exit code and message of a command that is called in this process."""
    ended = call(*words)
    error = ended.exception
    if error is not None and not isinstance(error, SystemExit):
        return 1, str(error)
    return ended.exit_code, ended.output


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
