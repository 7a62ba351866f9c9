"""What becomes of a campaign here when the process that decides fails. Workers are played."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.engines.localcampaign import work_campaign
from hpc_toolkit.errors import TRY_AGAIN, HpcToolkitError
from hpc_toolkit.worker.worker import WorkerOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FAILING = """\
#!/bin/sh
until [ -e {root}/workers-left ]; do sleep 0.01; done
exit 3
"""


@pytest.fixture
def told() -> Iterator[list[int]]:
    """The SIGTERMs that this process sends to itself."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose coordinator fails as soon as ``workers-left`` is there."""
    program = tmp_path / "coordinator"
    program.write_text(FAILING.format(root=tmp_path))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return tmp_path


class PlayedRun:
    """Workers that do what a test says."""

    def __init__(self, root: Path, work: Callable[[Callable[[], None]], int]) -> None:
        self.root = root
        self._work = work

    def work(self, _workers: int, _options: WorkerOptions, *, on_tick: Callable[[], None]) -> int:
        return self._work(on_tick)


def play(root: Path, work: Callable[[Callable[[], None]], int]) -> int:
    run: Any = PlayedRun(root, work)
    return work_campaign(run, 1, WorkerOptions())


def test_a_coordinator_that_is_killed_again_and_again_is_given_up_unless_it_lived_long(
    tmp_path: Path, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, starts = tmp_path / "coordinator", tmp_path / "starts"
    program.write_text(f"#!/bin/sh\necho >> {starts}\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    def drained(tick: Callable[[], None]) -> int:
        while not told:
            tick()
            if starts.exists() and len(starts.read_text()) >= long_lives:
                monkeypatch.setattr("hpc_toolkit.system.supervisor._LONG_S", 600.0)
        return TRY_AGAIN

    long_lives = 1000
    with pytest.raises(HpcToolkitError, match=r"the coordinator of .* ended with exit code 137"):
        play(tmp_path, drained)
    assert len(starts.read_text()) == 6

    starts.unlink()
    told.clear()
    long_lives = 10
    monkeypatch.setattr("hpc_toolkit.system.supervisor._LONG_S", -1.0)
    with pytest.raises(HpcToolkitError, match=r"the coordinator of .* ended with exit code 137"):
        play(tmp_path, drained)
    assert len(starts.read_text()) >= 14
