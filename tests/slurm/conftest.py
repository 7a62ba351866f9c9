"""A real Slurm for the tests below: 8 nodes with 4 GPUs each, taken down at the end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import MEASURED, Rehearsal
from tests.slurm.templatesite import Site


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long tests, each process with some; then trainings, all of one process.

    Each process has an equal part of the list. One that has finished its part takes over tests at
    the end of another part: a long one there would run when nothing is left to run beside it.
    """
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    long = [item for item in items if item.get_closest_marker("long")]
    rest = [item for item in items if item not in long]
    items.clear()
    for parts in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), 0, -1):
        others = (len(long) + len(rest)) // parts - len(long[::parts])
        items += long[::parts] + rest[:others]
        del long[::parts], rest[:others]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Give what one of several processes measured to the one that shows it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["measured"] = MEASURED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what it measured from a process that has ended."""
    MEASURED.extend(getattr(node, "workeroutput", {}).get("measured", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the size of every scenario and what it came to."""
    if MEASURED:
        terminalreporter.section("measured on a real Slurm")
        for line in MEASURED:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def lab_directory() -> Iterator[Path]:
    """A short directory: paths of sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hpctk-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture(scope="session")
def lab(lab_directory: Path) -> Iterator[LabUnderTest]:
    """The lab of this session; tests that change it by more than jobs start their own."""
    with LabUnderTest(lab_directory / "lab") as started:
        yield started


@pytest.fixture
def site(lab: LabUnderTest, tmp_path: Path) -> Site:
    cwd = tmp_path / "it's a site"
    cwd.mkdir()
    return Site(lab, cwd)


@pytest.fixture
def desk(lab: LabUnderTest, tmp_path: Path) -> Site:
    """A site whose names need no quotes."""
    return Site(lab, tmp_path, "runs/a")


@pytest.fixture
def rehearsal(lab: LabUnderTest, tmp_path: Path) -> Rehearsal:
    return Rehearsal(lab, tmp_path)


@pytest.fixture(autouse=True)
def _settled_lab(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "lab" in request.fixturenames:
        request.getfixturevalue("lab").clear()
