"""Collect what a report of a run shows, its search included, and write the page."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.results.activity import read_activity
from hpc_toolkit.results.distributions import ranges_of, read_loads
from hpc_toolkit.results.explain import group_failures, item_json
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.history import History
from hpc_toolkit.results.status import Beside
from hpc_toolkit.submit.jobs import cost_of, worker_price
from hpc_toolkit.submit.used import used_by
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.record import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_toolkit.report.page import Section
    from hpc_toolkit.report.runreport import RunFacts
    from hpc_toolkit.results.activity import Activity
    from hpc_toolkit.results.distributions import Range
    from hpc_toolkit.run import Run
    from hpc_toolkit.submit.jobs import Cost

T = TypeVar("T")
_FAILURES, _RESULTS = 20, 24
_READING = (
    *(OSError, HpcToolkitError, ValueError, KeyError, RecursionError),
    *(AttributeError, ArithmeticError, TypeError),
)


def report_of(run: Run, *, markdown: bool = False) -> str:
    """The report of a run as the text of a file."""
    from hpc_toolkit.report.page import as_html, as_markdown
    from hpc_toolkit.report.runreport import sections

    form = as_markdown if markdown else as_html
    facts = read_facts(run)
    return form(f"Run {facts.status.run}", sections(facts))


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

    def cost(*facts: Any) -> Cost | None:
        with suppress(*_READING):
            return cost_of(run.paths, *facts)
        return None

    def activity() -> Activity | None:
        history = History(view)
        history.refresh()
        return read_activity(history, SystemClock())

    view, beside = run.view, Beside(cost=cost)
    try:
        status = run.status(beside=beside)
    except _READING:  # a forecast needs more of the run than its status
        status = run.status(forecast=False, beside=beside)
    made_at = time.time()
    found = read("the timeline of the workers", activity, None)
    if found is not None and found.ahead:
        elapsed_s = found.timeline.end - found.timeline.begin
        status = replace(status, elapsed_s=elapsed_s)
    items: dict[int, str] = {}
    for one in found.longest if found is not None else ():
        with suppress(*_READING, IndexError):
            stage = view.stages[one.stage]
            items[one.item] = item_json(stage, stage.unit(one.unit), one.position)
    used = read("what the jobs used", lambda: used_by(run.paths), None)
    return RunFacts(
        used=used.line() if used is not None else "",
        status=status,
        manifest=run.manifest,
        made=made_at,
        activity=found,
        loads=read("the CPUs and GPUs", lambda: read_loads(run.paths), {}),
        failures=read(
            "the failures", lambda: group_failures(view, view.presences(), most=_FAILURES), []
        ),
        items=items,
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

    return searchreport.sections(run.view, settings_of(run.paths, run.manifest), worker_price(run))
