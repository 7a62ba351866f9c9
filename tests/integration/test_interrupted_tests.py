"""What a test run that is asked to end still does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.integration.realrun import HANG_S, wait_until

REPOSITORY = Path(__file__).parents[2]
TEST = """
import time
from pathlib import Path
import pytest

@pytest.fixture(scope="session")
def lab():
    yield
    Path("down").touch()

def test_that_takes_its_time(lab):
    Path("up").touch()
    time.sleep(3600)
"""


def test_a_test_run_that_is_terminated_takes_down_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(TEST)
    argv = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    with subprocess.Popen(
        [*argv, "-c", "/dev/null", "--rootdir", ".", "test_long.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.DEVNULL,
    ) as run:
        try:
            wait_until((tmp_path / "up").exists, "the test to start")
            run.send_signal(signal.SIGTERM)
            assert run.wait(HANG_S) == 2  # interrupted
        finally:
            run.kill()

    assert (tmp_path / "down").exists()
