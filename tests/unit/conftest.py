"""What several of these tests begin with; a module may have one of its own by the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.campaign.settings import Campaign
from hpc_toolkit.rundir.layout import RunPaths
from tests.fakeslurm import Programs
from tests.manualclock import ManualClock
from tests.unit.playedcampaign import Play, Played


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run's directories, with nothing in them."""
    found = RunPaths(tmp_path)
    found.make([])
    return found


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Slurm's programs, of which a test adds those that are called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return Programs(folder, monkeypatch)


@pytest.fixture
def play(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Creates a campaign's run to play, from the campaign and what items give."""

    def created(campaign: Campaign, *value: Any, name: str = "r") -> Played:
        return Played(fast_dir / name, campaign, monkeypatch, *value)

    return created


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run below an empty directory, with no cluster recognized."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HPCTK_CLUSTER", "generic")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HPCTK_RUN", raising=False)
    return here
