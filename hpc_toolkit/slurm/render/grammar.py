"""Parsers for sbatch's options: arrays, dependencies, moments, and ``--sbatch NAME[=VALUE]``.

They accept and return forms that sbatch(1) reads in the same way in every version since 21.08, and
raise RenderError for all others. ``where`` is the option that errors name.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import Literal

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.allowlist import check_text, refusal
from hpc_toolkit.system.quantities import format_walltime, parse_walltime

MAX_INDEX = 4_000_000
"""The highest possible array index: the largest MaxArraySize of slurm.conf(5) is one more."""

_JOB = r"[1-9][0-9]{0,9}(?:_(?:[0-9]{1,7}|\*))?"
_KINDS = ("after", "afterany", "afterburstbuffer", "aftercorr", "afternotok", "afterok")
_AFTER = rf"after((?::{_JOB}(?:\+[0-9]{{1,7}})?)+)"
_OTHERS = rf"(?:{'|'.join(_KINDS[1:])})(?::{_JOB})+"
_RANGE = r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([0-9]{1,7}))?)?"
_SWITCHES = r"([1-9][0-9]{0,5})(?:@(.+))?"

_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_FROM_NOW = r"now(?:\+([0-9]{1,9})(second|minute|hour|day|week)?s?)?"
_DATE = r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:[T ]([0-9]{2}:[0-9]{2}(?::[0-9]{2})?))?"
_CLOCK = r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))? ?([AaPp][Mm])?"
# Written as times, because Slurm 22.05 does not know "elevenses".
_HOURS = {"midnight": 0, "elevenses": 11, "noon": 12, "fika": 15, "teatime": 16}

_ARRAY_HINT = "indices such as 0-99, 1,4,7-9 or 0-99:3, and %8 for at most 8 at a time"
_DEPENDENCY_HINT = "afterok:JOB, afterany:JOB:JOB, after:JOB+MINUTES, singleton, joined by , or ?"
_MOMENT_HINT = "2030-01-31T18:00, 18:00, tomorrow, now+2hours"

_NAME = re.compile(r"[a-z][a-z0-9-]{1,39}")
_VALUE = re.compile(r".{0,1024}")

_NAMED = (
    *("account", "array", "cpus-per-task", "dependency", "gpus-per-node", "job-name", "mem"),
    *("nodes", "ntasks-per-node", "output", "partition", "qos", "requeue", "time"),
)

FIELDS = (
    *("begin", "chdir", "comment", "constraint", "cpus-per-gpu", "deadline", "error", "exclude"),
    *("exclusive", "get-user-env", "gpu-bind", "gres", "gres-flags", "hold"),
    *("kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mem-per-cpu", "mem-per-gpu"),
    *("network", "nice", "nodelist", "ntasks", "ntasks-per-gpu", "open-mode", "oversubscribe"),
    *("prefer", "priority", "propagate", "reservation", "segment", "signal", "spread-job"),
    *("switches", "time-min", "tmp", "wckey"),
)
"""Names that set the field of ``ScriptSpec`` with this name, in underscores, and are checked."""

_UNSUPPORTED = {
    "gpus": "use --gpus-per-node",
    "gpus-per-task": "use --gpus-per-node with --isolate-gpus",
    "gpus-per-socket": "use --gpus-per-node",
    "tasks-per-node": "use --ntasks-per-node",
    "tres-per-task": "use --gpus-per-node and --cpus-per-task",
    "no-requeue": "use --no-requeue",
    "no-kill": "the script's template decides that",
    "hetjob": "one script asks for nodes of one kind",
    "packjob": "one script asks for nodes of one kind",
    "help": "it would keep sbatch from submitting",
    "usage": "it would keep sbatch from submitting",
    "version": "it would keep sbatch from submitting",
    "test-only": "it would keep sbatch from submitting: give it to sbatch itself",
    "parsable": "give it to sbatch itself",
    "quiet": "give it to sbatch itself",
    "verbose": "give it to sbatch itself",
    "wait": "give it to sbatch itself",
    "wrap": "the script is the program; see the template 'command'",
}

MANAGED = {
    **{name: f"use --{name}" for name in _NAMED},
    **{name: f"use --sbatch {name}" for name in FIELDS},
    **_UNSUPPORTED,
}
"""Options of sbatch that are not passed on, and what to do instead."""


@dataclass(frozen=True, slots=True)
class Array:
    """The indices of a job array."""

    text: str
    """The indices in sbatch's notation."""
    ranges: tuple[range, ...]
    """The indices, in the order in which they were given."""
    at_once: str
    """How many elements may run at a time; "" for all."""
    highest: int
    """The largest index as written: Slurm takes the end of ``0-9:2`` as 9."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time, without reference to the current time."""

    text: str
    """The time in sbatch's notation."""
    kind: Literal["now", "date", "clock"]
    """What it counts from: the submission, the calendar, or the next such time of day."""
    seconds: int
    """Seconds since the submission or since the year 1, by ``kind``; 0 for a time of day."""


def parse_array(text: str, where: str) -> Array:
    """Parse the indices of an array; leading zeros are dropped."""
    indices, percent, at_once = text.partition("%")
    texts, ranges, highest = [], [], 0
    for part in indices.split(","):
        match = re.fullmatch(_RANGE, part)
        if not match:
            raise refusal(where, text, _ARRAY_HINT)
        first, last, step = (int(field) if field else None for field in match.groups())
        top = last if last is not None else int(match[1])
        # sbatch refuses "3-1" and a step of 0 without saying why.
        if top < (first or 0) or step == 0:
            raise refusal(where, text, _ARRAY_HINT)
        texts.append("-".join(str(n) for n in (first, last) if n is not None))
        texts[-1] += f":{step}" if step else ""
        ranges.append(range(first or 0, top + 1, step or 1))
        highest = max(highest, top)
    if percent and not re.fullmatch("[1-9][0-9]{0,6}", at_once):
        raise refusal(where, text, _ARRAY_HINT)
    if highest > MAX_INDEX:
        msg = f"{where}: no Slurm has an index {highest} (the highest is {MAX_INDEX})"
        raise RenderError(msg, hint="let each element do several things")
    return Array(",".join(texts) + percent + at_once, tuple(ranges), at_once, highest)


def check_dependency(text: str, where: str) -> None:
    """Raise unless all parts of ``text`` are conditions, joined by only one kind of separator."""
    parts = re.split("[,?]", text)
    known = all(
        part == "singleton" or re.fullmatch(_AFTER, part) or re.fullmatch(_OTHERS, part)
        for part in parts
    )
    if not known or ("," in text and "?" in text):
        raise refusal(where, text, _DEPENDENCY_HINT)


def parse_switches(text: str, where: str) -> str:
    """Return ``COUNT[@TIME]`` with a canonical time."""
    match = re.fullmatch(_SWITCHES, text)
    if not match:
        raise refusal(where, text, "COUNT or COUNT@TIME, such as 1@12:00:00")
    wait = f"@{format_walltime(parse_walltime(match[2], where=where))}" if match[2] else ""
    return f"{match[1]}{wait}"


def parse_moment(text: str, where: str) -> Moment:
    """Parse a time of day, a calendar date, or a time counted from the submission.

    sbatch's dates without a year are refused: 01/02 is a different day in America and in Europe.
    """
    if match := re.fullmatch(_FROM_NOW, text):
        count, unit = int(match[1] or 0), match[2] or "second"
        spelt = f"now+{count}{unit}s" if match[1] else "now"
        return Moment(spelt, "now", count * _UNITS[unit])
    if match := re.fullmatch(_DATE, text):
        try:
            date = dt.datetime.fromisoformat(f"{match[1]}T{match[2] or '00:00'}")
        except ValueError:
            # Slurm 22.05 reads February 30 as March 2.
            raise refusal(where, text, _MOMENT_HINT) from None
        return Moment(date.isoformat(), "date", int((date - dt.datetime.min).total_seconds()))
    day, rest = _day(text)
    clock = _clock(rest)
    if (day and not rest) or clock:
        return Moment(day + clock, "clock", 0)
    raise refusal(where, text, _MOMENT_HINT)


def _day(text: str) -> tuple[str, str]:
    for day in ("today", "tomorrow"):
        if text.startswith(day):
            return day, text.removeprefix(day).strip(" ")
    return "", text


def _clock(text: str) -> str:
    """Return ``HH:MM:SS``, or "" if ``text`` is not a time of day."""
    if text in _HOURS:
        return f"{_HOURS[text]:02d}:00:00"
    match = re.fullmatch(_CLOCK, text)
    if not match:
        return ""
    hour, minute, second = int(match[1]), int(match[2]), int(match[3] or 0)
    if match[4]:
        if not 1 <= hour <= 12:
            return ""
        hour = hour % 12 + (12 if match[4].lower() == "pm" else 0)
    if hour > 23 or max(minute, second) > 59:
        return ""
    return f"{hour:02d}:{minute:02d}:{second:02d}"


def split_passed(text: str, where: str) -> tuple[str, str | None]:
    """Split ``NAME[=VALUE]`` into name and value. Raises RenderError."""
    name, equals, value = text.partition("=")
    if not text.isprintable() or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise refusal(where, text, "NAME or NAME=VALUE, NAME being a long option of sbatch")
    if name in MANAGED:
        msg = f"{where}: {name!r} is not passed through"
        field = f"ScriptSpec has the field {name.replace('-', '_')}"
        raise RenderError(msg, hint=field if name in FIELDS else MANAGED[name])
    longer = sorted(option for option in MANAGED if option.startswith(name))
    if longer:
        msg = f"{where}: sbatch may read {name!r} as {longer[0]!r}"
        raise RenderError(msg, hint=MANAGED[longer[0]])
    if name == "input":
        # Slurm reads this path like that of --output; a bad path fails the job without a log.
        check_text(value, "output", f"{where} input")
    return name, value if equals else None


def check_passed(texts: tuple[str, ...], where: str) -> None:
    """Raise RenderError unless all options may be passed on and none is given twice."""
    names = [split_passed(text, where)[0] for text in texts]
    for name in names:
        if names.count(name) > 1:
            msg = f"{where}: {name!r} is given twice"
            raise RenderError(msg, hint="sbatch would take the last one")
