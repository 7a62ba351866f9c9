"""Read the usual words of ``hpctk work`` and ``hpctk status`` without a command line framework.

A job may start ``hpctk work`` on thousands of ranks at once. Each module that a rank imports costs
about six operations on the shared filesystem, and typer imports eighty. The commands are defined in
:mod:`hpc_toolkit.cli.working` and :mod:`hpc_toolkit.cli.reading`; the names here are those of their
parameters, which a test compares.
"""

from __future__ import annotations

import importlib
import os
import sys

from hpc_toolkit.system.imports import listed_imports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_FUNCTIONS = {
    "work": ("hpc_toolkit.cli.plainwork", "prepare_work"),
    "status": ("hpc_toolkit.cli.statusview", "show_status"),
}
"""The module and the name of each command's function; it may return what is still to be done."""
_VALUES = {
    "work": {
        "--workers": "workers",
        "--deadline": "deadline",
        "--idle-exit": "idle_exit",
        "--lease": "lease",
        "--grace": "grace",
    },
    "status": {},
}
"""Options with a value, and their parameters, by command."""
_FLAGS = {
    "work": {"--strict-code": ("strict_code", True)},
    "status": {
        "--json": ("as_json", True),
        "--watch": ("watch", True),
        "--check": ("check", True),
        "--slurm": ("slurm", True),
        "--no-slurm": ("slurm", False),
        "--verbose": ("verbose", True),
        "-v": ("verbose", True),
    },
}
"""Options without a value, and the parameters that they set, by command."""
_NUMBERS = {"workers"}
_VARIABLES = {"HPCTK_MONITOR"}
"""Environment variables that set an option which is not listed here."""


def plain_arguments(command: str, words: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of a command; None if only the full command line can read the words.

    Everything unusual is left to the full command line: other commands, other options, repeated
    ones, and every mistake.
    """
    if command not in _VALUES or _VARIABLES.intersection(os.environ):
        return None
    found: dict[str, Any] = {}
    waiting = iter(words)
    for word in waiting:
        if word in _FLAGS[command]:
            parameter, flag = _FLAGS[command][word]
            found[parameter] = flag
            continue
        name, equals, text = word.partition("=")
        if name in _VALUES[command]:
            parameter = _VALUES[command][name]
            text = text if equals else next(waiting, "")
        else:
            parameter, text = "run", word
        value = _value(parameter, text)
        if parameter in found or value is None:
            return None
        found[parameter] = value
    return found


def _value(parameter: str, text: str) -> str | int | None:
    """The value of an option; None if it is missing or may be an option or a mistake."""
    if not text or text.startswith("-"):
        return None
    if parameter not in _NUMBERS:
        return text
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def run_plainly(command: str, words: Sequence[str]) -> None:
    """Run a command and exit; return if only the full command line can read the words."""
    arguments = plain_arguments(command, words)
    if arguments is None:
        return
    module, function = _FUNCTIONS[command]
    try:
        with listed_imports():
            rest = getattr(importlib.import_module(module), function)(**arguments)
        sys.exit(rest() if rest is not None else 0)
    except KeyboardInterrupt:
        sys.exit(130)
