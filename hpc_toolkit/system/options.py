"""Descriptions of command options.

A table lists a command's options once, for the command line and for other code that needs them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Option(NamedTuple):
    """One option of a command."""

    name: str
    """The parameter's name, optionally followed by a slash and the name of its negation."""
    help: str
    """One line for people."""
    metavar: str = "TEXT"
    """Name of the value in the help; "" for an option without a value.

    "N" is a whole number, "NUMBER" any number, and "a|b" one of these words. The command parses
    the text of a "DURATION" or a "SIZE" with system/quantities.py.
    """
    repeated: bool = False
    """Whether it may be given more than once."""
    short: str = ""
    """Its one-letter spelling."""
    default: Any = None
    """The value if the option is not given; the help shows it unless it is empty."""
    hidden: bool = False
    """Whether the help leaves it out."""
    least: int | None = None
    """The smallest number that is taken; one with a limit must be finite."""
    most: float = math.inf
    """The largest number that is taken; for an option with :attr:`least`."""
    variable: str | None = None
    """An environment variable that also sets the option."""
    complete: Callable[[str], list[str]] | None = None
    """Returns shell completions of an incomplete word."""

    @property
    def spelling(self) -> str:
        return spelled(self.name)


Panels = dict[str, tuple[Option, ...]]
"""A table of options, grouped by the panel of the help that shows them."""


def flag(name: str, help_text: str, *, short: str = "", hidden: bool = False) -> Option:
    return Option(name, help_text, "", short=short, hidden=hidden)


def many(name: str, help_text: str, metavar: str = "TEXT") -> Option:
    """An option that may be given more than once; its help says so."""
    return Option(name, f"{help_text}; may be repeated.", metavar, repeated=True)


def spelled(name: str) -> str:
    """The long spelling of the option whose parameter is ``name``."""
    return f"--{name.partition('/')[0].replace('_', '-')}"


def only_given(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a command that were given; an option with a default always has one."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value not in (None, (), [])
    }


_OF_LAUNCHERS = frozenset(
    {"nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "local_addr"}
    | {"rdzv_id", "rdzv_endpoint", "rdzv_backend", "rdzv_conf", "standalone", "max_restarts"}
    | {"local_ranks_filter", "numa_binding"}
)


def launcher_option(words: Sequence[str]) -> str | None:
    """The first option of torchrun among the arguments of a script, up to "--"; None without one.

    A launcher passes what follows the script on, so that one rank would start without a word.
    """
    for word in itertools.takewhile(lambda word: word != "--", words):
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name in _OF_LAUNCHERS:
            return word
    return None
