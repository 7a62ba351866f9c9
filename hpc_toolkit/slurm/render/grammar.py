"""Parsers for sbatch's options: arrays, dependencies, and ``--sbatch NAME[=VALUE]``.

They accept and return forms that sbatch(1) reads in the same way in every version since 21.08, and
raise RenderError for all others. ``where`` is the option that errors name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.allowlist import check_text, refusal, refuse_twice

MAX_INDEX = 4_000_000
"""The highest possible array index: the largest MaxArraySize of slurm.conf(5) is one more."""

_JOB = r"[1-9][0-9]{0,9}(?:_(?:[0-9]{1,7}|\*))?"
_KINDS = ("after", "afterany", "afterburstbuffer", "aftercorr", "afternotok", "afterok")
_AFTER = rf"after((?::{_JOB}(?:\+[0-9]{{1,7}})?)+)"
_OTHERS = rf"(?:{'|'.join(_KINDS[1:])})(?::{_JOB})+"
_RANGE = r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([0-9]{1,7}))?)?"

_ARRAY_HINT = "indices such as 0-99, 1,4,7-9 or 0-99:3, and %8 for at most 8 at a time"
_DEPENDENCY_HINT = "afterok:JOB, afterany:JOB:JOB, after:JOB+MINUTES, singleton, joined by , or ?"

_NAME = re.compile(r"[a-z][a-z0-9-]{1,39}")
_VALUE = re.compile(r".{0,1024}")

_NAMED = (
    *("account", "array", "cpus-per-task", "dependency", "gpus-per-node", "job-name", "mem"),
    *("nodes", "ntasks-per-node", "output", "partition", "qos", "requeue", "time"),
)

FIELDS = (
    *("chdir", "constraint", "cpus-per-gpu", "error", "exclude", "exclusive", "gpu-bind", "gres"),
    *("kill-on-invalid-dep", "mem-per-cpu", "mem-per-gpu", "nodelist", "ntasks", "ntasks-per-gpu"),
    *("open-mode", "oversubscribe", "reservation", "signal", "time-min"),
)
"""Names that set the field of ``ScriptSpec`` with this name, in underscores, and are checked."""

PASSED = (
    *("begin", "comment", "deadline", "gres-flags", "licenses", "mail-type", "mail-user"),
    *("network", "prefer", "priority", "segment", "switches", "tmp", "wckey"),
)
PASSED_ALONE = ("get-user-env", "hold", "nice", "propagate", "spread-job")
"""Other options that people give to sbatch, with a value and without, for hints."""

_UNSUPPORTED = {
    **dict.fromkeys(("gpus", "gpus-per-socket"), "use --gpus-per-node"),
    "gpus-per-task": "use --gpus-per-node with --isolate-gpus",
    "tasks-per-node": "use --ntasks-per-node",
    "tres-per-task": "use --gpus-per-node and --cpus-per-task",
    "no-requeue": "use --no-requeue",
    "no-kill": "the script's template decides that",
    **dict.fromkeys(("hetjob", "packjob"), "one script requests nodes of one kind"),
    **dict.fromkeys(("help", "usage", "version"), "it would keep sbatch from submitting"),
    "test-only": "it would keep sbatch from submitting: give it to sbatch itself",
    **dict.fromkeys(("parsable", "quiet", "verbose", "wait"), "give it to sbatch itself"),
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
    text: str
    ranges: tuple[range, ...]
    at_once: str
    """How many elements may run at a time; "" for all."""
    highest: int
    """The largest index as written: Slurm takes the end of ``0-9:2`` as 9."""


def parse_array(text: str, where: str) -> Array:
    """Parse the indices of an array; leading zeros are dropped."""
    indices, percent, at_once = text.partition("%")
    parts = [re.fullmatch(_RANGE, part) for part in indices.split(",")]
    numbers = [[int(n) for n in part.groups() if n] for part in parts if part]
    ranges = tuple(_range(*some) for some in numbers)
    # sbatch refuses "3-1" and a step of 0, for which there is no range, without saying why.
    usable = None not in parts and all(ranges)
    if not usable or (percent and not re.fullmatch("[1-9][0-9]{0,6}", at_once)):
        raise refusal(where, text, _ARRAY_HINT)
    highest = max(some[:2][-1] for some in numbers)
    if highest > MAX_INDEX:
        msg = f"{where}: index {highest} is too high (at most {MAX_INDEX})"
        raise RenderError(msg, hint="give each array element more work")
    texts = ["-".join(map(str, some[:2])) + "".join(f":{n}" for n in some[2:]) for some in numbers]
    return Array(",".join(texts) + percent + at_once, ranges, at_once, highest)


def _range(first: int, last: int | None = None, step: int = 1) -> range:
    return range(first, (first if last is None else last) + 1, step) if step else range(0)


def check_dependency(text: str, where: str) -> None:
    """Raise unless all parts of ``text`` are conditions, joined by only one kind of separator."""
    parts = re.split("[,?]", text)
    known = all(
        part == "singleton" or re.fullmatch(_AFTER, part) or re.fullmatch(_OTHERS, part)
        for part in parts
    )
    if not known or ("," in text and "?" in text):
        raise refusal(where, text, _DEPENDENCY_HINT)


def split_passed(text: str, where: str) -> tuple[str, str | None]:
    """Split ``NAME[=VALUE]`` into name and value. Raises RenderError."""
    name, equals, value = text.partition("=")
    if not text.isprintable() or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise refusal(where, text, "NAME or NAME=VALUE, NAME being a long option of sbatch")
    if name in MANAGED:
        msg = f"{where}: {name!r} is not supported"
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
    refuse_twice([split_passed(text, where)[0] for text in texts], where)
