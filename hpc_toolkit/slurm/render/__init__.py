"""Render job scripts from a request and a site's facts, and read the request back.

Here are the allow-lists for the values of a script: a value is accepted only if its pattern
matches. A scheduler and a shell read the script. No value may hold a non-printable character: a
newline in a job name would start a directive of its own. The script quotes every value
nevertheless.
"""

from __future__ import annotations

import re
import shlex
from typing import TypeGuard

from hpc_toolkit.errors import RenderError

_STAGED = "[^-].{0,4095}"
_SHOWN_CHARS = 120
_VALUE = r".{0,32768}"
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
ENVIRONMENT = ".environment"
"""The copy of the Python environment beside staged files."""

_PYTHON_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_WORDS_MAX = 131072


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
            raise RenderError(f"{where}: {name!r} is given twice", hint=hint)


def check_names(path: str, where: str) -> None:
    for name in path.split("/"):
        if len(name.encode()) > _NAME_MAX:
            # With such a log path Slurm fails the job and leaves no log.
            raise refusal(where, path, f"names of at most {_NAME_MAX} bytes")


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


def check_staged(paths: tuple[str, ...], where: str) -> None:
    """Raise RenderError unless ``paths`` can be copied into one directory: no equal names."""
    names: set[str] = set()
    for path in paths:
        check_match(path, _STAGED, "a path; ./-x for one called -x", where)
        check_names(path, where)
        name = path.rstrip("/").rpartition("/")[2]
        if name in {"", ".", "..", USERS, ENVIRONMENT}:
            raise refusal(where, path, "a path that ends in a name")
        if name in names:
            msg = f"{where}: two of them are called {name!r} and would overwrite each other"
            raise RenderError(msg, hint="stage their parent directory, or rename one")
        names.add(name)


def check_command(words: tuple[str, ...], _where: str) -> None:
    """Raise RenderError unless ``words`` are a program, or ``-m MODULE``, and its arguments."""
    option = "the program after --"
    if not words:
        return
    # render.kinds refuses a module for templates that cannot start one.
    module = words[0] == "-m" and len(words) > 1 and _PYTHON_MODULE.fullmatch(words[1]) is not None
    if not module and (not words[0] or words[0].startswith("-")):
        raise refusal(option, words[0], "a program and its arguments")
    for word in words:
        check_match(word, _VALUE, "words without line breaks; put such text into a file", option)
    if sum(map(len, words)) > _WORDS_MAX:
        msg = f"{option}: the command is longer than {_WORDS_MAX} characters"
        raise RenderError(msg, hint="put them into a file that the program reads")
