"""What a test run that is asked to end still does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TEST = """
import time
from pathlib import Path
import pytest

@pytest.fixture(scope="session")
def lab():
    Path("up").touch()
    yield
    Path("down").touch()

def test_that_takes_its_time(lab):
    time.sleep(60)
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
        end = time.monotonic() + 60
        while not (tmp_path / "up").exists() and time.monotonic() < end:
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 2  # interrupted

    assert (tmp_path / "down").exists()
