"""The command ``hpctk report``, and the report that a campaign writes at its end."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

from hpc_toolkit.cli.arguments import (
    RunArgument,
    open_run,
    outputs,
    switch,
    value,
    write_out,
    write_outputs,
)
from hpc_toolkit.cli.help import LIST, Commands
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.submit.reporting import report_of
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from hpc_toolkit.run import Run

_SUFFIXES = (".html", ".md")


def register(app: Commands) -> None:
    app.add(report, panel=LIST)


def report(
    run: RunArgument = None,
    *,
    out: Annotated[
        list[str] | None,
        value(
            "FILE",
            "Write .html, .md or -; may be repeated. [default: RUN/report.html]",
            "--out",
            "-o",
        ),
    ] = None,
    text: Annotated[bool, switch("--text", "Print Markdown instead, as -o - does.")] = False,
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
    given = out or (["-"] if text else [str(found.paths.report)])
    paths = outputs((one for one in given if one != "-"), _SUFFIXES)
    for path in paths if text else ():
        if path.suffix != ".md":
            message = f"--text: {path} would be Markdown with another suffix"
            raise ConfigError(message, hint="name a file that ends in .md, or leave out --text")
    as_markdown = partial(report_of, found, markdown=True)
    write_outputs(paths, {".html": partial(report_of, found), ".md": as_markdown})
    if "-" in given:
        sys.stdout.flush()
        # Whatever the locale, the report is UTF-8.
        sys.stdout.buffer.write(as_markdown().encode())
        return
    for path in paths:
        print(path)


def write_at_end(run: Run) -> list[str]:
    """Write the report of a run that has ended into it; never fails.

    Returns a line that names the file; none if it could not be written.
    """
    path = run.paths.report
    try:
        write_out(path, report_of(run))
    except Exception as error:  # noqa: BLE001 - the results are complete, and matter more
        note(f"{path} was not written: {type(error).__name__}: {error}", "warning")
        return []
    return [f"report          {path}"]
