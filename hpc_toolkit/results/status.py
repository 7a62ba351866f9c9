"""The status of a run, read from its files alone: no writes, no locks, no calls to Slurm."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.leases import DEFAULT_LEASE_S
from hpc_toolkit.queue.presence import DRAINING, FINISHED
from hpc_toolkit.queue.state import ItemState
from hpc_toolkit.queue.view import not_shown
from hpc_toolkit.results.explain import item_json
from hpc_toolkit.system.ranks import boot_id, host_name, process_ticks
from hpc_toolkit.worker.pausing import pause_reason

if TYPE_CHECKING:
    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.queue.state import Ref
    from hpc_toolkit.queue.units import Unit
    from hpc_toolkit.queue.view import RunView, StageView
    from hpc_toolkit.system.clock import Clock

_FAILURES_SHOWN = 5


@dataclass(slots=True)
class StageCounts:
    """Items of one stage by state."""

    total: int = 0
    pending: int = 0
    """Pending items that are not leased."""
    leased: int = 0
    """Pending items in a unit that a living worker holds."""
    done: int = 0
    failed: int = 0
    retried: int = 0
    """Items that were attempted in more than one generation."""
    duplicates: int = 0
    """Results beyond the one that counts."""
    sealed: bool = False
    """Whether no more items can be added."""


@dataclass(slots=True)
class WorkerCounts:
    """Number of workers by state."""

    alive: int = 0
    finished: int = 0
    dead: int = 0


@dataclass(slots=True, kw_only=True)
class Status:
    """The status of a run at one moment."""

    run: str
    """Path of the run as it was given."""
    stages: dict[str, StageCounts]
    workers: WorkerCounts
    rate_per_s: float
    """Items done per second by living workers, over their last unit runs."""
    eta_s: float | None
    """Seconds until all known items are done; None if nothing is left or ``rate_per_s`` is 0."""
    complete: bool
    """Every stage is sealed and no item is pending."""
    deaths: int
    """Generations whose worker or executor died."""
    published: bool
    """Whether the last stage has a table that no retry has followed."""
    reason: str
    """Why there is no progress; "" if there is some, or all is done."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Most frequent errors of items without a result: ``error``, ``items`` (count), ``example``."""
    warnings: list[str] = field(default_factory=list)
    """Log entries that cannot be read yet, sick hosts, and damage that was skipped."""
    draining: int = 0
    """Living workers that were asked to leave."""
    old_copies: int = 0
    """Journals shorter on this host than their workers reported: results may count as pending."""
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For each living worker that reported it: ``host``, and the ``cpus``, ``gpus`` and
    ``memory_bytes`` that it had at its start."""
    doctor: str = ""
    """What 'hpctk doctor' reported about the directory; "" without a report, or if all was fine."""
    best: dict[str, Any] | None = None
    """The best arm of a campaign so far; None without a reward, and for a list of items."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``hpctk status --json`` prints them."""
        return asdict(self)


def read_status(view: RunView, clock: Clock, *, given: str, campaign: bool = False) -> Status:
    """Read everything that is new and summarize it.

    ``given`` is the run's path as messages name it, and ``campaign`` whether a coordinator adds its
    items.
    """
    view.poll_claims()
    # Before the journals: if they lack lines that a worker reports here, they are old copies.
    seen = view.presences()
    alive = living_workers(view, clock, seen)
    known = {worker: presence for worker, presence in seen.items() if presence is not None}
    finished = sum(presence.state == FINISHED for presence in known.values())
    workers = WorkerCounts(len(alive), finished, len(seen) - len(alive) - finished)
    view.poll()
    reported = {worker: presence.journal for worker, presence in known.items()}
    late = [worker for worker in view.behind(reported) if worker not in view.unreadable]
    stages = {name: _count(view, stage, alive) for name, stage in view.stages.items()}
    rate = _rate(view, alive)
    left = sum(counts.pending + counts.leased for counts in stages.values())
    last = list(view.stages.values())[-1].log
    return Status(
        run=given,
        stages=stages,
        workers=workers,
        rate_per_s=round(rate, 4),
        eta_s=round(left / rate, 1) if rate > 0 and left else None,
        complete=view.complete,
        deaths=sum(
            len(unit.deaths) for one in view.stages.values() for unit in one.state.units.values()
        ),
        published=last.table is not None and last.last_retry < last.table[0],
        reason=_reason(view, stages, workers, given if campaign else "", late),
        failures=_failures(view),
        warnings=[*_hidden(view), *_sick(view), *_warnings(view, alive)],
        draining=sum(known[worker].state == DRAINING for worker in alive & known.keys()),
        old_copies=len(late),
        places={
            worker: {"host": known[worker].host, **known[worker].place}
            for worker in sorted(alive & known.keys())
            if known[worker].place
        },
    )


def _rate(view: RunView, alive: set[str]) -> float:
    """Items per second of all living workers together."""
    # Per worker: items done, and the seconds that they took.
    paces = [map(sum, zip(*view.pace[one], strict=True)) for one in alive if view.pace.get(one)]
    return sum(done / seconds for done, seconds in paces if seconds > 0)


def reachable_workers(view: RunView, clock: Clock) -> set[str]:
    """Workers that a request may reach: all but those that have left or died on this host.

    Workers of other hosts count even if they seem dead, because their clocks may be wrong.
    """
    seen = view.presences()
    here = (host_name(), boot_id())
    return living_workers(view, clock, seen) | {
        name
        for name, one in seen.items()
        if one is not None and one.state != FINISHED and (one.host, one.boot) != here
    }


def living_workers(
    view: RunView, clock: Clock, seen: dict[str, Presence | None] | None = None
) -> set[str]:
    """Workers that have not left and do not seem dead; a guess that no rule of the queue uses.

    ``seen`` are the workers' presences; None: read them.
    """
    here = (host_name(), boot_id())
    seen = view.presences() if seen is None else seen
    # A worker that was silent more than once has several notices.
    _, given = ControlReader(view.paths).poll()
    notices = {(one.worker, one.heartbeat) for one in given if one.final}

    def alive(name: str, one: Presence) -> bool:
        left = one.state == FINISHED or (name, one.heartbeat) in notices
        return not left and _seems_alive(one, here, clock)

    return {name for name, one in seen.items() if one is None or alive(name, one)}


def _seems_alive(presence: Presence, here: tuple[str, str], clock: Clock) -> bool:
    """For display only: workers judge each other by what they observe themselves."""
    if (presence.host, presence.boot) == here:
        ticks = process_ticks(presence.pid)
        return ticks > 0 and presence.ticks in {0, ticks}
    silence = clock.wall() - presence.at
    return silence < max(DEFAULT_LEASE_S, 3 * presence.interval_s)


def _count(view: RunView, stage: StageView, alive: set[str]) -> StageCounts:
    counts = StageCounts(sealed=stage.log.sealed)
    for name, unit in stage.state.units.items():
        counts.total += unit.unit.count
        if unit.clean is not None:
            counts.done += unit.unit.count
            continue
        waiting = 0
        for item, state in stage.states(unit):
            counts.done += state is ItemState.DONE
            counts.failed += state is ItemState.FAILED
            waiting += state is ItemState.PENDING
            history = unit.histories.get(item)
            if history is not None:
                counts.duplicates += max(0, history.done_lines - 1)
                tries = len(history.failures) + (history.done is not None)
                counts.retried += tries > 1
        if waiting and _is_leased(stage, name, alive):
            counts.leased += waiting
        else:
            counts.pending += waiting
    return counts


def _is_leased(stage: StageView, unit: str, alive: set[str]) -> bool:
    generation = stage.claims.generation(unit)
    if generation == 0 or stage.is_released(unit):
        return False
    try:
        return stage.claims.owner(unit, generation) in alive
    except OSError:
        return True


def _reason(
    view: RunView,
    stages: dict[str, StageCounts],
    workers: WorkerCounts,
    campaign: str,
    late: list[str],
) -> str:
    """Why there is no progress; ``campaign`` is a campaign's path, "" for a plain list."""
    if view.complete:
        return ""
    # Old copies of journals make counts too low, so the message says that it may be wrong.
    unless = f"{not_shown(late)}; look again in a minute, else " if late else ""
    for stage in view.stages.values():
        reason = pause_reason(stage)
        if reason and not workers.alive:
            return f"paused: {reason}; {unless}fix the cause, then 'hpctk retry' and start workers"
    left = any(counts.pending + counts.leased for counts in stages.values())
    if not workers.alive and (left or campaign):
        died = f"; {workers.dead} died" if workers.dead else ""
        start = "start some with 'hpctk work' or 'hpctk submit'"
        if campaign:
            here = "'hpctk campaign run CAMPAIGN.toml'"
            start = f"'hpctk submit campaign --run {campaign}' or {here} continues"
        return f"no worker is alive{died}: {unless}{start}"
    if not left:
        return "; ".join(_hidden(view)) or _waiting(stages, campaign)
    if not any(counts.leased for counts in stages.values()):
        start = "they are starting, or wait for a dead one's lease"
        return f"workers are alive but hold nothing: {unless}{start}"
    return ""


def _waiting(stages: dict[str, StageCounts], campaign: str) -> str:
    if campaign:
        start = f"if none runs, start 'hpctk campaign coordinate {campaign}'"
        return f"no item is left until the coordinator decides what is next; {start}"
    opened = ", ".join(name for name, counts in stages.items() if not counts.sealed)
    return f"every item is finished; {opened} waits for more items, or for 'hpctk add RUN --seal'"


def _failures(view: RunView) -> list[dict[str, Any]]:
    errors: Counter[str] = Counter()
    examples: dict[str, tuple[StageView, Unit, int]] = {}
    for stage in view.stages.values():
        for unit in stage.state.units.values():
            for item, history in unit.histories.items():
                ref = history.last_failure(stage.state.floor(unit.unit.entry, item))
                if ref is not None and history.done is None:
                    error = _first_line(view, ref)
                    errors[error] += 1
                    examples.setdefault(error, (stage, unit.unit, item))
    return [
        {"error": error, "items": n, "example": json.loads(item_json(*examples[error]))}
        for error, n in errors.most_common(_FAILURES_SHOWN)
    ]


def _first_line(view: RunView, ref: Ref) -> str:
    """First line of a failure's error, shortened."""
    try:
        record = view.line(ref)
    except OSError as error:
        return f"? ({error.strerror})"
    text = str(record["error"]) if record is not None else "?"
    return text.splitlines()[0][:200] if text else "?"


def _hidden(view: RunView) -> list[str]:
    """Warnings of log entries that cannot be read yet; no reader sees the entries after them."""
    logs = [stage.log for stage in view.stages.values() if stage.log.hidden]
    return [f"{log.waits_for}; 'hpctk doctor' shows whether it is lost" for log in logs]


def _sick(view: RunView) -> list[str]:
    """Reasons of the notices about sick hosts, only the last one of each host or worker."""
    control = ControlReader(view.paths)
    control.poll()
    notices = sorted(control.health, key=lambda notice: (notice.sure, notice.at))
    last = {(one.host, "" if one.whole else one.worker): one for one in notices}
    more = "; 'hpctk submit' leaves it out for a day"
    return [one.reason + (more if one.sure and one.whole else "") for one in last.values()]


def _warnings(view: RunView, alive: set[str]) -> list[str]:
    # Reading one journal may need lines of another, so the error may name that other file.
    unreadable = {
        error.filename or view.paths.journal(worker): error
        for worker, error in view.unreadable.items()
    }
    found = [
        f"{path}: cannot be read ({error.strerror}); what it says is not counted"
        for path, error in unreadable.items()
    ]
    for worker, reader in view.readers.items():
        path = view.paths.journal(worker)
        found += [f"{path}: damaged line at byte {at} is skipped" for at in reader.bad_lines]
        torn = reader.torn_bytes
        if torn and worker not in alive:  # a living worker may still be writing it
            found.append(f"{path}: torn last line ({torn} bytes, no newline) is skipped")
    return found
