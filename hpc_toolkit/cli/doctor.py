"""The command that examines a directory: ``hpctk doctor``."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from hpc_toolkit.cli.arguments import JsonOption  # noqa: TC001 - typer reads it
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.doctor.report import Report

_WIDTH = 100


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(rich_help_panel="Look")(doctor)


def doctor(
    directory: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIR]",
            help="A run, or a directory for runs; by default the run as elsewhere, else here.",
        ),
    ] = None,
    pair: Annotated[
        str | None,
        typer.Option(metavar="OTHER_MOUNT", help="DIR through a second mount on this machine."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether a directory keeps what a run needs of it, and what is damaged in a run.

    Started by 'srun -N2 --ntasks-per-node=1', two nodes examine it together. What that proves of
    locks is kept in the run. Exits with 1 if anything is unsafe.
    """
    from hpc_toolkit.clock import SystemClock
    from hpc_toolkit.doctor.examine import examine
    from hpc_toolkit.doctor.findings import Verdict
    from hpc_toolkit.doctor.otherside import Step, join_step

    root = _directory(directory)
    other = _existing(Path(pair)) if pair is not None else None
    step = None if other is not None else Step.from_environ()
    # So that what was made is removed also when Slurm or a person ends it.
    signal.signal(signal.SIGTERM, _end)
    if step is not None and not step.leads:
        join_step(root, step)
        return
    report = examine(root, SystemClock(), other=other, step=step, around=True)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        print("\n".join(map(printable, report_lines(report))))
    sys.exit(1 if report.verdict is Verdict.UNSAFE else 0)


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def _directory(given: str | None) -> Path:
    from hpc_toolkit.layout import all_runs

    named = given or os.environ.get("HPCTK_RUN")
    if named:
        return _existing(Path(named))
    runs = all_runs()
    return runs[0] if len(runs) == 1 else Path()


def _existing(path: Path) -> Path:
    if not path.is_dir():
        message = f"{path} is not a directory"
        raise ConfigError(message, hint="name a run, or the directory in which runs shall be made")
    return path


def report_lines(report: Report) -> Iterator[str]:
    """A report as people read it; what is fine takes one line."""
    from hpc_toolkit.doctor.findings import Verdict

    yield f"{report.directory}: {report.verdict}"
    width = max(len(finding.check) for finding in report.findings)
    for finding in report.findings:
        start = f"  {finding.verdict:<8}{finding.check:<{width}}  "
        words = [finding.found]
        if finding.verdict is not Verdict.FINE:
            words += [finding.means] if finding.means else []
            words += [f"do: {finding.mend}"] if finding.mend else []
        for word in words:
            yield from textwrap.wrap(
                word,
                max(_WIDTH, len(start) + 40),
                initial_indent=start,
                subsequent_indent=" " * len(start),
                break_on_hyphens=False,
            )
            start = " " * len(start)
