"""The command ``hpctk report``, and the report that a campaign writes at its end."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from hpc_toolkit.cli.arguments import RunArgument, check_out, open_run, switch, value, write_out
from hpc_toolkit.cli.help import LIST
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import typer

    from hpc_toolkit.report.page import Section
    from hpc_toolkit.report.runreport import RunFacts
    from hpc_toolkit.report.runtables import Job
    from hpc_toolkit.results.activity import Activity
    from hpc_toolkit.results.status import Status
    from hpc_toolkit.run import Run

T = TypeVar("T")
_SUFFIXES = (".html", ".md")
_FAILURES = 20
_SCRIPTS, _SCRIPT_BYTES = 20, 1 << 16
_READING = (OSError, HpcToolkitError, ValueError, KeyError, RecursionError)


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=LIST)(report)


def report(
    run: RunArgument = None,
    *,
    out: Annotated[
        str | None,
        value("FILE", "File to write, .html or .md. [default: RUN/report.html]", "--out", "-o"),
    ] = None,
    text: Annotated[bool, switch("--text", "Print the report as Markdown instead.")] = False,
) -> None:
    """Write a report of a run to one file, and print its path.

    The report shows what happened and what to do next: throughput, workers, lost time, durations,
    failures, jobs, settings and versions. It works while the run goes on, and needs no network.

    Examples:
        hpctk report runs/eval
        hpctk report runs/eval -o eval.md
        hpctk report runs/eval --text | less
    """
    found = open_run(run)
    path = found.paths.report if out is None else Path(out)
    if text and out is None:
        sys.stdout.write(made(found, markdown=True))
        return
    check_out(path, _SUFFIXES)
    write_out(path, made(found, markdown=text or path.suffix == ".md"))
    print(path)


def made(run: Run, *, markdown: bool = False) -> str:
    """The report of a run as the text of a file."""
    from hpc_toolkit.report.page import as_html, as_markdown
    from hpc_toolkit.report.runreport import sections, title

    facts = read_facts(run)
    form = as_markdown if markdown else as_html
    return form(title(facts), sections(facts))


def write_at_end(run: Run) -> list[str]:
    """Write the report of a run that has ended into it; never fails.

    Returns a line that names the file; none if it could not be written.
    """
    path = run.paths.report
    try:
        write_out(path, made(run))
    except Exception as error:  # noqa: BLE001 - the results are complete, and matter more
        note(f"{path} was not written: {type(error).__name__}: {error}", "warning")
        return []
    return [f"report          {path}"]


class _Parts:
    """Reads the parts of a run; what cannot be read is named, and the rest is reported."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def read(self, what: str, reader: Callable[[], T], nothing: T) -> T:
        try:
            return reader()
        except _READING as error:
            self.problems.append(f"{what} ({type(error).__name__}: {error})")
            return nothing


def read_facts(run: Run) -> RunFacts:
    """Read what a report needs; a part that cannot be read is named in ``problems``."""
    from hpc_toolkit.report.runreport import RunFacts
    from hpc_toolkit.results.failures import group_failures
    from hpc_toolkit.results.loads import read_loads

    parts, view = _Parts(), run.view
    status, made_at = _status(run), time.time()
    found = parts.read("the timeline of the workers", lambda: _activity(run), None)
    loads = None
    if found is not None:
        line = found.timeline
        loads = parts.read("the CPUs and GPUs", lambda: read_loads(run.paths, line), None)
    return RunFacts(
        status=status,
        manifest=run.manifest,
        made=made_at,
        activity=found,
        loads=loads,
        failures=parts.read(
            "the failures", lambda: group_failures(view, view.presences(), most=_FAILURES), []
        ),
        jobs=parts.read("the jobs", lambda: _jobs(run), []),
        items=_items(run, found),
        scripts=parts.read("the scripts", lambda: list(_scripts(run)), []),
        search=parts.read("the search", lambda: _search(run), []),
        problems=parts.problems,
    )


def _status(run: Run) -> Status:
    from hpc_toolkit.submit.costs import cost_of

    try:
        status = run.status()
    except _READING:  # a forecast needs more of the run than its status
        status = run.status(forecast=False)
    with suppress(*_READING):
        cost = cost_of(run, status)
        status.cost = None if cost is None else asdict(cost)
    return status


def _activity(run: Run) -> Activity | None:
    from hpc_toolkit.results.activity import read_activity
    from hpc_toolkit.results.history import History
    from hpc_toolkit.system.clock import SystemClock

    history = History(run.view)
    history.refresh()
    return read_activity(history, SystemClock())


def _items(run: Run, found: Activity | None) -> dict[int, str]:
    from hpc_toolkit.results.explain import item_json

    items: dict[int, str] = {}
    for one in found.longest if found is not None else ():
        with suppress(*_READING, IndexError):
            stage = run.view.stages[one.stage]
            items[one.item] = item_json(stage, stage.unit(one.unit), one.position)
    return items


def _jobs(run: Run) -> list[Job]:
    from hpc_toolkit.report.runtables import Job
    from hpc_toolkit.submit.jobs import known_jobs

    return [
        Job(
            id=one.job,
            name=one.name,
            submitted=one.submitted if one.recorded else 0.0,
            by=one.by,
            array=one.array or "",
            script=one.script,
        )
        for one in known_jobs(run.paths)
    ]


def _scripts(run: Run) -> Iterator[tuple[str, str]]:
    """The submitted copies, the newest ones if they are many."""
    paths = sorted(run.paths.jobs.glob("*.sbatch"), key=lambda path: path.name)
    for path in paths[-_SCRIPTS:]:
        with suppress(OSError), path.open("rb") as file:
            yield path.name, file.read(_SCRIPT_BYTES).decode(errors="replace")


def _search(run: Run) -> list[Section]:
    if run.manifest.campaign is None:
        return []
    from hpc_toolkit.campaign import searchreport
    from hpc_toolkit.engines.localcampaign import campaign_of
    from hpc_toolkit.submit.costs import worker_price

    return searchreport.sections(run.view, campaign_of(run), worker_price(run))
