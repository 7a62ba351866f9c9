"""Real shared filesystems for the tests below, each in namespaces of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.lab.packages import search_path
from tests.sharedfs.filesystems import KINDS, Filesystem, mounted
from tests.sharedfs.hosts import PROGRAMS, NoHostsError
from tests.sharedfs.outcome import COLUMNS, MEASURED, SAID, text_table
from tests.sharedfs.plays import Plays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.sharedfs.outcome import Outcome
    from tests.sharedfs.rehearsal import Size
    from tests.sharedfs.scenarios import Scenario

    Rehearse = Callable[[Scenario, Size, str], Outcome]
    Reports = Callable[[Size, str], dict[str, Any]]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what every scenario came to."""
    if MEASURED:
        terminalreporter.section("measured on shared filesystems")
        rows = [found.cells(name, SAID.get(name, "-"), title) for name, title, found in MEASURED]
        for line in text_table([COLUMNS, *rows]):
            terminalreporter.write_line(line)


def _missing() -> str:
    """Why there can be no shared filesystem here; "" if there can."""
    wanted = [*PROGRAMS, *(program for kind in KINDS for program in kind.programs)]
    missing = [one for one in wanted if shutil.which(one, path=search_path()) is None]
    if missing:
        return f"{', '.join(missing)} missing: run .ci/system"
    if not Path("/dev/fuse").exists():
        return "there is no /dev/fuse"
    return "" if os.geteuid() == 0 else "only root can mount filesystems"


@pytest.fixture(scope="session")
def filesystems(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Filesystem]]:
    """All of them, started at the same time and taken down at the end."""
    if why := _missing():
        pytest.skip(f"no shared filesystems: {why}")
    try:
        with mounted(tmp_path_factory.mktemp("hosts")) as found:
            yield found
    except NoHostsError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def plays(
    filesystems: dict[str, Filesystem], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Plays]:
    found = Plays(filesystems, tmp_path_factory.mktemp)
    yield found
    found.close()


@pytest.fixture
def rehearse(plays: Plays) -> Rehearse:
    """What a scenario of a size came to on one filesystem."""
    return plays.outcome


@pytest.fixture
def reports(plays: Plays) -> Reports:
    """What doctor says of a filesystem."""
    return plays.report
