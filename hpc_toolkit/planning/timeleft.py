"""The time that the living workers of a run still need, and whether an earlier plan was right.

Nothing is written, and no process is asked.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.results.journals import last_line_at
from hpc_toolkit.results.status import TimeLeft
from hpc_toolkit.results.workers import clocks_off
from hpc_toolkit.system.clock import Seldom, SystemClock
from hpc_toolkit.system.record import Record

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.planning.forecast import Interval
    from hpc_toolkit.planning.work import StageWork, Work
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.system.clock import Clock

FORMAT = 1
"""Of plans in files."""
_MOST_ITEMS = 20_000
"""A larger run is forecast from the mean durations of its groups, because reading every item takes
longer than a status should."""
_DRAWS = 60
_WIDER = 1.2
"""Factor on both ends of the interval: while a run goes on, other jobs come and go on its nodes."""
_WIDE = 1.3
"""The same factor for a large run, of which only means are known."""


def time_left(
    view: RunView,
    clock: Clock,
    *,
    given: str,
    alive: set[str],
    campaign: dict[str, Any] | None = None,
) -> TimeLeft | None:
    """Forecast the rest of a run; None without living workers, items left, or known durations.

    The log and the journals of the view must have been read. ``given`` is the run's path as
    messages name it, and ``campaign`` the settings of a campaign in run.json.
    """
    if not alive or view.complete:
        return None
    total = sum(unit.unit.count for s in view.stages.values() for unit in s.state.units.values())
    if total > _MOST_ITEMS:
        return _by_groups(view, len(alive))
    # Only here, because numpy costs more than the rest of a status.
    from hpc_toolkit.planning.reading import read_work

    return _forecast(read_work(view, clock, given=given, campaign=campaign, alive=alive))


def _forecast(work: Work) -> TimeLeft | None:
    from dataclasses import replace  # only here, because it imports much

    from hpc_toolkit.planning.forecast import Forecaster, Interval

    def forecast(stages: list[StageWork]) -> Interval:
        if not stages:
            return Interval(0.0, 0.0, 0.0)
        return Forecaster(replace(work, stages=tuple(stages)), draws=_DRAWS).forecast(None).time_s

    if not work.workers:
        return None
    known = [stage for stage in work.stages if stage.seen]
    found = forecast(known)
    coming = {stage.name: stage.coming for stage in work.stages if stage.coming}
    facts: dict[str, Any] = {"coming": coming, "assumed": work.assumed}
    if not known or len(known) < len(work.stages):
        # How long the other stages take is not known, so only the lower end is.
        return TimeLeft(low_s=found.low, eta_s=None, high_s=None, **facts)
    low_s = found.low / _WIDER
    if work.may_stop:
        low_s = forecast([stage for stage in known if not stage.coming]).low
    return TimeLeft(low_s=low_s, eta_s=found.median, high_s=found.high * _WIDER, **facts)


def _by_groups(view: RunView, workers: int) -> TimeLeft | None:
    """Forecast a large run from the mean seconds per item of each group, or of its siblings."""
    units_s = []
    for stage in view.stages.values():
        if stage.state.open and not stage.durations.known:
            return None
        for name in stage.state.open:
            item_s = stage.durations.seconds_of(stage.group_of(stage.unit(name)))
            units_s.append(len(stage.state.pending(name)) * item_s)
    work_s, largest_s = sum(units_s) / workers, max(units_s, default=0.0)
    if not work_s:
        return None
    # At the end, most workers wait for the last units.
    eta_s = work_s + largest_s / 2
    return TimeLeft(low_s=work_s / _WIDE, eta_s=eta_s, high_s=eta_s * _WIDE + largest_s / 2)


class Countdown:
    """Repeats the forecast of one run seldom, and subtracts the time that passed in between.

    ``facts`` are the further arguments of :func:`time_left`.
    """

    def __init__(self, view: RunView, clock: Clock | None = None, **facts: Any) -> None:
        self._view, self._facts = view, facts
        self._clock = clock or SystemClock()
        self._forecasts: Seldom[tuple[TimeLeft | None]] = Seldom(self._clock)

    def read(self, alive: set[str]) -> TimeLeft | None:
        """Return what :func:`time_left` returns, or its last answer minus the time since then."""

        def make() -> tuple[TimeLeft | None]:
            try:
                return (time_left(self._view, self._clock, alive=alive, **self._facts),)
            except RunError:
                # Damaged settings of a campaign: the counts are true, and the search reports it.
                return (None,)

        (found,), age_s = self._forecasts.read(make, (frozenset(alive), self._view.complete))
        return None if found is None else found.after(age_s)


class Kept(Record):
    """A plan that was written to a file."""

    run: str
    at: float
    """When the plan was made: epoch seconds."""
    forecasts: tuple[tuple[int, Interval], ...]
    """Numbers of workers, and the seconds until the last result.

    If workers were running, it is the forecast for them alone.
    """
    working: bool
    """Whether workers were running."""


def read_plan(path: Path) -> Kept:
    """Read a plan that was written to a file as JSON.

    Raises ConfigError: the file cannot be read, or is not a plan.
    """
    from hpc_toolkit.planning.forecast import Interval

    hint = "name a file written by 'hpctk plan RUN -o FILE.json'"
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT:
            raise ValueError(found["format"])
        now = found.get("now")
        forecasts = [now] if now else [one["forecast"] for one in found["choices"]]
        return Kept(
            run=str(found["run"]),
            at=float(found["at"]),
            forecasts=tuple(
                (int(one["workers"]), Interval(**{k: float(s) for k, s in one["time_s"].items()}))
                for one in forecasts
            ),
            working=bool(now),
        )
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint=hint) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a plan of format {FORMAT}", hint=hint) from error


def compare(view: RunView, clock: Clock, plan: Kept) -> dict[str, Any]:
    """Compare a plan of this run with the actual progress, as ``hpctk plan --check --json`` does.

    Of the plan's forecasts it takes the one whose number of workers is nearest to the number that
    worked since. ``real_s`` is the time until the last result, or until now while the run goes on;
    it counts from the plan if workers were running then, else from the start of the first worker
    after it, for which ``waited_s`` passed. ``error`` and ``inside`` are None while they are not
    known. Times are corrected for the clocks of hosts. Raises ConfigError: the plan was made from
    typed numbers, or has no forecast.
    """
    if not plan.run or not plan.forecasts:
        message = "the plan was made without a run, or has no forecast"
        raise ConfigError(message, hint="create one with 'hpctk plan RUN -o FILE.json'")
    view.poll_claims()
    seen = view.presences()
    view.poll()
    ahead = clocks_off(view, seen, clock)
    ends, begins = [0.0], [plan.at] * plan.working
    for name, one in seen.items():
        late_s = 0.0 if one is None else ahead.get(one.host, 0.0)
        ends.append((last_line_at(view, name) or 0.0) - late_s)
        if one is not None and max(ends[-1], one.started - late_s) > plan.at:
            begins.append(max(plan.at, one.started - late_s))
    began = min(begins, default=None)
    workers = sum(end > plan.at for end in ends)
    predicted, time = min(plan.forecasts, key=lambda one: abs(one[0] - workers))
    end = max(ends) if view.complete else clock.wall()
    real_s = 0.0 if began is None else max(0.0, end - began)
    error, inside = None, None
    if view.complete:
        error = (time.median - real_s) / real_s if real_s > 0 else 0.0
        inside = time.low <= real_s <= time.high
    elif real_s > time.high:
        inside = False
    stages = view.stages.values()
    return {
        "workers_predicted": predicted,
        "workers": workers,
        "low_s": time.low,
        "predicted_s": time.median,
        "high_s": time.high,
        "real_s": real_s,
        "waited_s": max(0.0, (clock.wall() if began is None else began) - plan.at),
        "complete": view.complete,
        "left": sum(len(one.state.pending(unit)) for one in stages for unit in one.state.open),
        "error": error,
        "inside": inside,
    }
