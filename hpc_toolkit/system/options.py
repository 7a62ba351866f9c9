"""What one option of a command is. Tables of them say a command's options once, for the command
line and for what else must know them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Option(NamedTuple):
    """One option, as people write it; with dashes its name is what follows the two of them."""

    name: str
    """The parameter's name; after a slash that of its negation."""
    help: str
    """One line for people."""
    metavar: str = "TEXT"
    """What the value is called. "N" and "PORT" are whole numbers, "NUMBER", "SECONDS" and "MS" any;
    with "" the option has no value."""
    repeated: bool = False
    """Whether it may be given more than once."""
    without: str | None = None
    """The value that the bare option stands for; None where a value is needed. As in sbatch, the
    value then follows an equals sign."""
    short: str = ""
    """Its one-letter spelling."""
    default: Any = None
    """Its value where it is not given; the help shows it, unless it is None."""
    hidden: bool = False
    """Whether the help leaves it out."""
    variable: str | None = None
    """The environment variable that gives it as well."""
    complete: Callable[[str], list[str]] | None = None
    """What a word that begins so may become."""

    @property
    def spelling(self) -> str:
        """Its long spelling."""
        return spelled(self.name)


Panels = dict[str, tuple[Option, ...]]
"""A table of options, by the panel of the help that shows them."""


def flag(name: str, help_text: str, *, short: str = "") -> Option:
    """An option without a value."""
    return Option(name, help_text, "", short=short)


def many(name: str, help_text: str, metavar: str = "TEXT") -> Option:
    """An option that may be given more than once, and says so."""
    return Option(name, f"{help_text}; may be repeated.", metavar, repeated=True)


def spelled(name: str) -> str:
    """The option whose parameter is called so."""
    return f"--{name.partition('/')[0].replace('_', '-')}"


def by_name(panels: Panels) -> dict[str, Option]:
    """Every option by the name of its parameter."""
    return {one.name.partition("/")[0]: one for group in panels.values() for one in group}


def only_given(values: dict[str, Any]) -> dict[str, Any]:
    """Those of a command's values that were given; an option with a default always is."""
    return {name: value for name, value in values.items() if value not in (None, (), [])}
