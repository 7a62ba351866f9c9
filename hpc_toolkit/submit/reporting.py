"""Collect what a report of a run shows, and write the page."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.results.activity import Activity, read_activity
from hpc_toolkit.results.explain import group_failures
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.history import History
from hpc_toolkit.results.sums import Range, ranges_of
from hpc_toolkit.system.clock import SystemClock

if TYPE_CHECKING:
    from hpc_toolkit.report.page import Section
    from hpc_toolkit.report.runreport import RunFacts
    from hpc_toolkit.run import Run

T = TypeVar("T")
_FAILURES, _RESULTS = 20, 24
_READING = (
    *(OSError, HpcToolkitError, ValueError, KeyError, RecursionError),
    *(AttributeError, ArithmeticError, TypeError),
)


def report_of(run: Run) -> str:
    """The report of a run as the text of a file."""
    from hpc_toolkit.report.page import as_html
    from hpc_toolkit.report.runreport import sections

    facts = read_facts(run)
    return as_html(f"Run {facts.status.run}", sections(facts))


def read_facts(run: Run) -> RunFacts:
    """Read what a report needs; a part that cannot be read is named in ``problems``."""
    from hpc_toolkit.report.runreport import RunFacts

    problems: list[str] = []

    def read(what: str, reader: Callable[[], T], nothing: T) -> T:
        try:
            return reader()
        except _READING as error:
            problems.append(f"{what} ({type(error).__name__}: {error})")
            return nothing

    def activity() -> Activity | None:
        return read_activity(History(view), SystemClock())

    view = run.view
    try:
        status = run.status()
    except _READING:  # a forecast needs more of the run than its status
        status = run.status(forecast=False)
    made_at = time.time()
    found = read("the timeline of the workers", activity, None)
    return RunFacts(
        status=status,
        manifest=run.manifest,
        made=made_at,
        activity=found,
        failures=read(
            "the failures", lambda: group_failures(view, view.presences(), most=_FAILURES), []
        ),
        search=read("the search", lambda: _search(run), []),
        results=read("the results", lambda: _results(run), {}),
        problems=problems,
    )


def _results(run: Run) -> dict[str, Range]:
    """The numbers of a list's results; those of a search are scores, which the search compares."""
    if run.manifest.campaign is not None:
        return {}
    tables = (gather(run.view, name, partial=True, publish=False) for name in run.view.stages)
    return ranges_of(chain.from_iterable(tables), most=_RESULTS)


def _search(run: Run) -> list[Section]:
    if run.manifest.campaign is None:
        return []
    from hpc_toolkit.campaign import searchreport
    from hpc_toolkit.campaign.settings import settings_of

    return searchreport.sections(run.view, settings_of(run.paths, run.manifest))
