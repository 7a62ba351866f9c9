"""Shared fixtures."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.toyrun import ToyRun

# A loaded machine must not fail a test, and a failing example must be found again tomorrow.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("search", settings.get_profile("default"), derandomize=False)
FOUND = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("mutants", settings.get_profile("default"), phases=FOUND)
# Otherwise a failed assertion in these modules shows no values.
pytest.register_assert_rewrite("tests.integration.realrun", "tests.slurm.templatesite")
_SITE = ("HPCTK_", "SLURM", "SBATCH_", "SRUN_", "CC_CLUSTER")

# Threads of OpenMP that wait for each other spin: fifteen times a core's work where others use it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure() -> None:
    """Let SIGTERM end the tests as Ctrl-C does: otherwise labs and workers would outlive them.

    A shell that starts the tests in the background makes them ignore Ctrl-C, and every process that
    they start would inherit that.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of a GPU where there is none."""
    out = [item for item in items if item.get_closest_marker("cuda")]
    if out and not _has_gpu():
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test was skipped and HPCTK_FORBID_SKIP is set."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("HPCTK_FORBID_SKIP") and reporter is not None:
        skipped = reporter.stats.get("skipped", [])
        if skipped:
            reporter.write_line(f"{len(skipped)} tests were skipped, which is forbidden here")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _no_site(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the cluster files, job and Slurm of the user who starts the tests."""
    for name in list(os.environ):
        if name.startswith(_SITE) and name != "HPCTK_FORBID_SKIP":
            monkeypatch.delenv(name)
    nothing = tmp_path_factory.getbasetemp() / "no-settings"
    nothing.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(nothing))
    monkeypatch.setenv("HPCTK_SITE_CLUSTERS", str(nothing))


@pytest.fixture
def fast_dir() -> Iterator[Path]:
    """A directory in memory if possible, where thousands of syncs cost nothing."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture
def toy(fast_dir: Path) -> ToyRun:
    """A sealed run of one unit of four items."""
    return ToyRun(fast_dir / "run")
