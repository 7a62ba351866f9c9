"""Expensive readings are repeated seldom."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hpc_toolkit.system.clock import Seldom
from tests.manualclock import ManualClock

if TYPE_CHECKING:
    import pytest


def test_a_reading_is_kept_for_twenty_times_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = ManualClock(), itertools.count()
    used = iter(float(second) for second in range(100))
    monkeypatch.setattr("time.process_time", lambda: next(used))
    one: Seldom[int] = Seldom(clock)

    def read(key: str = "") -> tuple[int, float]:
        return one.read(lambda: next(made), key)

    assert read() == (0, 0.0)
    clock.advance(19.0)
    assert read() == (0, 19.0)
    clock.advance(1.0)
    assert read() == (1, 0.0)
    assert read("other workers") == (2, 0.0)
