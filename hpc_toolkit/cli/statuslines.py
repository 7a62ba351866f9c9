"""How a run stands, as the commands show it to people."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpc_toolkit.system.quantities import format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.results.status import Status
    from hpc_toolkit.slurm.records import JobRecord

_EXAMPLE_CHARS = 80


def status_lines(now: Status, jobs: Sequence[JobRecord] = ()) -> list[str]:
    """A run's status as people read it."""
    lines, errors = status_parts(now, jobs)
    return lines + errors


def status_parts(
    now: Status, jobs: Sequence[JobRecord] = (), *, verbose: bool = False
) -> tuple[list[str], list[str]]:
    """The same in two parts: how it stands, then what was found wrong.

    Args:
        verbose: have a line for each living worker that says what it has.
    """
    from hpc_toolkit.cli.joblines import job_lines

    lines = [f"{now.run}: {_headline(now)}"]
    width = max(len(name) for name in (*now.stages, "workers"))
    for name, counts in now.stages.items():
        finished = counts.done + counts.failed
        share = f"{100 * finished / counts.total:3.0f}%" if counts.total else "  - "
        parts = [f"{counts.done} done"]
        named = ("failed", "leased", "pending", "retried", "duplicates")
        parts += [f"{getattr(counts, key)} {key}" for key in named if getattr(counts, key)]
        opened = "" if counts.sealed else "  (open for more)"
        lines.append(f"  {name:<{width}}  {share} of {counts.total}: {', '.join(parts)}{opened}")
    crew = [f"{now.workers.alive} alive"]
    crew += [f"{now.draining} draining"] if now.draining else []
    crew += [f"{now.workers.finished} finished"] if now.workers.finished else []
    crew += [f"{now.workers.dead} dead"] if now.workers.dead else []
    crew += [f"{now.deaths} deaths seen"] if now.deaths else []
    crew += not_shown(now)
    lines.append(f"  {'workers':<{width}}  {', '.join(crew)}")
    lines += place_lines(now) if verbose else []
    lines += job_lines(jobs)
    if now.reason:
        lines.append(f"  {'why':<{width}}  {now.reason}")
    if now.doctor:
        lines.append(f"  {'doctor':<{width}}  {now.doctor}")
    errors = [f"  {'warning':<{width}}  {warning}" for warning in now.warnings[:5]]
    errors += [
        f"  {'failure':<{width}}  {one['items']} x {one['error']}: {_short(one['example'])}"
        for one in now.failures
    ]
    return lines, errors


def place_lines(now: Status) -> list[str]:
    """A line for each living worker: what it had when it began."""
    from hpc_toolkit.system.binding import Place

    return [f"    {worker}: {Place.from_record(record)}" for worker, record in now.places.items()]


def _short(item: dict[str, Any]) -> str:
    text = json.dumps(item, ensure_ascii=False)
    return text if len(text) <= _EXAMPLE_CHARS else f"{text[: _EXAMPLE_CHARS - 3]}..."


def _headline(now: Status) -> str:
    if now.complete:
        failed = failed_items(now)
        return f"complete, {failed} failed" if failed else "complete"
    if now.rate_per_s > 0:
        rate = now.rate_per_s
        speed = f"{rate:.3g} items/s" if rate >= 0.1 else f"{rate * 3600:.3g} items/h"
        return f"{speed}, about {format_duration(now.eta_s or 0.0)} left"
    return "nothing moves" if now.reason else "working"


def not_shown(now: Status) -> list[str]:
    """That results are missing here which workers told of; [] if none are."""
    # What a complete run does not show are releases and duplicates.
    late = 0 if now.complete else now.old_copies
    return [f"{late} with results not shown here yet"] if late else []


def failed_items(now: Status) -> int:
    """How many items failed, in all stages."""
    return sum(counts.failed for counts in now.stages.values())
