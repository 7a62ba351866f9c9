"""Kinds of values of a job script's options: how each is read, checked and written.

The texts that they accept are read in the same way by sbatch(1) of every version since 21.08. All
others raise RenderError; ``where`` is the option that errors name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from typing import Any, NamedTuple

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm import render as allow
from hpc_toolkit.slurm.render import refusal
from hpc_toolkit.system import quantities as q
from hpc_toolkit.system.processes import WARNING_NAME, WARNING_NAMES

NO_MEMORY = -1
"""The memory per node of a request that leaves the memory to Slurm."""

MAX_INDEX = 4_000_000
"""The highest possible array index: the largest MaxArraySize of slurm.conf(5) is one more."""

_JOB = r"[1-9][0-9]{0,9}(?:_(?:[0-9]{1,7}|\*))?"
_KINDS = ("after", "afterany", "afterburstbuffer", "aftercorr", "afternotok", "afterok")
_AFTER = rf"after((?::{_JOB}(?:\+[0-9]{{1,7}})?)+)"
_OTHERS = rf"(?:{'|'.join(_KINDS[1:])})(?::{_JOB})+"
_RANGE = r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([0-9]{1,7}))?)?"

_ARRAY_HINT = "indices such as 0-99, 1,4,7-9 or 0-99:3, and %8 for at most 8 at a time"
_DEPENDENCY_HINT = "afterok:JOB, afterany:JOB:JOB, after:JOB+MINUTES, singleton, joined by , or ?"

_PATH_MAX = 4096
_PASSED_MAX = 1024
WORD = r"[A-Za-z0-9_][A-Za-z0-9_.+@-]{0,127}"
WORDS = f"{WORD}(,{WORD}){{0,31}}"
FEATURES = r"[A-Za-z0-9_\[(][A-Za-z0-9_.&|,*:=()\[\]-]{0,255}"
# What follows a percent sign that Slurm replaces: an optional width and a letter.
_FILLED = "[0-9]*[A-Za-z%]"
# Slurm reads a backslash as "replace no % symbols" and drops it.
# A single % at the end is part of the name up to 24.11; 26.05 leaves it out.
# Slurm before 23.02 makes no directories, so that a job with %j in a directory would fail.
_LOG = (
    r"(?!(?:[^%]|%%|%(?![0-9]*[A-Za-z%]))*%[0-9]*[A-Za-z][^/]*/)(?!~/|-$|(?:.*/)?\.\.?$)"
    r"(?:[^\\%]|%(?![0-9]*(?:[A-Za-z%]|$))|%%|%[0-9]{0,2}[AaJjNnbrstux]){1,1024}(?<!/)"
)
_GPU_BIND = (
    r"(verbose,)?(closest|none|(single|per_task):[1-9][0-9]{0,2}"
    r"|map_gpu:[0-9]{1,3}(,[0-9]{1,3}){0,255}"
    r"|mask_gpu:(0x)?[0-9A-Fa-f]{1,32}(,(0x)?[0-9A-Fa-f]{1,32}){0,255})"
)
_WHERE = r"(0x)?[0-9A-Fa-f]{1,64}(,(0x)?[0-9A-Fa-f]{1,64}){0,255}"
_CPU_BIND = rf"(verbose,)?(none|threads|cores|sockets|ldoms|(map|mask)_(cpu|ldom):{_WHERE})"
_MEM_BIND = rf"(verbose,)?(none|local|(map|mask)_mem:{_WHERE})(,prefer)?(,sort)?"
_INSIDE = r"\*|block|cyclic|fcyclic"
_DISTRIBUTION = rf"(\*|block|cyclic|plane=[1-9][0-9]{{0,3}})(:({_INSIDE})){{0,2}}(,(No)?Pack)?"
_GRES = r"(?!(?i:gpu)\b)[A-Za-z_][\w.-]{0,63}(:[A-Za-z_][\w.-]{0,63})?(:[0-9]{1,9}[kmgtpKMGTP]?)?"
ABSOLUTE = f"/.{{1,{_PATH_MAX - 1}}}"
NO_OPTION = f"[^-].{{0,{_PATH_MAX - 1}}}"
# No colon, which separates the directories of PATH.
PROGRAMS = f"/[^:]{{1,{_PATH_MAX - 1}}}"
CONDA = f"[A-Za-z0-9_][A-Za-z0-9_.+-]{{0,127}}|{PROGRAMS}"

PASSED = (
    *("begin", "comment", "deadline", "gres-flags", "licenses", "mail-type", "mail-user"),
    *("network", "prefer", "priority", "segment", "switches", "tmp", "wckey"),
)
PASSED_ALONE = ("get-user-env", "hold", "nice", "propagate", "spread-job")
"""Other options that people give to sbatch, with a value and without, for hints."""

_UNSUPPORTED = {
    **dict.fromkeys(("gpus", "gpus-per-socket"), "use --gpus-per-node"),
    "cpu-bind": "use --cpu-bind, which srun gets",
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
"""Options of sbatch that no script has, and what to do instead."""


@dataclass(frozen=True, slots=True)
class Array:
    text: str
    indices: set[int]
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
    return Array(",".join(texts) + percent + at_once, {*chain(*ranges)}, at_once, highest)


def _range(first: int, last: int | None = None, step: int = 1) -> range:
    return range(first, (first if last is None else last) + 1, step) if step else range(0)


def file_name(job_name: str) -> str:
    """Return a job's name as the name of a file.

    A name that has to be changed gets a part of its hash, so that no two jobs share a file.
    """
    name = re.sub("[^A-Za-z0-9._-]", "_", job_name)
    return name if name == job_name else f"{name}-{sha256(job_name.encode()).hexdigest()[:8]}"


def left_out(text: str) -> str:
    """Return the option whose default ``NAME=`` leaves out; "" for a text that sets an option."""
    name, equals, value = text.partition("=")
    return name if equals and not value else ""


def check_dependency(text: str, where: str) -> None:
    """Raise unless all parts of ``text`` are conditions, joined by only one kind of separator."""
    parts = re.split("[,?]", text)
    known = all(
        part == "singleton" or re.fullmatch(_AFTER, part) or re.fullmatch(_OTHERS, part)
        for part in parts
    )
    if not known or ("," in text and "?" in text):
        raise refusal(where, text, _DEPENDENCY_HINT)


def check_passed(
    texts: tuple[str, ...], where: str, own: Mapping[str, str], defaults: tuple[str, ...]
) -> None:
    """Raise RenderError unless all ``NAME[=VALUE]`` may be passed on and none is given twice.

    ``own`` are options of sbatch with a field, and how to write them. Those of ``defaults`` may
    have one in a cluster file, which ``NAME=`` leaves out.
    """
    known = {**own, **_UNSUPPORTED}
    for text_ in texts:
        name, _, value = text_.partition("=")
        shaped = re.fullmatch("[a-z][a-z0-9-]{1,39}", name) and len(value) <= _PASSED_MAX
        if not text_.isprintable() or not shaped:
            raise refusal(where, text_, "NAME or NAME=VALUE, NAME being a long option of sbatch")
        if left_out(text_) in defaults:
            continue
        if name in known:
            msg = f"{where}: {name!r} is not supported"
            field = f"ScriptSpec has the field {name.replace('-', '_')}"
            raise RenderError(msg, hint=field if "--sbatch" in known[name] else known[name])
        longer = sorted(one for one in known if one.startswith(name))
        if longer:
            msg = f"{where}: sbatch may read {name!r} as {longer[0]!r}"
            raise RenderError(msg, hint=known[longer[0]])
        if name == "input":
            # Slurm reads this path like that of --output; a bad path fails the job without a log.
            LOG.check(value, f"{where} input")
    allow.refuse_twice([one.partition("=")[0] for one in texts], where)


class Value(NamedTuple):
    """A kind of value."""

    check: Callable[[Any, str], object]
    """Raises RenderError or ConfigError for a value that a script must not contain."""
    word: Callable[[str], Any] = str
    """Converts one word of a command line; may raise ValueError."""
    quantity: Callable[..., int] | None = None
    """Reads a word with a unit as seconds or MiB."""
    show: Callable[[int], str] = str
    """Writes a quantity as Slurm and ``quantity`` read it."""


def count(lowest: int, highest: int) -> Value:
    """A whole number; no cluster needs more than ``highest``."""
    return Value(lambda value, where: allow.check_count(value, (lowest, highest), where), int)


def text(pattern: str, wanted: str) -> Value:
    """A text that ``pattern`` matches completely; ``wanted`` describes it in hints."""
    return Value(lambda value, where: allow.check_match(value, pattern, wanted, where))


def path(pattern: str, wanted: str) -> Value:
    """A path of this kind in which no name is longer than a file system takes."""

    def check(value: Any, where: str) -> None:
        allow.check_match(value, pattern, wanted, where)
        allow.check_names(value, where)

    return Value(check)


def _each(check: Callable[[Any, str], object]) -> Value:
    """Several texts, each of which must pass ``check``."""

    def check_each(values: tuple[str, ...], where: str) -> None:
        for value in values:
            check(value, where)

    return Value(check_each)


def _flag(wanted: str, *words: str) -> Value:
    """Yes, no, or one of these words."""

    def check(value: object, where: str) -> None:
        if not isinstance(value, bool) and value not in words:
            raise refusal(where, value, wanted)

    return Value(check, lambda word: {"yes": True, "no": False}.get(word, word))


def _checked_text(check: Callable[[str, str], object]) -> Value:
    def check_text(value: object, where: str) -> None:
        if not isinstance(value, str):
            raise refusal(where, value, "text")
        check(value, where)

    return Value(check_text)


def _node_memory(given: str, *, where: str) -> int:
    return NO_MEMORY if given == "none" else q.parse_mem_mib(given, where=where, zero=True)


_SECONDS = count(1, q.MAX_WALLTIME_S).check
_MOST_MIB = q.MAX_SIZE_BYTES // 2**20

FLAG = _flag("yes or no; in Python, True or False")
EXCLUSIVE = _flag("no value, or one of user, mcs and topo", "user", "mcs", "topo")
WALLTIME = Value(_SECONDS, str, q.parse_walltime, q.format_walltime)
DURATION = Value(
    *(_SECONDS, str, lambda given, where: math.ceil(q.parse_duration(given, where=where))),
    q.format_seconds,
)
MEMORY = Value(count(1, _MOST_MIB).check, str, q.parse_mem_mib, q.format_mem)
NODE_MEMORY = Value(
    *(count(NO_MEMORY, _MOST_MIB).check, str, _node_memory),
    lambda mib: "none" if mib == NO_MEMORY else q.format_mem(mib),
)
LOG = path(
    _LOG, "a path without backslashes, with %x, %j, ... in its last part; %% is a percent sign"
)
ARRAY = _checked_text(parse_array)
DEPENDENCY = _checked_text(check_dependency)
NAME = text(
    r"[A-Za-z0-9](?:[A-Za-z0-9._/:=,+@ -]{0,62}[A-Za-z0-9._/:=,+@-])?",
    "at most 64 letters, digits, blanks and . _ - / : = , + @",
)
HOSTS = text("[A-Za-z0-9][A-Za-z0-9_.,\\[\\]-]{0,4095}", "host names such as n1,n[3-5]")
GPU_TYPE = text("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "a type of GPU such as l40s")
GPU_BIND = text(_GPU_BIND, "closest, none, single:N, per_task:N, map_gpu:LIST or mask_gpu:LIST")
GRES = text(
    rf"{_GRES}(,{_GRES}){{0,15}}",
    "NAME[:TYPE][:COUNT], separated by commas; --gpus-per-node requests GPUs",
)
SIGNALLED = f"B:{WARNING_NAME}@"
SIGNAL = text(
    f"B:(SIG)?({WARNING_NAMES.replace(' ', '|')})@[1-9][0-9]{{0,4}}",
    f"{SIGNALLED}SECONDS; the script handles {WARNING_NAMES.replace(' ', ' and ')}",
)
DIRECTORY = path(
    rf"(?!~)(?:[^\\%]|%(?!{_FILLED})){{1,{_PATH_MAX}}}",
    "an absolute directory without backslashes or patterns such as %j",
)
CPU_BIND = text(_CPU_BIND, "none, threads, cores, sockets, ldoms, map_cpu:LIST or mask_cpu:LIST")
MEM_BIND = text(_MEM_BIND, "none, local, map_mem:LIST or mask_mem:LIST, with ',prefer'")
DISTRIBUTION = text(
    _DISTRIBUTION, "block, cyclic or plane=N, then sockets and cores as in block:cyclic"
)
HINT = text(
    "compute_bound|memory_bound|multithread|nomultithread",
    "compute_bound, memory_bound, multithread or nomultithread",
)
MODULES = _each(
    text("[A-Za-z0-9_][A-Za-z0-9_./+-]{0,255}", "a module's name such as cuda/12.4").check
)
COMMANDS = _each(allow.setup_words)
_BIND = "/[^:,]{0,4000}(:/[^:,]{0,4000}(:r[ow])?)?"
BINDS = _each(text(_BIND, "FROM[:TO[:ro]], absolute paths without ':' and ','").check)
STAGED = Value(allow.check_staged)
VARIABLES = Value(
    _each(lambda pair, where: allow.check_variable(pair[0], pair[1], where)).check,
    lambda word: word.partition("=")[::2],
)
PROGRAM = Value(allow.check_command)
