"""Items and workers by state, why a run makes no progress, and what is wrong with its files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.left import pause_reason, pending_needs
from hpc_toolkit.queue.presence import WAITING, Presence, read_presence
from hpc_toolkit.queue.state import ItemState
from hpc_toolkit.queue.view import RunView, StageView
from hpc_toolkit.results.workers import not_shown
from hpc_toolkit.rundir.layout import CALLS
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.record import Record, replace

_NEW_S = 60.0
"""More than clocks usually differ by, and than a new file is without its first line."""
PAUSED, NO_WORKER, OPEN, OTHER = "paused", "no worker", "open", "other"
"""Kinds of reasons why a run makes no progress. OPEN: its list is open, and no item is left."""


class StageCounts(Record):
    """Items of one stage by state."""

    total: int = 0
    pending: int = 0
    """Items without a result that no living worker has claimed."""
    running: int = 0
    """Items that a living worker runs now, one for each worker that holds a unit."""
    claimed: int = 0
    """Items that wait behind these in the units of living workers."""
    done: int = 0
    failed: int = 0
    retried: int = 0
    """Items that were attempted in more than one generation."""
    duplicates: int = 0
    """Results beyond the one that counts."""
    sealed: bool = False
    """Whether no more items can be added."""
    coming: int = 0
    """Items that the search of a campaign may still request; not in ``total``."""
    waiting: int = 0
    """Items that results of earlier stages will make, at least; not in ``total``."""
    skipped: int = 0
    """Items that were not made because an earlier one has failed; not in ``total``."""

    @property
    def left(self) -> int:
        """Items in the queue without a result that are not failed for good."""
        return self.pending + self.running + self.claimed

    @property
    def whole(self) -> int:
        """Items there are and will be, as far as is known."""
        return self.total + self.coming + self.waiting


class WorkerCounts(Record):
    """Number of workers by state."""

    alive: int = 0
    finished: int = 0
    dead: int = 0
    unreadable: int = 0
    """Workers whose file in ``workers/`` cannot be read: they may be running or not."""


def count_items(stage: StageView, alive: set[str], possible: set[str]) -> StageCounts:
    """Count the items of a stage; ``possible``: the living workers, and those that may be alive."""
    total = pending = claimed = done = failed = retried = duplicates = 0
    busy: set[str] = set()
    for name, unit in stage.state.units.items():
        items = unit.unit.count
        total += items
        if unit.clean is not None:
            done += items
            continue
        touched = stage.state.touched(unit)
        waiting = items - len(touched)
        for item in touched:
            state = stage.state.item_state(unit, item)
            done += state is ItemState.DONE
            failed += state is ItemState.FAILED
            waiting += state is ItemState.PENDING
            history = unit.histories.get(item)
            if history is not None:
                duplicates += max(0, history.done_lines - 1)
                retried += len(history.failures) + (history.done is not None) > 1
        generation = stage.claims.generation(name) if waiting else 0
        held = generation and not stage.is_released(name)
        holder = stage.claims.owner(name, generation) if held else None
        if holder is None or (holder and holder not in possible):
            pending += waiting
        else:
            claimed += waiting
            busy.add(holder)
    # A worker runs one item at a time, also one that holds several units.
    running = min(len(busy & (alive | {""})), claimed)
    return StageCounts(
        total=total,
        pending=pending,
        running=running,
        claimed=claimed - running,
        done=done,
        failed=failed,
        retried=retried,
        duplicates=duplicates,
        sealed=stage.log.sealed,
    )


def with_following(view: RunView, stages: dict[str, StageCounts]) -> dict[str, StageCounts]:
    """The counts, with the items that stages after others will have, or lack."""
    if not any(stage.spec.after for stage in view.stages.values()):
        return stages
    from hpc_toolkit.queue.graph import following  # few runs have such stages

    expected = {name: counts.total for name, counts in stages.items()}
    for name, stage in following(view).items():
        waiting, skipped = stage.coming(expected), sum(1 for _ in stage.skipped())
        stages[name] = replace(stages[name], waiting=waiting, skipped=skipped)
        expected[name] += waiting
    return stages


def no_progress(
    view: RunView,
    stages: dict[str, StageCounts],
    workers: WorkerCounts,
    run: str,
    late: list[str],
    unmet: list[dict[str, Any]],
    *,
    campaign: bool,
    moving: bool,
) -> tuple[str, str]:
    """The kind of the reason why there is no progress, and the reason; both "" if there is some.

    ``run`` is its path as messages name it. ``unmet``: see :func:`unmet_stages`. ``moving``: an
    attempt ended a moment ago. The claims are read before the journals, so those of short units
    may all be released already.
    """
    if view.complete:
        return "", ""
    run = quote(run)
    # Old copies of journals make counts too low, so the message says that it may be wrong.
    unless = f"{not_shown(late)}; look again in a minute, else " if late else ""
    for stage in view.stages.values():
        reason = pause_reason(stage)
        if reason and not workers.alive:
            fix = "fix the cause, then 'hpctk retry' and start workers"
            return PAUSED, f"paused: {reason}; {unless}{fix}"
    stages_left = (
        one.left or (view.stages[n].spec.after and not one.sealed) for n, one in stages.items()
    )
    left = any(stages_left)
    # A worker whose file cannot be read is not known to be dead.
    perhaps = moving and workers.unreadable
    if not workers.alive and not perhaps and (left or campaign):
        died = f"; {workers.dead} died" if workers.dead else ""
        start = "start some with 'hpctk work' or 'hpctk submit'"
        if campaign:
            here = "'hpctk campaign run CAMPAIGN.toml'"
            start = f"'hpctk submit campaign --run {run}' or {here} continues"
        return NO_WORKER, f"no worker is alive{died}: {unless}{start}"
    if not left:
        return _waiting(view, stages, run, campaign=campaign)
    if not moving and not any(counts.running for counts in stages.values()):
        why = "they are starting, or wait for a dead one's lease"
        if sum(one["items"] for one in unmet) >= sum(counts.pending for counts in stages.values()):
            why = "what is left needs more than any of them has"
        return OTHER, f"workers are alive but hold nothing: {unless}{why}"
    return "", ""


def _waiting(
    view: RunView, stages: dict[str, StageCounts], run: str, *, campaign: bool
) -> tuple[str, str]:
    if hidden := hidden_entries(view):
        return OTHER, "; ".join(hidden)
    if campaign:
        start = f"if none runs, start 'hpctk campaign coordinate {run}'"
        return OTHER, f"no item is left until the coordinator decides what is next; {start}"
    finished = any(counts.total for counts in stages.values())
    state = "all items added so far are finished" if finished else "no item was added yet"
    add = f"'hpctk add {run} --items FILE' adds items, 'hpctk add {run} --seal' ends it"
    if any(stage.spec.workload.function == CALLS for stage in view.stages.values()):
        add = "its script may add calls"
    return OPEN, f"{state}, the list is open: {add}"


def unmet_stages(
    view: RunView,
    stages: dict[str, StageCounts],
    known: Mapping[str, Presence],
    alive: Collection[str],
    run: str,
) -> list[dict[str, Any]]:
    """The stages with pending items that no living worker can hold; without one, none that ended.

    ``known`` are the presences that could be read. Items whose needs grew are listed by themselves.
    """
    found = []
    for name, stage in view.stages.items():
        pending = stages[name].pending
        for needs, number, _ in pending_needs(stage) if pending else ():
            from hpc_toolkit.system.needs import submit_options, unmet  # few runs need it

            has = [known[one].place["has"] for one in alive or known if "has" in known[one].place]
            items = min(number, pending)
            if why := unmet(needs, has):
                why = why.replace("need ", "needs ", 1) if items == 1 else why
                text = f"{counted(items, 'item')} of {name} {why}"
                options = submit_options(needs)
                submit = f"hpctk submit --run {quote(run)} {options}" if options else ""
                one = {"stage": name, "items": items, "needs": needs, "text": text}
                found.append(one | {"submit": submit})
    return found


def waiting_workers(known: Mapping[str, Presence], alive: set[str]) -> list[str]:
    """A warning about living workers that wait for their filesystem."""
    names = [name for name in sorted(alive & known.keys()) if known[name].note.startswith(WAITING)]
    if not names:
        return []
    more = f" and {counted(len(names) - 1, 'other worker')}" if names[1:] else ""
    why = known[names[0]].note.removeprefix(WAITING)
    wait = "wait" if names[1:] else "waits"
    return [f"{names[0]}{more} {wait} for the filesystem, with the model loaded: {why}"]


def grown_needs(view: RunView) -> list[dict[str, Any]]:
    """Needs that grew because items ran out, with the numbers of these items by state."""
    found: dict[tuple[str, int, str, bool], Counter[str]] = {}
    for name, stage in view.stages.items():
        begun = stage.state.begun if stage.spec.retry else ()
        for unit in (stage.state.units[one] for one in begun):
            for item in unit.histories:
                if growth := stage.state.growth(unit, item):
                    most = growth == stage.specs.steps(unit.unit)
                    key = name, growth, stage.specs.want(unit.unit), most
                    counts = found.setdefault(key, Counter())
                    counts[str(stage.state.item_state(unit, item))] += 1
    from hpc_toolkit.system.needs import needs_after  # few runs need it

    grown = []
    for (name, growth, want, most), counts in sorted(found.items()):
        needs = needs_after(view.stages[name].specs[want], growth)
        grown.append({"stage": name, "needs": needs, "most": most, **counts})
    return grown


def unreadable_workers(view: RunView, seen: Mapping[str, Presence | None]) -> list[str]:
    """A warning about workers of which it is not known whether they run."""
    unread = [name for name, presence in seen.items() if presence is None]
    names = [name for name in unread if not _may_be_fine(view.paths.worker(name))]
    if not names:
        return []
    more = f" and {counted(len(names) - 1, 'more file')}" if names[1:] else ""
    whose = "their workers" if names[1:] else "its worker"
    path = view.paths.worker(names[0])
    return [f"{path}{more} cannot be read: {whose} may be running or not"]


def _may_be_fine(path: Path) -> bool:
    """Whether a file was just created, without its first content, or is complete by now."""
    with suppress(OSError):
        info = path.stat()
        if info.st_size == 0:
            return abs(time.time() - info.st_mtime) < _NEW_S
    return read_presence(path) is not None


def hidden_entries(view: RunView) -> list[str]:
    """Warnings of log entries that cannot be read yet; no reader sees the entries after them."""
    logs = [stage.log for stage in view.stages.values() if stage.log.hidden]
    return [f"{log.waits_for}; 'hpctk doctor' shows whether it is lost" for log in logs]


def sick_hosts(view: RunView) -> list[str]:
    """Reasons of the notices about sick hosts, only the last one of each host or worker."""
    control = ControlReader(view.paths)
    control.poll()
    notices = sorted(control.health, key=lambda notice: (notice.sure, notice.at))
    last = {(one.host, "" if one.whole else one.worker): one for one in notices}
    more = "; 'hpctk submit' leaves it out for a day"
    return [one.reason + (more if one.sure and one.whole else "") for one in last.values()]


def damage(view: RunView, alive: set[str]) -> list[str]:
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
        bad = reader.bad_lines.items()
        found += [f"{path}: line at byte {at} is skipped: {why}" for at, why in bad]
        torn = reader.torn_bytes
        if torn and worker not in alive:  # a living worker may still be writing it
            found.append(f"{path}: torn last line ({torn} bytes, no newline) is skipped")
    return found
