"""Commands with plain help texts: options in two columns under headings, then examples.

``--help`` leaves out options and commands that are rarely used; ``--help-all`` shows them.
A command's examples stand at the end of its docstring, below a line "Examples:". Commands with
many options take them from a table and not from the parameters of a function: typer would look at
each annotation twice whenever the command starts, which for the hundred options of a script takes
longer than rendering it.
"""

from __future__ import annotations

import inspect
import math
import re
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, cast

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from hpc_toolkit.cli.arguments import completion
from hpc_toolkit.errors import HpcToolkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpc_toolkit.system.options import Option, Panels

MOVED = {
    "run": "campaign run",
    "conduct": "campaign coordinate",
    "verify": "gather --check",
    "lab list": "lab status --all",
    "lab sinfo": "lab exec sinfo",
}
"""Old names of commands, and what replaces them."""

LIST = "Work through a list of items"
SEARCH = "Search with a campaign"
TRAIN = "Train on several GPUs"
SLURM = "Run jobs on Slurm"
CHECK = "Plan and check"
SCRIPTS = "Called by job scripts"
_ORDER = (LIST, SEARCH, TRAIN, SLURM, CHECK, SCRIPTS)

_METAVARS = {
    **dict.fromkeys(("str", "text"), "TEXT"),
    **dict.fromkeys(("int", "integer"), "N"),
    "float": "NUMBER",
    "path": "PATH",
}
"""What stands for a value, by typer's names of its type."""
ALL = "hpc_toolkit.help_all"
"""Key of the context by which the help shows all options."""
_COMPLETION = {"install_completion", "show_completion"}
_EXAMPLES = "Examples:"
_TYPES: dict[str, type] = {"N": int, "NUMBER": float}
"""Value names whose values are converted; all others stay text."""


class MovedCommandError(HpcToolkitError):
    """A command was called by an old name."""

    exit_code = 2


class _PlainHelp:
    """What commands and groups have in common."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Add ``--help-all``."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        return [*params, _HELP_ALL] if self.add_help_option else params  # type: ignore[attr-defined]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Write required arguments without the braces of newer versions of typer."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.strip("{}") for piece in pieces]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, options, commands and examples."""
        text, _, examples = inspect.cleandoc(self.help or "").partition(_EXAMPLES)  # type: ignore[attr-defined]
        self.format_usage(ctx, formatter)  # type: ignore[attr-defined]
        for paragraph in filter(None, text.strip().split("\n\n")):
            formatter.write_paragraph()
            formatter.write_text(paragraph)
        self.format_options(ctx, formatter)
        if examples:
            formatter.write_paragraph()
            formatter.write(f"{_EXAMPLES}\n")
            formatter.write(inspect.cleandoc(examples).replace("\n", "\n  ").join(("  ", "\n")))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options by their headings."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            heading = getattr(param, "rich_help_panel", None)
            if param.param_type_name == "argument":
                heading = heading or "Arguments"
            row = _row(param, ctx, everything=ctx.meta.get(ALL, False))
            if row is not None:
                sections.setdefault(heading or "Options", []).append(row)
        for heading, rows in sections.items():
            write_rows(formatter, heading, rows)


class HelpCommand(_PlainHelp, TyperCommand):
    """A command with a plain help text."""


class HelpGroup(_PlainHelp, TyperGroup):
    """A group of commands with a plain help text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by their headings, and the options below them."""
        # typer lists groups of commands after single commands.
        sections: dict[str, list[tuple[str, str]]] = {heading: [] for heading in _ORDER}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if not command.hidden or ctx.meta.get(ALL, False):
                row = (name, _first_sentence(command.help or ""))
                sections.setdefault(command.rich_help_panel or "Commands", []).append(row)
        for heading, rows in sections.items():
            write_rows(formatter, heading, rows)
        super().format_options(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, or say what a moved one is called now."""
        old = args[0] if ctx.parent is None else f"{ctx.info_name} {args[0]}"
        if old in MOVED and not ctx.resilient_parsing:
            message = f"'hpctk {old}' is now 'hpctk {MOVED[old]}'"
            raise MovedCommandError(message)
        return super().resolve_command(ctx, args)


class Commands(typer.Typer):
    """A typer application whose commands and groups have plain help texts."""

    def __init__(self, *, help: str, **settings: Any) -> None:  # noqa: A002 - typer's name
        super().__init__(
            cls=HelpGroup, help=help, no_args_is_help=True, rich_markup_mode=None, **settings
        )

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any
    ) -> Callable[[Any], Any]:
        return super().command(name, cls=cls or HelpCommand, **settings)


def _show_all(ctx: Any, _param: Any, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    ctx.meta[ALL] = True
    print(ctx.get_help())
    raise typer.Exit


_HELP_ALL = TyperOption(
    param_decls=["help_all", "--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    hidden=True,
    callback=_show_all,
    help="",
)
"""The help of ``--help`` names this option."""


def _rare(param: Any) -> bool:
    """Whether only ``--help-all`` shows an option; one without a text is never shown."""
    hidden = getattr(param, "hidden", False) or param.name in _COMPLETION
    return hidden and bool(param.help)


def _row(param: Any, ctx: Any, *, everything: bool) -> tuple[str, str] | None:
    """An option's spellings and its text; None for one that is not shown."""
    if "--help" in param.opts:
        commands = getattr(ctx.command, "commands", {}).values()
        more = any(map(_rare, ctx.command.params)) or any(one.hidden for one in commands)
        what = "commands and options" if commands else "options"
        rest = f"; --help-all shows all {what}." if more and not everything else "."
        return ", ".join(sorted(param.opts, key=len)), f"Print this help{rest}"
    if not param.help or (_rare(param) and not everything):
        return None
    param = copy(param)
    param.hidden = False
    if param.metavar is None:
        param.metavar = _METAVARS.get(param.type.name)
    spelled, text = param.get_help_record(ctx)
    # Older versions of typer write a backslash for rich.
    text = text.replace("\\[", "[").replace("  [", " [")
    return spelled.replace("<", "").replace(">", ""), text


def write_rows(formatter: Any, heading: str, rows: list[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(heading):
            formatter.write_dl(rows)


def _first_sentence(text: str) -> str:
    paragraph = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
    # A period inside a sentence, as in "e.g. srun", is not followed by a capital.
    return re.split(r"(?<=\.) (?=[A-Z'-])", paragraph)[0]


def add_table_command(
    app: typer.Typer,
    function: Callable[..., None],
    panels: Panels,
    *,
    panel: str = "Commands",
    arguments: Sequence[TyperArgument] = (),
    cls: type[HelpCommand] = HelpCommand,
    **settings: Any,
) -> None:
    """Add ``function(..., *, ..., **given)`` as a command.

    typer makes the options of its context and its keyword-only parameters; ``panels`` and
    ``arguments`` describe all others.
    """
    signature = inspect.signature(function, eval_str=True)
    own = [
        one
        for one in signature.parameters.values()
        if one.kind is one.KEYWORD_ONLY or one.annotation is typer.Context
    ]
    function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]

    def command(*args: Any, params: list[Any], **more: Any) -> HelpCommand:
        return cls(*args, params=[*arguments, *parameters(panels), *params], **more)

    typer_class = cast("type[TyperCommand]", command)  # typer only calls it
    app.command(cls=typer_class, rich_help_panel=panel, **settings)(function)


def parameters(panels: Panels) -> list[TyperOption]:
    """The options of a table, for a command."""
    return [_parameter(option, panel) for panel, group in panels.items() for option in group]


def _reader(option: Option) -> Callable[[Any], Any] | None:
    """What reads the value of an option; None for one without a value."""
    if not option.metavar:
        return None
    kind = _TYPES.get(option.metavar, str)
    words = option.metavar.split("|")
    choices = words if len(words) > 1 and all(map(str.islower, words)) else []
    if option.least is None and not choices:
        return kind

    def read(given: Any) -> Any:
        with suppress(ValueError):
            value = kind(given)
            if value in choices or (option.least is not None and option.least <= value < math.inf):
                return value
        wanted = f"one of {', '.join(choices)}" if choices else f"a number from {option.least} on"
        message = f"{str(given)!r} is not {wanted}"
        raise typer.BadParameter(message)

    return read


def _parameter(option: Option, panel: str) -> TyperOption:
    name = option.name.partition("/")[0]
    long = "/".join(f"--{word.replace('_', '-')}" for word in option.name.split("/"))
    return TyperOption(
        param_decls=[name, *([option.short] if option.short else []), long],
        type=_reader(option),
        is_flag=True if not option.metavar else None,
        default=option.default,
        show_default=option.default is not None,
        multiple=option.repeated,
        nargs=option.values,
        metavar=option.metavar or None,
        help=option.help,
        hidden=option.hidden,
        envvar=option.variable,
        show_envvar=option.variable is not None,
        autocompletion=completion(option.complete) if option.complete else None,
        rich_help_panel=panel,
    )
