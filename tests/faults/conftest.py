"""Prints what was tried."""

from __future__ import annotations

import pytest

from tests.faults import tally


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    table = tally.lines()
    if table:
        terminalreporter.section("points tried, without a failure in a sweep that is listed")
        for line in table:
            terminalreporter.write_line(line)
