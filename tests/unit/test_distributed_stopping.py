"""When ranks look for one another's wish to stop, and what they make of deadlines and signals."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.distributed import StopSignal, stopping
from tests.manualclock import ManualClock


def looks(stop: StopSignal, clock: ManualClock, step_s: float, steps: int) -> list[int]:
    """The steps after which the ranks asked each other."""
    found: list[int] = []

    def highest(wanted: int, chosen: int) -> tuple[int, int]:
        found.append(made)
        return wanted, chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopping, "_highest", highest)
        for made in range(1, steps + 1):  # noqa: B007 - the number that is noted
            clock.advance(step_s)
            assert not stop.agreed()
    return found


def test_quick_steps_are_looked_after_about_once_a_second(clock: ManualClock) -> None:
    with StopSignal(clock=clock) as stop:
        found = looks(stop, clock, 0.01, 1_000)

    assert found[:4] == [1, 3, 7, 15]
    assert found[-1] - found[-2] == pytest.approx(100, abs=1)
    assert len(found) < 20


def test_slow_steps_are_looked_after_each(clock: ManualClock) -> None:
    with StopSignal(clock=clock) as stop:
        assert looks(stop, clock, 3.0, 5) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_stops_after_the_step_in_which_it_is_seen(
    number: signal.Signals, clock: ManualClock
) -> None:
    with StopSignal(clock=clock) as stop:
        clock.advance(5)
        assert not stop.agreed()
        os.kill(os.getpid(), number)
        clock.advance(5)
        assert stop.agreed()
        assert stop.agreed()
        assert stop.received == number


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


def test_a_deadline_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTK_DEADLINE", "tomorrow")

    with pytest.raises(ConfigError, match="HPCTK_DEADLINE is 'tomorrow'"):
        StopSignal()


def test_handlers_are_given_back_but_a_second_warning_kills_nobody_who_leaves() -> None:
    before: Any = signal.getsignal(signal.SIGUSR1)
    try:
        with StopSignal([signal.SIGUSR1]):
            assert signal.getsignal(signal.SIGUSR1) != before
        assert signal.getsignal(signal.SIGUSR1) == before

        with StopSignal([signal.SIGUSR1]) as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.agreed()
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
