"""Real shared filesystems for the tests below, each in namespaces of its own."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.lab.commands import search_path
from tests.sharedfs.filesystems import Filesystem, mounted
from tests.sharedfs.hosts import PROGRAMS, NoHostsError
from tests.sharedfs.outcome import COLUMNS, MEASURED, NOTED, SAID, text_table
from tests.sharedfs.plays import FUSE_KINDS, NFS_KINDS, Plays

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sharedfs.outcome import Outcome
    from tests.sharedfs.rehearsal import Size
    from tests.sharedfs.scenarios import Scenario

    Kinds = tuple[type[Filesystem], ...]

NFS_NAMES = {kind.name for kind in NFS_KINDS}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests on NFS, which run beside those on other filesystems."""
    for item in items:
        name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        if name in NFS_NAMES or "nfs" in getattr(item, "fixturenames", ()):
            item.add_marker("nfs")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what every scenario came to."""
    if MEASURED:
        terminalreporter.section("measured on shared filesystems")
        rows = [found.cells(name, SAID.get(name, "-"), title) for name, title, found in MEASURED]
        for line in text_table([COLUMNS, *rows]):
            terminalreporter.write_line(line)
    for line in NOTED:
        terminalreporter.write_line(line)


def _missing(*programs: str) -> list[str]:
    """Those of the programs that are not installed."""
    return [one for one in programs if shutil.which(one, path=search_path()) is None]


def _impossible(device: str) -> str:
    """Why there can be no shared filesystems here; "" if there can."""
    if missing := _missing(*PROGRAMS):
        return f"{', '.join(missing)} missing: run .ci/system"
    if not Path(device).exists():
        return f"there is no {device}"
    return "" if os.geteuid() == 0 else "only root can mount filesystems"


def _selected(items: list[pytest.Item], kinds: Kinds) -> Kinds:
    """The installed kinds that tests of this session name; all, if a test asks for all."""
    found = tuple(one for one in kinds if not _missing(*one.programs))
    if any({"filesystems", "nfs"} & {*getattr(item, "fixturenames", ())} for item in items):
        return found
    names = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    return tuple(one for one in found if one.name in names)


def _mounted(
    kinds: Kinds, device: str, request: pytest.FixtureRequest, directory: Path
) -> Iterator[dict[str, Filesystem]]:
    if why := _impossible(device):
        pytest.skip(f"no shared filesystems: {why}")
    try:
        with mounted(directory, _selected(request.session.items, kinds)) as found:
            yield found
    except NoHostsError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def filesystems(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Filesystem]]:
    """Those in user space, started at the same time and taken down at the end."""
    yield from _mounted(FUSE_KINDS, "/dev/fuse", request, tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="session")
def nfs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Filesystem]]:
    """The kernel's NFS between kernels."""
    yield from _mounted(NFS_KINDS, "/dev/net/tun", request, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def fuse_plays(
    filesystems: dict[str, Filesystem], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Plays]:
    with closing(Plays(filesystems, tmp_path_factory.mktemp)) as found:
        yield found


@pytest.fixture(scope="session")
def nfs_plays(
    nfs: dict[str, Filesystem], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Plays]:
    with closing(Plays(nfs, tmp_path_factory.mktemp)) as found:
        yield found


@pytest.fixture
def filesystem(request: pytest.FixtureRequest, name: str) -> Filesystem:
    """The one of this name, mounted; skips the test where its programs are missing."""
    group = request.getfixturevalue("nfs" if name in NFS_NAMES else "filesystems")
    found: Filesystem | None = group.get(name)
    if found is None:
        pytest.skip(f"programs of {name} are missing: add them to .ci/system and run it")
    return found


@pytest.fixture
def plays(request: pytest.FixtureRequest, filesystem: Filesystem, name: str) -> Plays:
    found: Plays = request.getfixturevalue("nfs_plays" if name in NFS_NAMES else "fuse_plays")
    return found


@pytest.fixture
def found(plays: Plays, scenario: Scenario, size: Size, name: str) -> Outcome:
    """What a scenario of a size came to on one filesystem."""
    return plays.outcome(scenario, size, name)
