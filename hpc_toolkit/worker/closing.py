"""The line at the end of work. It imports little, because every 'hpctk work' prints it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpc_toolkit.queue.state import ItemState
from hpc_toolkit.system.quantities import format_duration
from hpc_toolkit.worker.pausing import pause_reason

if TYPE_CHECKING:
    from hpc_toolkit.queue.view import RunView


def closing(view: RunView, given: str, *, campaign: bool = False) -> str:
    """Return what happened in one line, and the commands to go on with.

    ``given`` is the run's path as messages name it. The coordinator of a campaign gathers itself.
    """
    view.poll()
    run, total, failed, left = _quoted(given), 0, 0, 0
    for stage in view.stages.values():
        for unit in stage.state.units.values():
            total += unit.unit.count
            if unit.clean is None:
                states = [state for _, state in stage.states(unit)]
                failed += states.count(ItemState.FAILED)
                left += states.count(ItemState.PENDING)
    items = f"{total:,} item{'s' * (total != 1)}"
    if view.complete and failed:
        return f"{given}: {failed:,} of {items} failed: hpctk status {run}; hpctk retry {run}"
    if view.complete:
        done = view.throughput
        took = f" in {format_duration(done.until - done.since)}" if done.until else ""
        return f"{given}: {items} done{took}{'' if campaign else f': hpctk gather {run}'}"
    reasons = [reason for stage in view.stages.values() if (reason := pause_reason(stage))]
    if reasons:
        return f"{given}: paused: {reasons[0]}; fix the cause, then hpctk retry {run}"
    if not left:
        return f"{given}: all {items} of an open list are finished: hpctk status {run}"
    return f"{given}: {left:,} of {items} left: hpctk status {run}"


def _quoted(path: str) -> str:
    if re.fullmatch(r"[\w@%+=:,./-]+", path, re.ASCII):
        return path
    import shlex  # most paths do without it

    return shlex.quote(path)
