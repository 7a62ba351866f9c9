"""Real shared filesystems for the tests below, each in namespaces of its own."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.lab.packages import search_path
from tests.sharedfs.filesystems import KINDS, Filesystem
from tests.sharedfs.hosts import PROGRAMS, Hosts, HostsError
from tests.sharedfs.outcome import HEADER, MEASURED, Outcome
from tests.sharedfs.rehearsal import Rehearsal, Size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.sharedfs.scenarios import Scenario

    Rehearse = Callable[[Scenario, Size, str], Outcome]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what every scenario came to."""
    if MEASURED:
        terminalreporter.section("measured on shared filesystems")
        for line in (*HEADER, *MEASURED):
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
    all_hosts = {kind.name: Hosts(tmp_path_factory.mktemp("hosts")) for kind in KINDS}
    try:
        for hosts in all_hosts.values():
            try:
                hosts.open()
            except HostsError as error:
                pytest.skip(str(error))
        found = {kind.name: kind(all_hosts[kind.name]) for kind in KINDS}
        with ThreadPoolExecutor() as threads:
            list(threads.map(Filesystem.start, found.values()))
        yield found
    finally:
        for hosts in all_hosts.values():
            hosts.close()


@pytest.fixture(scope="session")
def rehearse(
    filesystems: dict[str, Filesystem], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rehearse]:
    """What a scenario of a size came to on one filesystem.

    It is played on all of them at the same time, since it consists of waiting.
    """
    futures: dict[tuple[str, Size, str], Future[Outcome]] = {}
    threads = ThreadPoolExecutor()

    def play(scenario: Scenario, size: Size, name: str) -> Outcome:
        title = scenario.__name__
        cwd = tmp_path_factory.mktemp(f"{title}-{name}")
        rehearsal = Rehearsal(filesystems[name], cwd, size, f"{title}-{size.items}")
        try:
            outcome = scenario(rehearsal)
        finally:
            rehearsal.close()
        MEASURED.append(outcome.line(name, title.replace("_", " ")))
        return outcome

    def result(scenario: Scenario, size: Size, name: str) -> Outcome:
        if (scenario.__name__, size, name) not in futures:
            for each in filesystems:
                key = (scenario.__name__, size, each)
                futures[key] = threads.submit(play, scenario, size, each)
        return futures[scenario.__name__, size, name].result()

    yield result
    threads.shutdown(wait=False, cancel_futures=True)
