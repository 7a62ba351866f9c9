"""The status of a run, read from its files alone: no writes, no locks, no calls to Slurm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hpc_toolkit.queue.presence import DRAINING, FINISHED, Presence
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.explain import group_failures
from hpc_toolkit.results.progress import (
    OPEN,
    PAUSED,
    StageCounts,
    WorkerCounts,
    count_items,
    damage,
    grown_needs,
    hidden_entries,
    no_progress,
    sick_hosts,
    unmet_stages,
    unreadable_workers,
    waiting_workers,
    with_following,
)
from hpc_toolkit.results.workers import clocks_ahead, living_workers, rate_of
from hpc_toolkit.system.clock import Clock
from hpc_toolkit.system.record import Record, asdict, fresh, replace

Presences = dict[str, Presence | None]

_MOVING_S = 5.0
_LEFT_OUT = "the elapsed time is without it, and items over time are not shown"


class TimeLeft(Record, kw_only=True):
    """Seconds until the last item has a result, if the living workers go on."""

    low_s: float
    """The run takes longer in 19 of 20 cases; with ``high_s`` unknown, the part that is known."""
    eta_s: float | None
    """Median; None if there are items of which no duration is known yet."""
    high_s: float | None
    """The run is faster in 19 of 20 cases; None as for ``eta_s``."""
    coming: dict[str, int] = fresh(factory=dict)
    """Items by stage that a campaign may still request; they are counted."""
    assumed: tuple[str, ...] = ()
    """Assumptions, in sentences."""

    def after(self, passed_s: float) -> TimeLeft:
        """Return the same forecast, looked at some seconds later."""

        def less(seconds: float | None) -> float | None:
            return None if seconds is None else max(0.0, seconds - passed_s)

        low_s = max(0.0, self.low_s - passed_s)
        return replace(self, low_s=low_s, eta_s=less(self.eta_s), high_s=less(self.high_s))


class Search(Record):
    """The search of a campaign, as :attr:`Status.best` and :attr:`Status.search` have it."""

    best: dict[str, Any] | None = None
    state: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()


class Status(Record, kw_only=True):
    """The status of a run at one moment; complete when it is read."""

    run: str
    """Path of the run as it was given."""
    stages: dict[str, StageCounts]
    workers: WorkerCounts
    rate_per_s: float
    """Items done per second by living workers, over their last unit runs."""
    eta_s: float | None
    """Median of the seconds until everything is done, with what a search may still request, if the
    living workers go on; None without living workers, items left, or known durations."""
    eta_low_s: float | None = None
    """Lower end of an interval that holds the time left in 9 of 10 cases."""
    eta_high_s: float | None = None
    """Its upper end; None as long as no duration is known of some of the items."""
    assumed: list[str] = fresh(factory=list)
    """Assumptions of the time left, in sentences."""
    elapsed_s: float = 0.0
    """Seconds from the start of the first attempt until now, or until the last attempt ended if the
    run is complete or no worker is alive. Before an attempt has ended: since the first worker
    started."""
    silent_s: float = 0.0
    """Seconds since the last attempt ended, done or failed, or since the first living worker
    started; 0 without a living worker."""
    throughput: dict[str, Any] = fresh(factory=dict)
    """Items done over time: ``begin`` (epoch seconds), ``width_s``, and ``done``, a list."""
    complete: bool
    """Every stage is sealed and no item is pending."""
    deaths: int
    """Generations whose worker or executor died."""
    published: bool
    """Whether the last stage has a table that no retry has followed."""
    reason: str
    """Why there is no progress; "" if there is some, or all is done."""
    halt: str = ""
    """The kind of that reason (:mod:`hpc_toolkit.results.progress`); "" without a reason."""
    failures: list[dict[str, Any]] = fresh(factory=list)
    """Most frequent kinds of errors of items without a result; the keys are the fields of
    :class:`hpc_toolkit.results.explain.Failures`."""
    warnings: list[str] = fresh(factory=list)
    """Log entries that cannot be read yet, sick hosts, and damage that was skipped."""
    alive: list[str] = fresh(factory=list)
    """Names of the living workers."""
    draining: int = 0
    """Living workers that were asked to leave."""
    old_copies: int = 0
    """Journals shorter on this host than their workers reported: results may count as pending."""
    places: dict[str, dict[str, Any]] = fresh(factory=dict)
    """For each living worker that reported it: ``host``, and the ``cpus``, ``gpus`` and
    ``memory_bytes`` that it had at its start."""
    unmet: list[dict[str, Any]] = fresh(factory=list)
    """Stages whose items no worker can hold: ``stage``, ``items``, ``needs``, ``text``, and the
    command ``submit`` of a job that can, if it is known."""
    grown: list[dict[str, Any]] = fresh(factory=list)
    """Needs of items that ran out of memory or time: ``stage``, ``needs``, whether they are the
    ``most`` that the retry allows, and how many items are ``done``, ``failed`` or ``pending``."""
    doctor: str = ""
    """What 'hpctk doctor' reported about the directory; "" without a report, or if all was fine."""
    best: dict[str, Any] | None = None
    """The best arm of a campaign so far; None without a reward, and for a list of items."""
    search: dict[str, Any] | None = None
    """The values of ``campaign.summary.search_so_far``; None for a list of items."""

    @property
    def left(self) -> int:
        """Items without a result, with those that a search may still request."""
        return sum(one.left + one.coming + one.waiting for one in self.stages.values())

    @property
    def is_paused(self) -> bool:
        return self.halt == PAUSED

    @property
    def is_open(self) -> bool:
        """Whether nothing is left to do until items are added to an open list."""
        return self.halt == OPEN

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``hpctk status --json`` prints them."""
        record = asdict(self)
        del record["halt"]
        return record


class Beside(Record, kw_only=True):
    """What a caller knows of a run beside its files for workers, to be part of its status."""

    doctor: str = ""
    """What 'hpctk doctor' reported."""
    reason: Callable[[Status], str] = lambda now: now.reason
    """Explains a standstill, for example by the run's jobs."""
    search: Callable[[bool], Search] | None = None
    """Reads the search of a campaign; its argument says whether the run is complete."""


def read_status(
    view: RunView,
    clock: Clock,
    *,
    given: str,
    campaign: bool = False,
    forecast: Callable[[set[str]], TimeLeft | None] = lambda _alive: None,
    seen: Presences | None = None,
    beside: Beside | None = None,
) -> Status:
    """Read everything that is new and summarize it.

    ``given`` is the run's path as messages name it, ``campaign`` whether a coordinator adds its
    items, and ``forecast`` returns the time left on the living workers. ``seen``: the workers'
    presences, if the caller has just read them.
    """
    beside = beside or Beside()
    if seen is None:
        # Before the journals: if they lack lines that a worker reports here, they are old copies.
        seen = view.presences()
    known = {worker: presence for worker, presence in seen.items() if presence is not None}
    possible = living_workers(view, clock, seen)
    alive = possible & known.keys()
    finished = sum(presence.state == FINISHED for presence in known.values())
    dead = len(seen) - len(possible) - finished
    workers = WorkerCounts(len(alive), finished, dead, len(possible) - len(alive))
    view.poll()
    for stage in view.stages.values():
        if not stage.complete:  # a complete stage may have tens of thousands of claims
            stage.claims.refresh()
    reported = {worker: presence.journal for worker, presence in known.items()}
    late = [worker for worker in view.behind(reported) if worker not in view.unreadable]
    stages = {name: count_items(stage, alive, possible) for name, stage in view.stages.items()}
    stages = with_following(view, stages)
    ahead = clocks_ahead(seen, clock)
    left = forecast(alive)
    if left is not None and campaign:
        coming = left.coming
        stages |= {name: replace(stages[name], coming=count) for name, count in coming.items()}
    last = list(view.stages.values())[-1].log
    # Whether an attempt ended within the last seconds, by the clock of its worker.
    moving = bool(ahead) or abs(clock.wall() - view.throughput.until) < _MOVING_S
    # When the last attempt ended, or the first living worker started.
    started = min((known[one].started for one in alive), default=None)
    since = 0.0 if started is None else max(view.throughput.until, started)
    unmet = unmet_stages(view, stages, known, alive, given)
    halt, reason = no_progress(
        view, stages, workers, given, late, unmet, campaign=campaign, moving=moving
    )
    found = Status(
        run=given,
        stages=stages,
        workers=workers,
        rate_per_s=round(rate_of(view, alive), 4),
        **_time_left(left),
        elapsed_s=_elapsed_s(view, known.values(), ahead, clock.wall() if alive else 0.0),
        silent_s=0.0 if ahead or not since else max(0.0, round(clock.wall() - since, 1)),
        throughput={} if ahead else _throughput(view),
        complete=view.complete,
        deaths=sum(stage.state.deaths for stage in view.stages.values()),
        published=last.is_published,
        reason=reason,
        halt=halt,
        failures=[one.to_json() for one in group_failures(view, seen)],
        warnings=[
            *hidden_entries(view),
            *sick_hosts(view),
            *unreadable_workers(view, seen),
            *waiting_workers(known, alive),
            *damage(view, possible),
            *(f"the clock of host {host} is ahead of this one: {_LEFT_OUT}" for host in ahead[:3]),
        ],
        alive=sorted(alive),
        draining=sum(known[worker].state == DRAINING for worker in alive & known.keys()),
        old_copies=len(late),
        places={
            worker: {"host": known[worker].host, **known[worker].place}
            for worker in sorted(alive & known.keys())
            if known[worker].place
        },
        unmet=unmet,
        grown=grown_needs(view) if any(one.spec.retry for one in view.stages.values()) else [],
        doctor=beside.doctor,
    )
    found = replace(found, reason=beside.reason(found))
    if beside.search is None:
        return found
    search = beside.search(found.complete)
    warnings = [*found.warnings, *search.warnings]
    return replace(found, best=search.best, search=search.state, warnings=warnings)


def _time_left(left: TimeLeft | None) -> dict[str, Any]:
    if left is None:
        return dict.fromkeys(("eta_s", "eta_low_s", "eta_high_s"))

    def rounded(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds, 1)

    return {
        "eta_s": rounded(left.eta_s),
        "eta_low_s": rounded(left.low_s),
        "eta_high_s": rounded(left.high_s),
        "assumed": list(left.assumed),
    }


def _elapsed_s(view: RunView, known: Iterable[Presence], ahead: list[str], now: float) -> float:
    """Return the time that the run took; ``now`` is 0 if no worker is alive.

    The times of hosts whose clocks are ``ahead`` are compared with no others.
    """
    lives = [(one.host, one.started, max(one.started, one.at)) for one in known if one.started]
    began, until = view.throughput.since, view.throughput.until
    if ahead or not until:
        began = min((start for host, start, _ in lives if host not in ahead), default=now)
        until = max((end for host, _, end in lives if host not in ahead), default=now)
    end = until if view.complete else max(now, until)
    return round(max(0.0, end - began), 3)


def _throughput(view: RunView) -> dict[str, Any]:
    begin, done = view.throughput.counts()
    width_s = view.throughput.width_s
    return {"begin": begin, "width_s": width_s, "done": [round(one, 2) for one in done]}
