"""Forecasts of the rest of a run; here that of its living workers. Nothing is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.status import TimeLeft
from hpc_toolkit.system.clock import Clock, Seldom, SystemClock

if TYPE_CHECKING:
    from hpc_toolkit.planning.work import StageWork, Work

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
