"""Real processes for the tests, and a check that none of them stays."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.realrun import Hpctk


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with files of slow tests: one file is one process's, and the last should be short."""
    slow = {
        item.path
        for item in items
        if item.get_closest_marker("slow") and not item.get_closest_marker("soak")
    }
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def hpctk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hpctk]:
    """The command line in a directory of its own; fails the test that leaves a process behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)  # the sample workloads
    for name in ("HPCTK_RUN", "HPCTK_HOST", "HPCTK_DEADLINE", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    command = Hpctk(tmp_path)
    yield command
    left = command.leftovers()
    assert not left, f"processes were left behind: {left}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB."""
    if os.getuid() != 0:
        pytest.skip("mounting a small filesystem needs root")
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=755", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the trained checkpoint mini-s/step0 is, which no test changes."""
    from examples import mini_pythia

    path = str(tmp_path_factory.mktemp("checkpoints"))
    mini_pythia.train({"size": "mini-s", "root": path, "steps": [0], "texts": 40})
    return path
