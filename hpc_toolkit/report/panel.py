"""The state of a run as labelled rows, which the terminal, the notebook and the live view draw.

Every number comes from one :class:`hpc_toolkit.results.status.Status`, so the views agree.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any

from hpc_toolkit.slurm.records import UNKNOWN, JobRecord
from hpc_toolkit.system.quantities import counted, format_duration
from hpc_toolkit.system.record import Record
from hpc_toolkit.system.terminal import columns, pad

if TYPE_CHECKING:
    from hpc_toolkit.results.progress import StageCounts
    from hpc_toolkit.results.status import Status
    from hpc_toolkit.results.workers import HostLine

GOOD, BAD, WARN, DIM = "good", "bad", "warn", "dim"
"""Tones of a row."""
_ITEM_CHARS = 60
_ERROR_CHARS = 160
_ARM_CHARS = 60
_JOBS_SHOWN = 8
_WARNINGS_SHOWN = 5
_DAY_S = 86400
_SPARKS, _FEWEST = 24, 4
"""The most and the fewest values of a curve."""


class Row(Record):
    label: str
    """What the row is about; "" continues the row above."""
    text: str
    tone: str = ""
    bar: tuple[float, ...] = ()
    """Shares from 0 to 1 that are done, failed and running, to draw before the text."""
    curve: tuple[float, ...] = ()
    """Values to draw as a small curve before the text."""
    is_title: bool = False


def panel(now: Status, jobs: Sequence[JobRecord] = (), *, verbose: bool = False) -> list[Row]:
    """Return the rows of a run's state, the most important ones first.

    ``verbose`` adds the CPUs, GPUs and memory of each worker.
    """
    rows = [*_stage_rows(now), *_speed(now), *_search_rows(now)]
    rows += [*_failure_rows(now), *_problem_rows(now), Row("workers", ", ".join(_workers(now)))]
    rows += _place_rows(now) if verbose else ()
    # Of a complete run it does not matter what became of a job that Slurm has forgotten.
    rows += job_rows([job for job in jobs if not now.complete or job.state != UNKNOWN])
    tone = BAD if now.reason else ""
    if now.complete or now.is_open:
        tone = WARN if failed_items(now) else GOOD if now.complete else ""
    return [Row("", f"{now.run}: {headline(now)}", tone, is_title=True), *rows]


def one_line(now: Status) -> str:
    """Return one line: ``12 of 100 done, 1 failed, 4 workers, 3.2 items/s, 25 s to 31 s left``."""
    stages = [
        (f"{name}: " if len(now.stages) > 1 else "") + ", ".join(_brief(counts))
        for name, counts in now.stages.items()
    ]
    if now.complete:
        return "; ".join([*stages, "complete"])
    parts = [counted(now.workers.alive, "worker")]
    parts += [f"{now.workers.dead:,} died"] if now.workers.dead else []
    parts += [f"{now.workers.unreadable:,} unreadable"] if now.workers.unreadable else []
    parts += [rate_text(now.rate_per_s)] if now.rate_per_s > 0 else []
    parts += [left] if (left := time_left(now)) else []
    running = sum(counts.running for counts in now.stages.values())
    parts += [f"{running:,} running, {one}" for one in _silence(now)]
    return "; ".join([*stages, ", ".join(parts)])


def _silence(now: Status) -> list[str]:
    """Return for how many minutes there was no result, so that a long item does not look stuck."""
    minutes = int(now.silent_s // 60)
    running = any(counts.running for counts in now.stages.values())
    return [f"no result for {minutes:,} min"] if running and minutes else []


def _brief(counts: StageCounts) -> list[str]:
    up_to = "up to " if counts.coming else ""
    parts = [f"{counts.done:,} of {up_to}{counts.whole:,} done"]
    return parts + ([f"{counts.failed:,} failed"] if counts.failed else [])


def headline(now: Status) -> str:
    """Return the state of a run in a few words: ``working, 2 min 10 s to 3 min 00 s left``."""
    failed = f", {failed_items(now):,} failed" if failed_items(now) else ""
    if now.complete:
        took = f" after {format_duration(now.elapsed_s)}" if now.elapsed_s else ""
        return f"complete{took}{failed}"
    if now.is_open:
        return now.reason.partition(":")[0] + failed
    if now.is_paused:
        return "paused"
    left = time_left(now)
    if left:
        return f"working, {left}"
    return "nothing moves" if now.reason else "working"


def time_left(now: Status) -> str:
    """Return the time left in words; "" if it is not known."""
    if now.eta_low_s is None:
        return ""
    if now.eta_s is None or now.eta_high_s is None:
        known = f"more than {format_duration(now.eta_low_s)} left"
        return known if now.eta_low_s >= 1 else "time left not known yet"
    low, high = format_duration(now.eta_low_s), format_duration(now.eta_high_s)
    return f"about {high} left" if low == high else f"{low} to {high} left"


def failed_items(now: Status) -> int:
    return sum(counts.failed for counts in now.stages.values())


def not_shown(now: Status) -> list[str]:
    """Return that results are missing here which workers have reported; [] if none are."""
    # What a complete run does not show are releases and duplicates.
    late = 0 if now.complete else now.old_copies
    return [f"{late} with results not shown here yet"] if late else []


def _stage_rows(now: Status) -> Iterator[Row]:
    for name, counts in now.stages.items():
        whole = counts.whole
        finished = counts.done + counts.failed
        shares = (one / max(whole, 1) for one in (counts.done, counts.failed, counts.running))
        up_to = "up to " if counts.coming else ""
        share = f"{100 * finished // whole if whole else 0:3d}%"
        opened = "" if counts.sealed or counts.whole > counts.total else ", open for more"
        yield Row(name, f"{share}  {finished:,} of {up_to}{whole:,}{opened}", bar=tuple(shares))
        parts = stage_parts(counts)
        if parts:
            yield Row("", ", ".join(parts), DIM)


def stage_parts(counts: StageCounts) -> list[str]:
    """Return the number of items in each state that is worth a word."""
    words = (
        "running",
        "claimed",
        "pending",
        "waiting",
        "failed",
        "skipped",
        "retried",
        "duplicates",
    )
    parts = [f"{getattr(counts, word):,} {word}" for word in words if getattr(counts, word)]
    if counts.coming:
        parts.insert(3, f"{counts.coming:,} not requested yet")
    return parts


def _speed(now: Status) -> Iterator[Row]:
    done = now.throughput.get("done", ())
    if now.complete:  # workers may take a moment to exit
        return
    parts = [rate_text(now.rate_per_s)] if now.rate_per_s > 0 else []
    if now.elapsed_s:
        parts += [f"{format_duration(now.elapsed_s)} so far", *_silence(now)]
    if now.eta_s is not None and now.eta_s > 60:
        parts.append(f"done about {clock_time(time.time() + now.eta_s)}")
    if parts:
        # At most as many sums of neighbouring values as there is room for.
        size = -(-len(done) // _SPARKS) or 1
        sums = (sum(done[first : first + size]) for first in range(0, len(done), size))
        curve = tuple(sums) if len(done) >= _FEWEST else ()
        yield Row("speed" if now.rate_per_s > 0 else "time", ", ".join(parts), curve=curve)


def rate_text(rate_per_s: float) -> str:
    for seconds, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if rate_per_s * seconds >= 1 or unit == "h":
            return f"{rate_per_s * seconds:,.3g} items/{unit}"
    raise AssertionError


def _search_rows(now: Status) -> Iterator[Row]:
    search = now.search
    if search is None:
        return
    if "trials" in search:
        yield from _trial_rows(search)
        return
    budget = search["budget"] or search["arms"]
    rounds = counted(search["rounds"], "round")
    asked = f"{search['asked']:,} of {counted(budget, 'arm')} requested in {rounds}"
    yield Row(
        "search",
        f"{search['policy']}, {asked}, {counted(search['evaluations'], 'evaluation')} done",
    )
    best = search["best"]
    if best is None:
        yield Row("best", "no arm has a reward yet", DIM)
    else:
        spread = "" if best["stderr"] is None else f" ± {best['stderr']:.4f}"
        parts = [f"{best['reward']:.4f}{spread}"]
        parts += [counted(search["ties"], "tie")] if search["ties"] else []
        if search["rounds_since_best"]:
            parts.append(f"found {counted(search['rounds_since_best'], 'round')} ago")
        yield Row("best", f"{short(best['arm'], _ARM_CHARS)}  {', '.join(parts)}", GOOD)
    last = [
        f"{short(arm, 30)} {f'({why})' if reward is None else f'{reward:.4f}'}"
        for arm, reward, why in search["last"][:3]
    ]
    if last:
        yield Row("last", ", ".join(last), DIM)


def _trial_rows(search: dict[str, Any]) -> Iterator[Row]:
    """The search of an Optuna study."""
    counts = [f"{count:,} {state.lower()}" for state, count in sorted(search["trials"].items())]
    yield Row("study", ", ".join([search["policy"], *counts]))
    if (best := search["best"]) is not None:
        said = f"{best['reward']:.6g} in trial {best['trial']}"
        yield Row("best", f"{short(best['arm'], _ARM_CHARS)}  {said}", GOOD)


def _failure_rows(now: Status) -> Iterator[Row]:
    for one in now.failures:
        count = one["items"] or one["retrying"]
        label = "failed" if one["items"] else "retrying"
        names = sorted(one["hosts"], key=lambda name: -one["hosts"][name])
        more = f" and {counted(len(names) - 2, 'more host')}" if len(names) > 2 else ""
        where = f"on {', '.join(names[:2])}{more}" if names else ""
        when = ""
        if one["first"] is not None and one["last"] is not None:
            begin, end = clock_time(one["first"]), clock_time(one["last"])
            when = f"at {end}" if begin == end else f"{begin} to {end}"
        tone = BAD if one["items"] else WARN
        yield Row(label, f"{count:,} x {short(one['error'], _ERROR_CHARS)}", tone)
        item = short(json.dumps(one["example"], ensure_ascii=False), _ITEM_CHARS)
        yield Row("", ", ".join(part for part in (where, when, item) if part), DIM)
        yield Row("", f"hpctk explain {quote(now.run)} --item {one['item']}", DIM)
    if failed_items(now):
        yield Row("", f"hpctk retry {quote(now.run)}  makes failed items pending again", DIM)


def _problem_rows(now: Status) -> Iterator[Row]:
    if now.is_open:
        yield Row("next", now.reason.partition(": ")[2])
    elif now.reason:
        yield Row("why", now.reason, BAD)
    for one in now.grown:
        from hpc_toolkit.system.needs import shown  # few runs need it

        needs = ", ".join(shown(*pair) for pair in one["needs"].items())
        counts = (f"{one[word]:,} {word}" for word in ("done", "failed", "pending") if word in one)
        most = ", the most that its retry allows" if one["most"] else ""
        yield Row("retried", f"{one['stage']} with {needs}{most}: {', '.join(counts)}")
    for one in now.unmet:
        yield Row("needs", one["text"], WARN)
        if one["submit"]:
            yield Row("", one["submit"], DIM)
    if now.doctor:
        yield Row("doctor", now.doctor, WARN)
    yield from (Row("warning", warning, WARN) for warning in now.warnings[:_WARNINGS_SHOWN])


def _workers(now: Status) -> list[str]:
    counts = {
        "draining": now.draining,
        "finished": now.workers.finished,
        "dead": now.workers.dead,
        "unreadable": now.workers.unreadable,
    }
    some = [f"{count:,} {word}" for word, count in counts.items() if count]
    some += [f"{counted(now.deaths, 'death')} seen"] if now.deaths else []
    return [f"{now.workers.alive:,} alive", *some, *not_shown(now)]


def _place_rows(now: Status) -> Iterator[Row]:
    from hpc_toolkit.system.binding import Place

    for worker, record in now.places.items():
        yield Row("", f"{worker}: {Place.from_record(record)}", DIM)


def job_rows(jobs: Sequence[JobRecord]) -> list[Row]:
    """One row for each job, oldest first; of very many the newest that have not ended.

    Jobs that are unknown for one reason share a row.
    """
    reasons = Counter(job.reason for job in jobs if job.state == UNKNOWN)
    shared = {reason: count for reason, count in reasons.items() if count > 1}
    jobs = [job for job in jobs if job.state != UNKNOWN or job.reason not in shared]
    ranked = sorted(
        range(len(jobs)), key=lambda at: (jobs[at].ended, jobs[at].state == UNKNOWN, -at)
    )
    shown = sorted(ranked[:_JOBS_SHOWN])
    rows = [Row(f"job {jobs[at].id}", job_text(jobs[at])) for at in shown]
    hidden = len(jobs) - len(shown)
    rows += [Row("jobs", f"and {hidden:,} more", DIM)] if hidden else []
    return rows + [Row("jobs", f"{count} {UNKNOWN} ({why})", DIM) for why, count in shared.items()]


def job_facts(jobs: Sequence[JobRecord]) -> list[dict[str, Any]]:
    """Each job, as ``hpctk status --json`` has it."""
    keys = ("id", "state", "reason", "nodes", "restarts", "start", "end")
    return [{key: getattr(job, key) for key in keys} for job in jobs]


def job_text(job: JobRecord) -> str:
    """A job's state, and what follows from it; elements and restarts whatever the state."""
    state, parts = job.state, []
    if job.running:
        state += f" on {job.nodes}" if job.nodes else ""
        parts += [f"until {clock_time(job.end)}"] if job.end is not None else []
    elif job.reason:
        state += f" ({job.reason})"
    if job.ended:
        parts += [f"ended {clock_time(job.end)}"] if job.end is not None else []
        parts += [f"exit code {job.exit_code}"] if job.exit_code else []
    if job.waiting and job.start is not None and job.start > time.time():
        parts.append(f"starts about {clock_time(job.start)}")
    if len(job.elements) > 1:
        state += ", of its elements " + ", ".join(f"{n} {name}" for name, n in job.elements)
    if job.restarts:
        parts.append(counted(job.restarts, "restart"))
    return ", ".join([state, *parts])


def clock_time(at: float) -> str:
    """The time of day here, with the date if it is not near."""
    near = abs(at - time.time()) < _DAY_S / 2
    try:
        return time.strftime("%H:%M" if near else "%Y-%m-%d %H:%M", time.localtime(at))
    except (OverflowError, OSError, ValueError):
        return "unknown"


def short(text: str, most: int) -> str:
    """Text of at most as many characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def host_rows(hosts: Sequence[HostLine]) -> list[Row]:
    """A row for each host of the full-screen view, where a host without busy workers stands out."""
    width = max((columns(one.host) for one in hosts), default=0)
    rows = []
    for number, one in enumerate(hosts):
        workers = "worker " if one.alive == 1 else "workers"
        share = f"{100 * one.busy // one.alive if one.alive else 0:3}% busy"
        rate = rate_text(one.rate_per_s) if one.rate_per_s else "-"
        deaths = f"  {one.deaths} died" if one.deaths else ""
        text = f"{pad(one.host, width)}  {one.alive:3} {workers}  {share}  {rate:<14}{deaths}"
        tone = BAD if one.died else WARN if one.alive and not one.busy else ""
        rows.append(Row("" if number else "hosts", text.rstrip(), tone))
    return rows
