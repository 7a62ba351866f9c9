"""What several of these tests begin with; a module may have one of its own by the same name."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_toolkit.rundir.layout import RunPaths
from tests.manualclock import ManualClock


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run's directories, with nothing in them."""
    found = RunPaths(tmp_path)
    found.make([])
    return found


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()
