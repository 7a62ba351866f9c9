"""Commands whose options come from a table, and not from the parameters of a function.

typer would look at each annotation of such a function twice whenever its command starts; for the
hundred options of a script that takes longer than rendering it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from typer.core import TyperArgument, TyperOption

from hpc_toolkit.cli.help import HelpCommand

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

    from hpc_toolkit.system.options import Option, Panels

_TYPES: dict[str, type] = {
    **dict.fromkeys(("N", "PORT"), int),
    "NUMBER": float,
}
"""Value names whose values are converted; all others stay text."""


class TableCommand(HelpCommand):
    """A command with the options of a table behind those of its function."""

    panels: ClassVar[Panels]

    def __init__(self, *args: Any, params: list[Any], **settings: Any) -> None:
        every = [*self.arguments(), *params, *parameters(self.panels)]
        super().__init__(*args, params=every, **settings)

    def arguments(self) -> list[TyperArgument]:
        """Words that are no options."""
        return []


def add_table_command(
    app: typer.Typer,
    function: Callable[..., None],
    cls: type[TableCommand],
    *,
    panel: str,
    **settings: Any,
) -> None:
    """Add ``function(..., *, ..., **given)`` as a command.

    typer makes the options of its keyword-only parameters; all others come from ``cls``.
    """
    signature = inspect.signature(function, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is one.KEYWORD_ONLY]
    function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    app.command(cls=cls, rich_help_panel=panel, **settings)(function)


def parameters(panels: Panels) -> list[TyperOption]:
    """The options of a table, for a command."""
    return [_parameter(option, panel) for panel, group in panels.items() for option in group]


def _parameter(option: Option, panel: str) -> TyperOption:
    name = option.name.partition("/")[0]
    long = "/".join(f"--{word.replace('_', '-')}" for word in option.name.split("/"))
    return TyperOption(
        param_decls=[name, *([option.short] if option.short else []), long],
        type=_TYPES.get(option.metavar, str) if option.metavar else None,
        is_flag=True if not option.metavar else None,
        default=option.default,
        show_default=option.default is not None,
        multiple=option.repeated,
        metavar=option.metavar or None,
        help=option.help,
        hidden=option.hidden,
        envvar=option.variable,
        show_envvar=option.variable is not None,
        autocompletion=_completion(option.complete) if option.complete else None,
        rich_help_panel=panel,
    )


def _completion(complete: Callable[[str], list[str]]) -> Callable[..., list[Any]]:
    def completed(_context: object, _words: list[str], incomplete: str) -> list[Any]:
        return [*complete(incomplete)]

    return completed
