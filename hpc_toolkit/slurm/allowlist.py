"""Allow-lists for the values of a job script: a value is accepted only if its pattern matches.

A scheduler and a shell read the script. No value may hold a non-printable character: a newline in
a job name would start a directive of its own. The script quotes every value nevertheless.
"""

from __future__ import annotations

import math
import re
import shlex
from functools import partial
from typing import TYPE_CHECKING

from hpc_toolkit.errors import RenderError
from hpc_toolkit.system.quantities import (
    MAX_SIZE_BYTES,
    MAX_WALLTIME_S,
    format_mem,
    format_seconds,
    format_walltime,
    parse_duration,
    parse_mem_mib,
    parse_walltime,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeGuard

_PATH_MAX = 4096
_ABSOLUTE = f"/.{{1,{_PATH_MAX - 1}}}"
_NO_OPTION = f"[^-].{{0,{_PATH_MAX - 1}}}"
_SHOWN_CHARS = 120
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.+@-]{0,127}"
_WORDS = f"{_WORD}(,{_WORD}){{0,31}}"
_FEATURES = r"[A-Za-z0-9_\[(][A-Za-z0-9_.&|,*:=()\[\]-]{0,255}"
_HOSTS = r"[A-Za-z0-9][A-Za-z0-9_.,\[\]-]{0,4095}"
# What follows a percent sign that Slurm replaces: an optional width and a letter.
_FILLED = "[0-9]*[A-Za-z%]"
# Slurm reads a backslash as "replace no % symbols" and drops it.
# A single % at the end is part of the name up to 24.11; 26.05 leaves it out.
# Slurm before 23.02 makes no directories, so that a job with %j in a directory would fail.
_LOG = (
    r"(?!(?:[^%]|%%|%(?![0-9]*[A-Za-z%]))*%[0-9]*[A-Za-z][^/]*/)(?!~/|-$)"
    r"(?:[^\\%]|%(?![0-9]*(?:[A-Za-z%]|$))|%%|%[0-9]{0,2}[AaJjNnbrstux]){1,1024}(?<!/)"
)
_LOG_WANTED = "a path without backslashes, with %x, %j, ... in its last part; %% is a percent sign"
_GPU_BIND = (
    r"(verbose,)?(closest|none|(single|per_task):[1-9][0-9]{0,2}"
    r"|map_gpu:[0-9]{1,3}(,[0-9]{1,3}){0,255}"
    r"|mask_gpu:(0x)?[0-9A-Fa-f]{1,32}(,(0x)?[0-9A-Fa-f]{1,32}){0,255})"
)
_WHERE = r"(0x)?[0-9A-Fa-f]{1,64}(,(0x)?[0-9A-Fa-f]{1,64}){0,255}"
_CPU_BIND = rf"(verbose,)?(none|threads|cores|sockets|ldoms|(map|mask)_(cpu|ldom):{_WHERE})"
_MEM_BIND = rf"(verbose,)?(none|local|(map|mask)_mem:{_WHERE})(,prefer)?(,sort)?"
_OVER_NODES = r"\*|block|cyclic|plane=[1-9][0-9]{0,3}"
_INSIDE = r"\*|block|cyclic|fcyclic"
_GRES = r"(?!(?i:gpu)\b)[A-Za-z_][\w.-]{0,63}(:[A-Za-z_][\w.-]{0,63})?(:[0-9]{1,9}[KMGT]?)?"
_VALUE = r".{0,32768}"
_MODULE = r"[A-Za-z0-9_][A-Za-z0-9_./+-]{0,255}"
_SETUP = r"[\w@%+=:,./ '\"-]{1,4096}"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]{0,127}"
_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|KEY)$", re.IGNORECASE)
_NAME_MAX = 255
_OURS = (
    *("SLURM", "SBATCH_", "SRUN_", "HPCTK_DEADLINE", "HPCTK_ARRAY_INDEX", "HPCTK_RUN_DIR"),
    *("HPCTK_STAGED", "HPCTK_WARNED", "HPCTK_DIRECTORY", "hpctk_"),
)
# Variables of bash itself: an export of them fails, or changes what the script does (bash(1)).
_OF_BASH = ("BASH", "COMP_", "EPOCH", "OPT")
_SHELL_VARIABLES = frozenset(
    {"ENV", "IFS", "SHELLOPTS", "PS4", "UID", "EUID", "PPID", "GROUPS", "RANDOM", "SRANDOM", "_"}
    | {"SECONDS", "LINENO", "FUNCNAME", "DIRSTACK", "HISTCMD", "PWD", "OLDPWD", "SHLVL", "REPLY"}
    | {"MAPFILE", "PIPESTATUS", "POSIXLY_CORRECT", "GLOBIGNORE", "EXECIGNORE"}
)
_SHELL_KEYWORDS = frozenset(
    {"if", "then", "else", "elif", "fi", "case", "esac", "for", "select", "while", "until", "do"}
    | {"done", "in", "function", "time", "coproc"}
)
USERS = ".users"
"""Directory beside staged files with one entry per task that still uses them."""

# No colon, which separates the directories of PATH.
_PROGRAMS = f"/[^:]{{1,{_PATH_MAX - 1}}}"
_CONDA = f"[A-Za-z0-9_][A-Za-z0-9_.+-]{{0,127}}|{_PROGRAMS}"
_BIND = "/[^:,]{0,4000}(:/[^:,]{0,4000}(:r[ow])?)?"
_PYTHON_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_WORDS_MAX = 131072


COUNTS = {
    "nodes": (1, 65536),
    "ntasks": (1, 2**28),
    "ntasks_per_node": (1, 4096),
    "ntasks_per_gpu": (1, 32),
    "gpus_per_node": (0, 128),
    "cpus_per_task": (1, 4096),
    "cpus_per_gpu": (1, 4096),
    "array_offset": (0, 2**31),
    "max_restarts": (0, 1000),
    "nproc_per_node": (1, 4096),
    "rank_restarts": (0, 1000),
    **dict.fromkeys(("time", "time_min", "idle_exit", "lease"), (1, MAX_WALLTIME_S)),
    "mem": (0, MAX_SIZE_BYTES // 2**20),
    **dict.fromkeys(("mem_per_cpu", "mem_per_gpu"), (1, MAX_SIZE_BYTES // 2**20)),
}
"""Lowest and highest accepted number of each field; no cluster needs more than the highest."""

PATTERNS = {
    "job_name": (
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        "at most 64 letters, digits, '.', '_' and '-'",
    ),
    "account": (_WORD, "one account name"),
    "partition": (_WORDS, "partition names, separated by commas"),
    "qos": (_WORD, "one name of a quality of service"),
    "reservation": (_WORDS, "reservation names, separated by commas"),
    "constraint": (_FEATURES, "node features joined by & or |"),
    "nodelist": (_HOSTS, "host names such as n1,n[3-5]"),
    "exclude": (_HOSTS, "host names such as n1,n[3-5]"),
    "signal": (
        r"B:USR1@[1-9][0-9]{0,4}",
        "B:USR1@SECONDS, the only signal that the script handles",
    ),
    "output": (_LOG, _LOG_WANTED),
    "error": (_LOG, _LOG_WANTED),
    "gpu_type": (r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "a type of GPU such as l40s"),
    "gpu_bind": (_GPU_BIND, "closest, none, single:N, per_task:N, map_gpu:LIST or mask_gpu:LIST"),
    "gres": (
        rf"{_GRES}(,{_GRES}){{0,15}}",
        "NAME[:TYPE][:COUNT], separated by commas; --gpus-per-node requests GPUs",
    ),
    "open_mode": ("append|truncate", "append or truncate"),
    "chdir": (
        rf"(?!~)(?:[^\\%]|%(?!{_FILLED})){{1,{_PATH_MAX}}}",
        "an absolute directory without backslashes or patterns such as %j",
    ),
    "run": (_NO_OPTION, "a run's path; ./-x for one called -x"),
    "container_python": (_ABSOLUTE, "an absolute path in the container"),
    "python": (_ABSOLUTE, "the absolute path of an interpreter"),
    "launch": ("task-per-node|task-per-gpu", "task-per-node or task-per-gpu"),
    "backend": ("nccl|gloo", "nccl or gloo"),
    "conda": (_CONDA, "an environment's name, or its absolute path without ':'"),
    "venv": (_PROGRAMS, "an absolute path without ':'"),
    "container": (_NO_OPTION, "an image: a file, or docker://name:tag"),
    "run_dir": (_NO_OPTION, "a directory's path; ./-x for one called -x"),
    "stage_dir": (_ABSOLUTE, "an absolute path on the nodes' own disks"),
    "cpu_bind": (_CPU_BIND, "none, threads, cores, sockets, ldoms, map_cpu:LIST or mask_cpu:LIST"),
    "mem_bind": (_MEM_BIND, "none, local, map_mem:LIST or mask_mem:LIST, with ',prefer'"),
    "numa_binding": ("node", "node: each rank runs on the CPUs of its GPU's NUMA node"),
    "distribution": (
        rf"({_OVER_NODES})(:({_INSIDE})){{0,2}}(,(No)?Pack)?",
        "block, cyclic or plane=N, then sockets and cores as in block:cyclic",
    ),
    "hint": (
        "compute_bound|memory_bound|multithread|nomultithread",
        "compute_bound, memory_bound, multithread or nomultithread",
    ),
}
"""The pattern that the complete value of a field must match, and the hint if it does not."""


def _duration_s(text: str, *, where: str) -> int:
    return math.ceil(parse_duration(text, where=where))


QUANTITIES: dict[str, tuple[Callable[..., int], Callable[[int], str]]] = {
    **dict.fromkeys(("time", "time_min"), (parse_walltime, format_walltime)),
    **dict.fromkeys(("idle_exit", "lease"), (_duration_s, format_seconds)),
    "mem": (partial(parse_mem_mib, zero=True), format_mem),
    **dict.fromkeys(("mem_per_cpu", "mem_per_gpu"), (parse_mem_mib, format_mem)),
}
"""Fields that hold seconds or MiB: how users write them, and how a script does."""

_LOGS = {"output", "error"}
_PATHS = _LOGS | {"chdir", "run", "python", "container_python", "run_dir", "stage_dir"}


def refusal(where: str, value: object, wanted: str) -> RenderError:
    """Build the error for a value that may not go into a script; ``wanted`` is its hint."""
    shown = repr(value)
    if len(shown) > _SHOWN_CHARS:
        shown = f"{shown[:_SHOWN_CHARS]}... ({len(shown)} characters)"
    return RenderError(f"{where}: {shown} is not accepted", hint=f"write {wanted}")


def matches(value: object, pattern: str) -> TypeGuard[str]:
    """Return whether ``value`` is printable text that ``pattern`` matches completely."""
    return isinstance(value, str) and value.isprintable() and bool(re.fullmatch(pattern, value))


def check_match(value: object, pattern: str, wanted: str, where: str) -> None:
    if not matches(value, pattern):
        raise refusal(where, value, wanted)


def check_count(value: object, limits: tuple[int, int], where: str) -> None:
    lowest, highest = limits
    # Not isinstance(): a bool is an int, but not a count.
    if type(value) is not int or not lowest <= value <= highest:
        raise refusal(where, value, f"a whole number from {lowest} to {highest}")


def refuse_twice(names: list[str], where: str, hint: str = "leave one of them out") -> None:
    for name in names:
        if names.count(name) > 1:
            msg = f"{where}: {name!r} is given twice"
            raise RenderError(msg, hint=hint)


def read_quantity(value: object, field: str, where: str) -> int:
    """Parse the text of a field in ``QUANTITIES`` into seconds or MiB.

    Raises RenderError or ConfigError.
    """
    if not isinstance(value, str):
        raise refusal(where, value, "text with a unit, such as '4h' or '480G'")
    return QUANTITIES[field][0](value, where=where)


def show_quantity(value: int, field: str) -> str:
    """Return the text that ``read_quantity`` and Slurm read as ``value``."""
    return QUANTITIES[field][1](value)


def check_text(value: object, field: str, where: str) -> None:
    """Raise RenderError unless ``value`` is printable and matches the pattern of ``field``.

    The names in a path must also be short enough, and a log must not be ``.`` or ``..``.
    """
    check_match(value, *PATTERNS[field], where)
    if field in _PATHS:
        check_names(str(value), where)
    if field in _LOGS and str(value).rpartition("/")[2] in {".", ".."}:
        raise refusal(where, value, "the path of a file")


def check_names(path: str, where: str) -> None:
    for name in path.split("/"):
        if len(name.encode()) > _NAME_MAX:
            # With such a log path Slurm fails the job and leaves no log.
            raise refusal(where, path, f"names of at most {_NAME_MAX} bytes")


def check_module(name: object, where: str) -> None:
    check_match(name, _MODULE, "a module's name such as cuda/12.4", where)


def looks_secret(name: str) -> bool:
    """Return whether the name of a variable suggests a secret, such as ``HF_TOKEN``."""
    return bool(_SECRET.search(name))


def check_variable(name: str, value: str, where: str) -> None:
    """Raise RenderError for a variable that users may not set, or that looks like a secret."""
    check_match(name, _VARIABLE, "NAME=VALUE with a name of letters, digits and '_'", where)
    if name.startswith(_OURS + _OF_BASH) or name in _SHELL_VARIABLES:
        raise refusal(where, name, "a name that is not set by Slurm, the shell or this script")
    if looks_secret(name):
        msg = f"{where}: {name} looks like a secret, and other users may be able to read the script"
        raise RenderError(msg, hint="export it before sbatch, or read it from a private file")
    check_match(value, _VALUE, "a value of printable characters", f"{where} {name}")


def setup_words(line: object, where: str) -> list[str]:
    """Split a setup line, which is one command without expansions, into words.

    Expansions are refused rather than quoted: ``source $HOME/env.sh`` with a literal dollar would
    fail on the node, hours later. Raises RenderError.
    """
    wanted = "one command of plain words; put lines with $ ; | or ~ into a file: 'source /path'"
    check_match(line, _SETUP, wanted, where)
    try:
        words = shlex.split(str(line))
    except ValueError:
        raise refusal(where, line, "the closing quote") from None
    if not words or words[0][:1] in {"", "-"} or words[0] in _SHELL_KEYWORDS:
        raise refusal(where, line, wanted)
    if "=" in words[0]:
        # The script's shell would read it as an assignment.
        raise refusal(where, line, f"a command; --env {words[0]} sets a variable")
    return words


def check_bind(value: object, where: str) -> None:
    check_match(value, _BIND, "FROM[:TO[:ro]], absolute paths without ':' and ','", where)


def check_staged(paths: tuple[str, ...], where: str) -> None:
    """Raise RenderError unless ``paths`` can be copied into one directory: no equal names."""
    names: set[str] = set()
    for path in paths:
        check_match(path, _NO_OPTION, "a path; ./-x for one called -x", where)
        check_names(path, where)
        name = path.rstrip("/").rpartition("/")[2]
        if name in {"", ".", "..", USERS}:
            raise refusal(where, path, "a path that ends in a name")
        if name in names:
            msg = f"{where}: two of them are called {name!r} and would overwrite each other"
            raise RenderError(msg, hint="stage their parent directory, or rename one")
        names.add(name)


def check_command(words: tuple[str, ...]) -> None:
    """Raise RenderError unless ``words`` are a program, or ``-m MODULE``, and its arguments."""
    option = "the program after --"
    # render.kinds refuses a module for templates that cannot start one.
    module = words[0] == "-m" and len(words) > 1 and _PYTHON_MODULE.fullmatch(words[1]) is not None
    if not module and (not words[0] or words[0].startswith("-")):
        raise refusal(option, words[0], "a program and its arguments")
    for word in words:
        check_match(word, _VALUE, "words without line breaks; put such text into a file", option)
    if sum(map(len, words)) > _WORDS_MAX:
        msg = f"{option}: the command is longer than {_WORDS_MAX} characters"
        raise RenderError(msg, hint="put them into a file that the program reads")
