"""Commands with plain help texts: options in two columns under headings, then examples.

``--help`` leaves out options and commands that are rarely used; ``--help-all`` shows them.
A command's examples stand at the end of its docstring, below a line "Examples:". Commands with
many options take them from a table, others from the annotations of their function's parameters.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import click

from hpc_toolkit import __version__
from hpc_toolkit.cli.arguments import Argument
from hpc_toolkit.system.options import Option, Panels
from hpc_toolkit.system.terminal import printable_lines

LIST = "Work through a list of items"
SEARCH = "Search"
TRAIN = "Train on several GPUs"
SLURM = "Run jobs on Slurm"
CHECK = "Plan and check"
SCRIPTS = "Called by job scripts"
_ORDER = (LIST, SEARCH, TRAIN, SLURM, CHECK, SCRIPTS)

ALL = "hpc_toolkit.help_all"
"""Key of the context by which the help shows all options."""
_EXAMPLES = "Examples:"
_TYPES: dict[str, type] = {"N": int, "NUMBER": float}
"""Value names whose values are converted; all others stay text."""


class PlainOption(click.Option):
    """An option, and the heading below which the help shows it."""

    def __init__(self, *names: str, panel: str = "Options", **settings: Any) -> None:
        super().__init__(names, **settings)
        self.panel = panel


class PlainArgument(click.Argument):
    """An argument with a help text."""

    panel, hidden = "Arguments", False

    def __init__(self, name: str, *, help: str, **settings: Any) -> None:  # noqa: A002 - click's name
        super().__init__([name], **settings)
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """The row of the help; only newer versions of click have one."""
        return self.make_metavar(ctx), f"{self.help}{' [required]' if self.required else ''}"

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Write the metavar alike in all versions of click."""
        return f"'{self.human_readable_name}'"


@contextmanager
def _shown_as_text() -> Iterator[None]:
    """Let a terminal show what an argument holds, and not obey it: click repeats it as it is."""
    try:
        yield
    except click.UsageError as error:
        # A new error would lose its kind, which decides what is shown around the message.
        error.message = printable_lines(error.message)  # type: ignore[misc]
        raise


class HelpCommand(click.Command):
    """A command with a plain help text."""

    def __init__(self, name: str | None, *, panel: str = "Commands", **settings: Any) -> None:
        super().__init__(name, **settings)
        self.panel = panel

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        with _shown_as_text():
            return super().make_context(*args, **settings)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Add ``--help-all``."""
        return [*super().get_params(ctx), _HELP_ALL]

    def format_help(self, ctx: click.Context, formatter: Any) -> None:
        text, _, examples = inspect.cleandoc(self.help or "").partition(_EXAMPLES)
        self.format_usage(ctx, formatter)
        for paragraph in filter(None, text.strip().split("\n\n")):
            formatter.write_paragraph()
            formatter.write_text(paragraph)
        self.format_options(ctx, formatter)
        if examples:
            formatter.write_paragraph()
            formatter.write(f"{_EXAMPLES}\n")
            formatter.write(inspect.cleandoc(examples).replace("\n", "\n  ").join(("  ", "\n")))

    def format_options(self, ctx: click.Context, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            row = _row(param, ctx, everything=ctx.meta.get(ALL, False))
            if row is not None:
                sections.setdefault(getattr(param, "panel", "Options"), []).append(row)
        for heading, rows in sections.items():
            write_rows(formatter, heading, rows)


class Commands(HelpCommand, click.Group):
    """A group of commands with a plain help text."""

    def __init__(self, name: str | None = None, **settings: Any) -> None:
        super().__init__(name, no_args_is_help=True, **settings)

    def add(
        self,
        function: Callable[..., Any],
        panels: Panels | None = None,
        *,
        name: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        cls: type[HelpCommand] = HelpCommand,
        **settings: Any,
    ) -> None:
        """Add a function as a command.

        ``arguments`` holds annotated types by the names of parameters, ``panels`` options; the
        annotations of the function's parameters declare all others.
        """
        signature = inspect.signature(function, eval_str=True).parameters.values()
        own = [
            _declared(one.name, one.annotation, one.default)
            for one in signature
            if hasattr(one.annotation, "__metadata__")
        ]
        params = [*parameters(panels or {}, arguments or {}), *own]
        word = name or function.__name__
        text = function.__doc__
        self.add_command(cls(word, callback=function, params=params, help=text, **settings))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the help: groups after commands."""
        return sorted(self.commands, key=lambda name: isinstance(self.commands[name], Commands))

    def format_options(self, ctx: click.Context, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {heading: [] for heading in _ORDER}
        for name in self.list_commands(ctx):
            command: Any = self.commands[name]
            if not command.hidden or ctx.meta.get(ALL, False):
                row = (name, _first_sentence(command.help or ""))
                sections.setdefault(command.panel, []).append(row)
        for heading, rows in sections.items():
            write_rows(formatter, heading, rows)
        super().format_options(ctx, formatter)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command, or name similar ones."""
        word = args[0]
        if word in self.commands or ctx.resilient_parsing or word.startswith("-"):
            return super().resolve_command(ctx, args)
        from difflib import get_close_matches

        similar = ", ".join(map(repr, get_close_matches(word, self.commands)))
        return ctx.fail(f"No such command {word!r}.{f' Did you mean {similar}?' * bool(similar)}")

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command; exit with 130 when it is interrupted."""
        try:
            with _shown_as_text():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(130)


def _show_all(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        print(ctx.get_help())
        ctx.exit()


_HELP_ALL = click.Option(
    ["help_all", "--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    hidden=True,
    callback=_show_all,
    help="",
)
"""The help of ``--help`` names this option."""


def _row(param: Any, ctx: Any, *, everything: bool) -> tuple[str, str] | None:
    """An option's spellings and its text; None for one that is not shown.

    Only ``--help-all`` shows a hidden option, and nothing shows one without a text.
    """
    if "--help" in param.opts:
        commands = getattr(ctx.command, "commands", {}).values()
        more = any(one.hidden for one in (*ctx.command.params, *commands) if one.help)
        what = "commands and options" if commands else "options"
        rest = f"; --help-all shows all {what}." if more and not everything else "."
        return ", ".join(sorted(param.opts, key=len)), f"Print this help{rest}"
    if not param.help or (param.hidden and not everything):
        return None
    param = copy(param)
    param.hidden = False
    spelled, text = param.get_help_record(ctx)
    return spelled, text.replace("  [", " [")


def write_rows(formatter: Any, heading: str, rows: list[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(heading):
            formatter.write_dl(rows)


def _first_sentence(text: str) -> str:
    paragraph = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
    # A period inside a sentence, as in "e.g. srun", is not followed by a capital.
    return re.split(r"(?<=\.) (?=[A-Z'-])", paragraph)[0]


def parameters(panels: Panels, arguments: Mapping[str, Any]) -> list[click.Parameter]:
    """Annotated ``arguments`` by their names, and the options of a table, for a command."""
    given = [_declared(*one, None) for one in arguments.items()]
    return given + [_parameter(one, panel) for panel, group in panels.items() for one in group]


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
            is_finite = option.least is not None and value < math.inf
            if value in choices or (is_finite and option.least <= value <= option.most):
                return value
        end = f"to {option.most}" if option.most < math.inf else "on"
        wanted = f"a number from {option.least} {end}"
        wanted = f"one of {', '.join(choices)}" if choices else wanted
        raise click.BadParameter(f"{str(given)!r} is not {wanted}")

    return read


def _parameter(option: Option, panel: str, param: str = "", **settings: Any) -> PlainOption:
    """The option of a command; ``settings`` replace those that follow from the description."""
    long = "/".join(f"--{word.replace('_', '-')}" for word in option.name.split("/"))
    default = settings.get("default", option.default)
    own: dict[str, Any] = {
        "type": _reader(option),
        "is_flag": True if not option.metavar else None,
        "default": option.default,
        "show_default": default not in (None, ""),
        "multiple": option.repeated,
        "metavar": option.metavar or None,
        "help": option.help,
        "hidden": option.hidden,
        "envvar": option.variable,
        "show_envvar": option.variable is not None,
        "shell_complete": _completion(option.complete),
    }
    if settings.get("required"):
        del own["default"]  # None would be a value
    names = filter(None, (param or option.name.partition("/")[0], option.short, long))
    return PlainOption(*names, panel=panel, **own | settings)


def _completion(complete: Callable[[str], Iterable[str]] | None) -> Callable[..., Any] | None:
    """A completion as click calls it."""
    return complete and (lambda _context, _param, incomplete: [*complete(incomplete)])


def _declared(name: str, annotation: Any, default: Any) -> click.Parameter:
    """The parameter of a command that an annotated type declares."""
    kind, declared = annotation.__origin__, annotation.__metadata__[0]
    if isinstance(kind, UnionType):
        kind = next(one for one in get_args(kind) if one is not NoneType)
    repeated = get_origin(kind) is list
    kind = get_args(kind)[0] if repeated else kind
    needed = default is inspect.Parameter.empty
    settings: dict[str, Any] = {"required": needed}
    if kind is Path or (kind is not bool and isinstance(declared, Argument)):
        settings["type"] = click.Path(path_type=Path) if kind is Path else kind
    if repeated:
        rest = None if needed else default
        settings["callback"] = lambda _context, _param, given: list(given) or rest
    elif not needed:
        settings["default"] = default
    if isinstance(declared, Argument):
        settings["shell_complete"] = _completion(declared.complete)
        settings |= {"help": declared.help, "nargs": -1 if repeated else 1}
        return PlainArgument(name, metavar=declared.metavar, **settings)
    option = declared._replace(name=declared.name or name, repeated=repeated)
    return _parameter(option, "Options", name, **settings)


def application() -> Commands:
    """``hpctk`` without commands."""
    app = Commands(
        "hpctk",
        help="Work queues, training and Slurm jobs for HPC clusters.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    shown = {"prog_name": "hpctk", "message": "%(prog)s %(version)s", "help": "Print the version."}
    return click.version_option(__version__, **shown)(app)
