"""Read the usual words of ``hpctk work`` and ``hpctk status`` without a command line framework.

A job may start ``hpctk work`` on thousands of ranks at once. Each module that a rank imports costs
about six operations on the shared filesystem, and click imports forty.
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

    from hpc_toolkit.system.options import Option, Panels

_FUNCTIONS = {"work": ("working", "prepare_work"), "status": ("statusview", "status")}
"""The module and the function of each command; it may return what is still to be done."""


def plain_arguments(panels: Panels, words: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of a command with these options; None if only click can read the words.

    Everything unusual is left to the full command line: repeated options, abbreviations, options
    that are set by a variable or are converted, and every mistake.
    """
    options = [one for group in panels.values() for one in group]
    if any(one.variable in os.environ for one in options if one.variable):
        return None
    found = _given(options, words)
    defaults = {one.name.partition("/")[0]: one.default for one in options}
    return None if found is None else {"run": None, **defaults, **found}


def _given(options: Sequence[Option], words: Sequence[str]) -> dict[str, Any] | None:
    flags = {word: meaning for one in options for word, meaning in _flags(one).items()}
    values = {one.spelling: one for one in options if one.metavar in ("N", "DURATION")}
    found: dict[str, Any] = {}
    waiting = iter(words)
    for word in waiting:
        option, equals, text = word.partition("=")
        given: str | int | None
        if word in flags:
            name, given = flags[word]
        elif option in values:
            name, number = values[option].name, values[option].metavar == "N"
            given = _value(text if equals else next(waiting, ""), number=number)
        else:
            name, given = "run", _value(word, number=False)
        if given is None or (name in found and word not in flags):
            return None
        found[name] = given
    return found


def _flags(option: Option) -> dict[str, tuple[str, bool]]:
    """The spellings of an option without a value: its parameter, and what it is set to."""
    if option.metavar:
        return {}
    name, _, negation = option.name.partition("/")
    on = dict.fromkeys(filter(None, (option.spelling, option.short)), (name, True))
    return on | ({f"--{negation}": (name, False)} if negation else {})


def _value(text: str, *, number: bool) -> str | int | None:
    """The value of an option; None if it is missing or may be an option or a mistake."""
    if not text or text.startswith("-"):
        return None
    if not number:
        return text
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def run_plainly(command: str, words: Sequence[str]) -> None:
    """Run a command and exit; return if only the full command line can read the words."""
    if command not in _FUNCTIONS:
        return
    module, function = _FUNCTIONS[command]
    try:
        with listed_imports():
            found = importlib.import_module(f"hpc_toolkit.cli.{module}")
            arguments = plain_arguments(found.PANELS, words)
            if arguments is None:
                return
            rest = getattr(found, function)(**arguments)
        sys.exit(rest() if rest is not None else 0)
    except KeyboardInterrupt:
        sys.exit(130)
