"""When a run pauses itself because of failures, and the line that 'hpctk work' ends with."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.state import ItemState
from hpc_toolkit.rundir.layout import WITHDRAWN
from hpc_toolkit.system.quantities import counted, format_duration

if TYPE_CHECKING:
    from hpc_toolkit.queue.view import RunView, StageView
    from hpc_toolkit.system.clock import Clock
    from hpc_toolkit.worker.hosthealth import HostWatch
    from hpc_toolkit.worker.membership import Counts

FIRST_ITEMS = 20
"""A run is paused if this many distinct items fail before any is done."""


class PauseRule:
    """Decides whether so many items fail that the run should pause."""

    def __init__(self, host_watch: HostWatch, clock: Clock, every_s: float) -> None:
        """``every_s``: minimum seconds between two looks at all failures during a unit run."""
        self._host_watch = host_watch
        self._clock = clock
        self._every_s = every_s
        self._judge_at = -math.inf
        self._judged = 0
        self.reason = ""
        """Why this worker must stop and exit with an error; "" if it need not."""

    def judge_if_due(self, stage: StageView | None, counts: Counts) -> None:
        """Judge the failures of a unit run, which may take too long to wait for its end."""
        new = counts.failed - self._judged
        if new and (new >= FIRST_ITEMS or self._clock.monotonic() >= self._judge_at):
            self.judge(stage, counts)

    def judge(self, stage: StageView | None, counts: Counts) -> None:
        """Set :attr:`reason` if the failures are a reason to pause the run."""
        self._judged = counts.failed
        if self._host_watch.check_if_due():
            return
        self._judge_at = self._clock.monotonic() + self._every_s
        if stage is None or (stage.spec.max_failures is None and counts.done):
            return
        self._host_watch.read()
        reason = pause_reason(stage)
        # Failures on this host alone are not a reason while other hosts may finish the items.
        if reason and (stage.spec.max_failures is not None or not self._host_watch.check()):
            self.reason = f"paused: {reason}"


def parse_max_failures(text: str) -> tuple[float, bool]:
    """Parse ``N`` or ``P%`` into (number, whether it is a percentage); else ConfigError."""
    number, percent = str(text).removesuffix("%"), str(text).endswith("%")
    try:
        value = float(number) if percent else int(number)
    except ValueError:
        value = -1
    if not 0 <= value <= (100 if percent else math.inf):
        message = f"--max-failures {text!r} is neither a count nor a share"
        raise ConfigError(message, hint="such as 50 or 5%; 100% never pauses")
    return value, percent


def pause_reason(stage: StageView) -> str:
    """Why a stage should be paused, by the journals read so far; "" if it should go on."""
    done, hurt, failed, total = _count(stage)
    limit = stage.spec.max_failures
    if limit is None:
        if done == 0 and hurt >= FIRST_ITEMS:
            return f"the first {hurt} items of stage {stage.paths.name!r} all failed"
        return ""
    number, percent = parse_max_failures(limit)
    if failed > (number * total / 100 if percent else number):
        return (
            f"{counted(failed, 'item')} of stage {stage.paths.name!r} failed; the limit is {limit}"
        )
    return ""


def _count(stage: StageView) -> tuple[int, int, int, int]:
    """(done, items with a failure that counts and no result, failed, total)."""
    state, done, hurt, failed, total = stage.state, 0, 0, 0, 0
    for unit in state.units.values():
        total += unit.unit.count
        if unit.clean is not None:
            done += unit.unit.count
            continue
        for item, history in unit.histories.items():
            found = state.item_state(unit, item)
            done += found is ItemState.DONE
            failed += found is ItemState.FAILED
            if any(ref.worker.startswith(WITHDRAWN) for ref in history.failures.values()):
                failed -= found is ItemState.FAILED
                continue
            floor = state.floor(unit.unit.entry, item)
            hurt += found is not ItemState.DONE and history.attempts(floor) > 0
    return done, hurt, failed, total


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
    follow = any(stage.spec.after and not stage.log.sealed for stage in view.stages.values())
    if not (left or follow):
        return f"{given}: all {items} of an open list are finished: hpctk status {run}"
    others = ", and others that follow" * follow
    return f"{given}: {left:,} of {items} left{others}: hpctk status {run}"


def _quoted(path: str) -> str:
    if re.fullmatch(r"[\w@%+=:,./-]+", path, re.ASCII):
        return path
    import shlex  # most paths do without it

    return shlex.quote(path)
