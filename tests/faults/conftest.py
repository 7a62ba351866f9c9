"""Calls the command line, and prints what was tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_toolkit.queue import log
from tests.faults import tally
from tests.faults.cut import Commands, Cut


@pytest.fixture
def call(fast_dir: Path) -> Commands:
    """The command line beside a list of one item; it waits for a payload as long as a test can."""
    (fast_dir / "more.jsonl").write_text('{"id": 10}\n')

    def begin(_cut: Cut) -> None:
        log._TRIES = 2

    return Commands(fast_dir, begin)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    table = tally.lines()
    if table:
        terminalreporter.section("points tried, without a failure in a sweep that is listed")
        for line in table:
            terminalreporter.write_line(line)
