"""What each value of a job script may hold: a list of what is accepted, never of what is not.

Every value ends up in a file that a scheduler and a shell read. No value may hold a character that
does not print: a newline in a job name would be a directive of its own.
"""

from __future__ import annotations

import re
import shlex

from hpc_toolkit.errors import RenderError

_PATH_MAX = 4096
_SHOWN_CHARS = 120
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.+@-]{0,127}"
_WORDS = re.compile(f"{_WORD}(,{_WORD}){{0,31}}")
_HOSTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,\[\]-]{0,4095}")
_VALUE = re.compile(r".{0,32768}")
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]{0,255}")
_SETUP = re.compile(r"[\w@%+=:,./ '\"-]{1,4096}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|KEY)$", re.IGNORECASE)
_SHELL_VARIABLES = frozenset(
    {"BASH_ENV", "ENV", "IFS", "BASHOPTS", "SHELLOPTS", "PS4", "UID", "EUID", "PPID"}
)
_SHELL_KEYWORDS = frozenset(
    {"if", "then", "else", "elif", "fi", "case", "esac", "for", "select", "while", "until", "do"}
    | {"done", "in", "function", "time", "coproc"}
)

COUNTS = {
    "nodes": (1, 65536),
    "ntasks_per_node": (1, 4096),
    "gpus_per_node": (0, 128),
    "cpus_per_task": (1, 4096),
    "max_restarts": (0, 1000),
}
"""Lowest and highest number of a field; the highest is above every machine that Slurm runs."""

PATTERNS = {
    "job_name": (
        re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"),
        "at most 64 letters, digits, '.', '_' and '-'",
    ),
    "account": (re.compile(_WORD), "one account name"),
    "partition": (_WORDS, "partition names, separated by commas"),
    "qos": (re.compile(_WORD), "one name of a quality of service"),
    "reservation": (_WORDS, "reservation names, separated by commas"),
    "constraint": (
        re.compile(r"[A-Za-z0-9_\[(][A-Za-z0-9_.&|,*:=()\[\]-]{0,255}"),
        "node features joined by & or |",
    ),
    "nodelist": (_HOSTS, "host names such as n1,n[3-5]"),
    "exclude": (_HOSTS, "host names such as n1,n[3-5]"),
    "signal": (
        re.compile(r"B:USR1@[1-9][0-9]{0,4}"),
        "B:USR1@SECONDS, the one signal that the script's trap waits for",
    ),
    "output": (
        re.compile(r"[\w./](?:[\w./ +=@,:-]|%[0-9]{0,2}[ujxNtnsAaJb]){0,1023}(?<!/)"),
        "a path of letters, digits, spaces and ./_+=@,:- with sbatch's %x, %j, %u, ...",
    ),
    "comment": (
        re.compile(r"[\w./:;,@%+=() -]{1,256}"),
        "at most 256 letters, digits, spaces and ./:;,@%+=()-",
    ),
    "mail_type": (
        re.compile(r"[A-Z_0-9]{1,32}(,[A-Z_0-9]{1,32}){0,15}"),
        "events such as END,FAIL",
    ),
    "mail_user": (re.compile(_WORD), "one mail address"),
    "run": (re.compile(f"[^-].{{0,{_PATH_MAX - 1}}}"), "a run's path; ./-x for one called -x"),
    "python": (re.compile(f"/.{{1,{_PATH_MAX - 1}}}"), "the absolute path of an interpreter"),
}
"""The whole-value pattern of a field, and what to write instead."""


def refusal(where: str, value: object, wanted: str) -> RenderError:
    """The error for a value that may not go into a script."""
    shown = repr(value)
    if len(shown) > _SHOWN_CHARS:
        shown = f"{shown[:_SHOWN_CHARS]}... ({len(shown)} characters)"
    return RenderError(f"{where}: {shown} is not accepted", hint=f"write {wanted}")


def check_count(value: object, field: str, where: str) -> None:
    """Raise RenderError unless ``value`` is a whole number in the range of ``field``."""
    lowest, highest = COUNTS[field]
    # type(), not isinstance(): True is no count.
    if type(value) is not int or not lowest <= value <= highest:
        raise refusal(where, value, f"a whole number from {lowest} to {highest}")


def check_text(value: object, field: str, where: str) -> None:
    """Raise RenderError unless ``value`` prints and matches the pattern of ``field``."""
    _check(value, *PATTERNS[field], where)


def check_module(name: object, where: str) -> None:
    """Raise RenderError unless ``name`` can be the name of an environment module."""
    _check(name, _MODULE, "a module's name such as cuda/12.4", where)


def check_variable(name: str, value: str, where: str) -> None:
    """Raise RenderError for a variable that is not the user's to set, or that holds a secret."""
    _check(name, _VARIABLE, "NAME=VALUE with a name of letters, digits and '_'", where)
    if name.startswith(("SLURM", "SBATCH_", "SRUN_", "HPCTK_DEADLINE")) or name in _SHELL_VARIABLES:
        raise refusal(where, name, "a name that neither Slurm, the shell nor this script sets")
    if _SECRET.search(name):
        msg = f"{where}: {name} looks like a secret, and others may read the script"
        raise RenderError(msg, hint="export it before sbatch, or read it from a private file")
    _check(value, _VALUE, "a value of printable characters", f"{where} {name}")


def setup_words(line: object, where: str) -> list[str]:
    """The words of a setup line, which is one command without expansions. Raises RenderError.

    Expansions are refused rather than quoted away: ``source $HOME/env.sh`` with a literal dollar
    would fail on the node, hours later.
    """
    wanted = "one command of plain words; what needs $ ; | or ~ goes into a file: 'source /path'"
    _check(line, _SETUP, wanted, where)
    try:
        words = shlex.split(str(line))
    except ValueError:
        raise refusal(where, line, "the closing quote") from None
    if not words or words[0][:1] in {"", "-"} or words[0] in _SHELL_KEYWORDS:
        raise refusal(where, line, wanted)
    return words


def _check(value: object, pattern: re.Pattern[str], wanted: str, where: str) -> None:
    if not isinstance(value, str) or not value.isprintable() or not pattern.fullmatch(value):
        raise refusal(where, value, wanted)
