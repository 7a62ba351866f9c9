"""Which rank a process is, and when ranks stop together."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.distributed import DistributedInfo, StopSignal
from hpc_toolkit.training.distributed import checkpoints as stopping
from tests.manualclock import ManualClock

LAUNCHED = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
LAUNCHED |= {"GROUP_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
# An agent that srun started is one task of a step, and its ranks have that task's variables.
AGENTS_TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}


def test_a_launchers_variables_name_rank_and_node_and_are_believed_before_slurm() -> None:
    info = DistributedInfo.from_environ({**AGENTS_TASK, **LAUNCHED, "SLURM_RESTART_COUNT": "3"})
    task = DistributedInfo.from_environ({**AGENTS_TASK, "SLURM_LOCALID": "1", "SLURM_NODEID": "0"})

    assert (info.rank, info.local_rank, info.world_size) == (5, 1, 8)
    assert (info.local_world_size, info.node_rank, info.restart, info.requeue) == (4, 1, 2, 3)
    assert (info.launched, info.is_main) == (True, False)
    assert (task.rank, task.local_rank, task.world_size, task.launched) == (1, 1, 2, True)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script outside of any step
        {**AGENTS_TASK, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    ],
)
def test_a_process_without_other_ranks_is_alone(environ: dict[str, str]) -> None:
    info = DistributedInfo.from_environ(environ)

    assert (info.rank, info.world_size, info.launched, info.is_main) == (0, 1, False, True)


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({**LAUNCHED, "RANK": "8"}, "rank 8 is not one of 8"),
        ({**LAUNCHED, "RANK": "first"}, "RANK is 'first'"),
        ({**LAUNCHED, "LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
    ],
)
def test_a_rank_that_cannot_be_is_named(environ: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        DistributedInfo.from_environ(environ)

    assert "not set" not in told or "hpctk launch" in caught.value.hint


def test_quick_steps_are_looked_after_about_once_a_second(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def highest(wanted: int, chosen: int) -> tuple[int, int]:
        found.append(made)
        return wanted, chosen

    monkeypatch.setattr(stopping, "_highest", highest)
    with StopSignal(clock=clock) as stop:
        for made in range(1, 1_001):  # noqa: B007 - the number that is noted
            clock.advance(0.01)
            assert not stop.agreed()

    assert found[:4] == [1, 3, 7, 15]
    assert found[-1] - found[-2] == pytest.approx(100, abs=1)
    assert len(found) < 20


def test_the_deadline_leaves_time_for_a_step_and_a_checkpoint(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTK_DEADLINE", str(clock.now + 100))
    stopped_at = 0.0
    with StopSignal(clock=clock, margin_s=10) as stop:
        start = clock.now
        while not stopped_at:
            clock.advance(4)
            if stop.agreed(saving_s=20):
                stopped_at = clock.now - start

    # 100 less 10 of margin, 20 of saving and 4 of the next step.
    assert stopped_at == pytest.approx(68)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_stops_and_a_second_warning_kills_nobody_who_leaves(
    number: signal.Signals, clock: ManualClock
) -> None:
    before: Any = signal.getsignal(number)
    try:
        with StopSignal(clock=clock) as stop:
            assert signal.getsignal(number) != before
            assert not stop.agreed()
        assert signal.getsignal(number) == before

        with StopSignal(clock=clock) as stop:
            os.kill(os.getpid(), number)
            clock.advance(5)
            assert stop.agreed()
            assert stop.agreed()
            assert stop.received == number
        os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)
