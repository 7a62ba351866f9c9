"""The command that examines a directory: ``hpctk doctor``."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from hpc_toolkit.cli.arguments import JsonOption, argument, show, switch, value
from hpc_toolkit.cli.help import CHECK, Commands
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.rundir.layout import all_runs
from hpc_toolkit.rundir.trust import refuse_untrusted
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.terminal import note, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.doctor.findings import Report
    from hpc_toolkit.doctor.repairs import Plan

_WIDTH = 100


def register(app: Commands) -> None:
    app.add(doctor, panel=CHECK)


def doctor(
    directory: Annotated[
        str | None,
        argument(
            "[DIR]", "Run, or a directory for runs. [default: as RUN of 'hpctk status', else .]"
        ),
    ] = None,
    pair: Annotated[str | None, value("OTHER_MOUNT", "DIR on a second mount.")] = None,
    repair: Annotated[bool, switch("--repair", "Show repairs, and offer to make them.")] = False,
    yes: Annotated[bool, switch("--yes", "Repair without asking.", "-y")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a filesystem, node or run for problems.

    Started by 'srun -N2 --ntasks-per-node=1', two nodes check it together; the run keeps what this
    proves about file locks. Exits with 1 if something is unsafe.

    --repair checks only the run's files. A repair deletes nothing and loses no results.

    Examples:
        hpctk doctor runs/eval
        srun -N2 --ntasks-per-node=1 hpctk doctor /scratch/me/runs
        hpctk doctor runs/eval --repair
    """
    from hpc_toolkit.doctor.examine import examine
    from hpc_toolkit.doctor.findings import Verdict
    from hpc_toolkit.doctor.partner import Step, join_step

    root = _directory(directory)
    if repair:
        _repair(root, pair=pair, yes=yes, as_json=as_json)
        return
    if yes:
        raise ConfigError("--yes belongs to --repair", hint="add --repair, or leave it out")
    other = _existing(pair) if pair is not None else None
    step = None if other is not None else Step.from_environ()
    # So that what was made is removed also when Slurm or a person ends it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if step is not None and not step.leads:
        join_step(root, step)
        return
    report = examine(root, SystemClock(), other=other, step=step, around=True)
    show(report.to_json(), report_lines(report), as_json=as_json)
    sys.exit(1 if report.verdict is Verdict.UNSAFE else 0)


def _repair(root: Path, *, pair: str | None, yes: bool, as_json: bool) -> None:
    """Show the plan; do it where that is wanted. Exits with 1 if a part of it failed."""
    from hpc_toolkit.doctor.repairs import plan_repairs, repair_run

    if pair is not None:
        raise ConfigError("--pair and --repair exclude each other", hint="leave one of them out")
    plan = plan_repairs(root)
    asks = not (yes or as_json) and sys.stdin.isatty() and sys.stdout.isatty()
    _show_plan(root, plan, acts=yes or asks, as_json=as_json)
    done = bool(plan.repairs) and (yes or (asks and click.confirm("Do that?")))
    outcomes = list(repair_run(root, plan.repairs)) if done else []
    if as_json or done:
        repairs = [one.to_json() for one in plan.repairs]
        told = [{"name": name, "outcome": outcome or "done"} for name, outcome in outcomes]
        record = {"run": str(root), "repairs": repairs, "left": plan.left, "done": told}
        show(record, _outcome_lines(outcomes), as_json=as_json)
    if any(outcome.startswith("failed") for _, outcome in outcomes):
        sys.exit(1)


def _outcome_lines(outcomes: list[tuple[str, str]]) -> list[str]:
    other = [f"  {name}: {outcome}" for name, outcome in outcomes if outcome]
    return [f"done: {len(outcomes) - len(other)} of {len(outcomes)}", *other]


def _show_plan(root: Path, plan: Plan, *, acts: bool, as_json: bool) -> None:
    # Before a person reads through a plan that would then be refused.
    if plan.repairs and acts:
        refuse_untrusted(root)
    if not as_json:
        print("\n".join(map(printable, plan_lines(root, plan))), flush=True)
        if plan.repairs and not acts:
            note("nothing was changed; add --yes to repair")


def plan_lines(root: Path, plan: Plan) -> Iterator[str]:
    yield f"{root}: {'nothing to repair' if not plan.repairs else 'to repair'}"
    for repair in plan.repairs:
        yield from _wrapped("  ", [repair.words])
        yield from _wrapped("      ", [repair.why])
    for words in plan.left:
        yield from _wrapped("  left: ", [words])


def _directory(given: str | None) -> Path:
    if named := given or os.environ.get("HPCTK_RUN"):
        return _existing(named)
    runs = all_runs()
    return runs[0] if len(runs) == 1 else Path()


def _existing(given: str) -> Path:
    path = Path(given)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory", hint="name a run, or a directory for runs")
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
            words += [f"do: {finding.fix}"] if finding.fix else []
        yield from _wrapped(start, words)


def _wrapped(start: str, words: list[str]) -> Iterator[str]:
    """Sentences below each other, the first one behind ``start``."""
    indent = " " * len(start)
    for word in words:
        yield from textwrap.wrap(
            word,
            max(_WIDTH, len(start) + 40),
            initial_indent=start,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
        start = indent
