"""Shared fixtures."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.toyrun import ToyRun

if TYPE_CHECKING:
    from collections.abc import Iterator

# A loaded machine is no failure of the code, and a failing example must be found again tomorrow.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("search", settings.get_profile("default"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def fast_dir() -> Iterator[Path]:
    """A directory in memory where there is one: syncing thousands of times costs nothing there."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture
def toy(fast_dir: Path) -> ToyRun:
    """A sealed run of one unit of four items."""
    return ToyRun(fast_dir / "run")
