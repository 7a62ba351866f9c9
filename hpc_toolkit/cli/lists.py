"""The items and settings of a run: the options of 'init' and 'map', or a file with them."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, ItemsError, near_path
from hpc_toolkit.queue import lists
from hpc_toolkit.queue.listfiles import COMMANDS, each_item, parse_file
from hpc_toolkit.system import tomltable as t
from hpc_toolkit.system.jsonlines import decoder, unique
from hpc_toolkit.system.options import Option, Panels, many, only_given, spelled
from hpc_toolkit.system.quantities import parse_duration, parse_size_mib
from hpc_toolkit.system.terminal import printable

if TYPE_CHECKING:
    from hpc_toolkit.queue.items import Item

_FILE = "File: .jsonl, .csv, .tsv, .txt, .json, .yaml, .parquet or .gz; - is stdin."
ITEMS = Option("items", _FILE, "FILE")
FORMAT = Option("format", "Format of --items. [default: its suffix, else jsonl]", "FORMAT")
SOURCES: Panels = {
    "Items": (
        ITEMS,
        FORMAT,
        Option("count", "Instead of a file: the numbers 0 to N-1.", "N"),
        Option("key", "Key of the items of --count. [default: index]", "NAME"),
        many("grid", "Instead of a file: all combinations of values", "NAME=VALUES"),
        Option("commands", "Instead of items and a command: run each line.", "FILE"),
        many("text", "Keep the values of KEY as text", "KEY"),
        many("number", "Read the values of KEY as numbers", "KEY"),
        Option("config", "Read these options from a file; others override it.", "FILE.toml"),
    )
}
SETTINGS: Panels = {
    "Workload and limits": (
        Option("workload", "Function or class to call for each item.", "MODULE:NAME"),
        Option("command", "Shell command; {key} is the quoted value, {key:args} its words."),
        Option("pipefail", "Fail if any program of a pipe fails.", "", default=None),
        many("option", "Keyword argument of a workload class", "KEY=JSON"),
        Option("group_by", "Keep items with the same value of KEY together.", "KEY"),
        Option("max_attempts", "Attempts before an item counts as failed. [default: 3]", "N"),
        Option("timeout", "Time limit of one item, e.g. 90s or 5min.", "DURATION"),
        Option("no_retry", "Do not retry timeout, or e.g. ValueError,KeyError.", "NAMES"),
        Option("kill_after", "SIGTERM to SIGKILL at a timeout. [default: 5s]", "DURATION"),
        Option("items_per_claim", "Items that a worker claims at once.", "N"),
        Option("max_items_per_process", "Start a fresh process after N items.", "N"),
        Option("recycle_at", "Start a fresh process above this memory, e.g. 20G.", "SIZE"),
        Option("needs", "What a worker must have, e.g. gpus=1,memory=40G.", "NAME=VALUE,..."),
        Option("retry", "More after a failure: on=oom,memory=x2,up_to=200G.", "NAME=VALUE,..."),
        Option("log_limit", "Remove the oldest output of a worker above this.", "SIZE"),
        Option("max_failures", "Pause when more items have failed.", "N|P%", hidden=True),
    )
}
PANELS: Panels = {**SOURCES, **SETTINGS}
"""The items of a run, its code and its settings: arguments of Run.create."""


def read_items(source: str, name: str | None = None) -> Iterator[Item]:
    """The items of a file, or of stdin for "-", in the format ``name``; None: by the suffix."""
    try:
        if source == "-":
            yield from parse_file(sys.stdin.buffer, name or "jsonl", "stdin")
        else:
            yield from each_item(Path(source), name)
    except OSError as error:
        message = f"cannot read items from {source}: {error.strerror}"
        hint = near_path(Path(source), "give a file of items, or - for JSON lines on stdin")
        raise ConfigError(message, hint=hint) from error


@contextmanager
def located(sources: dict[str, Any]) -> Iterator[None]:
    """Add to an ItemsError the file of its item, and the line if each line is an item."""
    try:
        yield
    except ItemsError as error:
        source, number = sources.get("items"), error.number
        if number is None or source in (None, "-"):
            raise
        where = str(source)
        if (sources.get("format") or Path(source).suffix[1:] or "jsonl") in ("jsonl", "ndjson"):
            with open(source, "rb") as file:
                lines = (at for at, line in enumerate(file, 1) if line.strip())
                where = f"{source}, line {next(islice(lines, number, None))}"
        raise ItemsError(f"{where}: {error.message}", hint=error.hint) from error


_MODIFIERS = {"key": "count", "format": "items"}
"""Options that need a source of items."""


def _sources(given: dict[str, Any]) -> dict[str, Any]:
    """Take the options that name items out of ``given``; only those that were given."""
    names = ("items", "format", "count", "key", "grid", "commands", "text", "number")
    return only_given({name: given.pop(name, None) for name in names})


def make_items(sources: dict[str, Any], command: str | None) -> Iterable[Item]:
    """The items that options name, for a command or a function."""
    kinds = {key: kind for kind in ("text", "number") for key in sources.pop(kind, ())}
    named = [name for name in sources if name not in _MODIFIERS]
    if len(named) > 1:
        message = f"{' and '.join(map(spelled, named))} exclude each other"
        raise ConfigError(message, hint="name one source of items")
    for modifier in sources.keys() & _MODIFIERS:
        if named != [_MODIFIERS[modifier]]:
            message = f"{spelled(modifier)} needs {spelled(_MODIFIERS[modifier])}"
            raise ConfigError(message, hint=f"leave {spelled(modifier)} out")
    match named:
        case ["items"]:
            items: Iterable[Item] = read_items(sources["items"], sources.get("format"))
        case ["commands"]:
            items = read_items(sources["commands"], COMMANDS)
        case ["count"]:
            items = lists.counted(sources["count"], sources.get("key", "index"))
        case ["grid"]:
            axes = sources["grid"]
            texts = [key for key, kind in kinds.items() if kind == "text"]
            items = (
                lists.combinations(axes, "grid")
                if isinstance(axes, dict)
                else lists.grid(axes, texts)
            )
        case _:
            message = "no items are named"
            hint = "add --items FILE, --count N or --grid NAME=VALUES"
            raise ConfigError(message, hint=f"{hint}; init: or --campaign")
    items = lists.forced(items, kinds) if kinds else items
    return items if command is None else lists.as_written(items)


def note_types(types: lists.Types, sources: dict[str, Any]) -> None:
    """Print how the values of a list were read, in one line."""
    if "count" not in sources and str(types):
        print(printable(str(types)), file=sys.stderr)


def read_settings(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What names the items, the settings of the run, and the options of its workload."""
    config = given.pop("config")
    sources = _sources(given)
    if "commands" in sources:
        given["command"] = _of_commands(given)
    settings = _with_quantities(only_given(given), spelled)
    options = _parse_options(settings.pop("option", ()))
    if config is None:
        return sources, settings, options
    file = _converted(_read_toml(Path(config)), _KEYS, Path(config))
    if "commands" in file:
        file["command"] = _of_commands(file)
    in_file = _sources(file)
    if sources.keys() - {"key", "text", "number"}:
        # Other items than the file's; only the name of their key may be of use.
        in_file = {k: v for k, v in in_file.items() if k == "key" and "count" in sources}
    if settings.keys() & {"workload", "command"}:
        for name in ("workload", "command", "options"):
            file.pop(name, None)
    options = {**file.pop("options", {}), **options}
    return {**in_file, **sources}, {**only_given(file), **settings}, options


def _of_commands(given: dict[str, Any]) -> str:
    """The command that runs each line of --commands."""
    for name in ("workload", "command"):
        if given.get(name) is not None:
            message = f"--commands and {spelled(name)} exclude each other"
            hint = "for lines of arguments: --items FILE.txt --command '... {line:args}'"
            raise ConfigError(message, hint=hint)
    return "eval -- {line}"


def _parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (equals and key.isidentifier()) or key in options:
            message = f"--option {pair!r} is not KEY=JSON, each KEY once"
            raise ConfigError(message, hint="such as --option batch_size=16")
        try:
            options[key] = decoder(object_pairs_hook=unique).decode(text)
        except ValueError as error:
            if not (text.startswith(("{", "[", '"')) or text in _NOT_JSON):
                options[key] = text
                continue
            hint = "JSON has true, false and null, and its texts are in double quotes"
            raise ConfigError(f"--option {pair!r} is not JSON: {error}", hint=hint) from error
    return options


_NOT_JSON = ("True", "False", "None", "NaN", "Infinity", "-Infinity")
"""Taken as texts, they would be what nobody means: 'False' is true in Python."""

_SCALARS = (str, int, float, bool)


def _grid(value: object, where: str) -> dict[str, list[Any]]:
    if not isinstance(value, dict) or not value:
        raise t.wrong(where, value, "a table such as { lr = [0.1, 0.01], seed = '0:9' }")
    found = {}
    for name, given in value.items():
        if isinstance(given, str):
            found[name] = lists.parse_values(given, f"{where}.{name}")
        elif isinstance(given, list) and given and all(isinstance(one, _SCALARS) for one in given):
            found[name] = given
        else:
            raise t.wrong(f"{where}.{name}", given, "a list of values, or text such as '0:9'")
    return found


def _reader(option: Option) -> Callable[[Any, str], Any]:
    """Reads the value of an option in a file."""
    if option.repeated:
        return t.texts
    return {"": t.flag, "N": t.count}.get(option.metavar, t.text)


_KEYS: dict[str, t.Key] = {
    **{one.name: (one.name, _reader(one)) for group in PANELS.values() for one in group},
    "count": ("count", t.number_from(1, float("inf"), "a whole number from 1", whole=True)),
    "grid": ("grid", _grid),
    "options": ("options", t.kept(lambda v: isinstance(v, dict), "a table")),
    "open": ("open", t.flag),
    "needs": ("needs", lambda v, where: v if isinstance(v, dict) else t.text(v, where)),
    "retry": ("retry", lambda v, where: v if isinstance(v, dict) else t.text(v, where)),
}
del _KEYS["option"], _KEYS["config"]
_STAGE_KEYS: dict[str, t.Key] = {
    **{key: one for key, one in _KEYS.items() if key not in ("open", "commands")},
    "priority": ("priority", t.number_from(-1e6, 1e6, "a whole number", whole=True)),
    "after": ("after", lambda v, where: (v,) if isinstance(v, str) else t.texts(v, where)),
    "by": ("by", t.texts),
    "expand": ("expand", t.flag),
}


def _needs(given: Any, *, where: str) -> dict[str, Any]:
    from hpc_toolkit.system.needs import parse_needs, split

    return parse_needs(given if isinstance(given, dict) else split(given, where), where)


def _retry(given: Any, *, where: str) -> dict[str, Any]:
    from hpc_toolkit.system.needs import split

    hint = "such as on=oom,memory=x2,up_to=200G"
    return given if isinstance(given, dict) else split(given, where, hint)


_QUANTITIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "timeout": ("timeout_s", parse_duration),
    "kill_after": ("kill_after_s", partial(parse_duration, zero=True)),
    "recycle_at": ("recycle_at_mib", parse_size_mib),
    "log_limit": ("log_limit_mib", parse_size_mib),
    "needs": ("needs", _needs),
    "retry": ("retry", _retry),
}


def _with_quantities(values: dict[str, Any], where: Callable[[str], str]) -> dict[str, Any]:
    """``values`` with parsed durations and sizes; ``where`` names an option in an error."""
    for option in _QUANTITIES.keys() & values.keys():
        name, parse = _QUANTITIES[option]
        values[name] = parse(values.pop(option), where=where(option))
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    """Read a file of options. Raises ConfigError: it cannot be read, or is not TOML."""
    try:
        return tomllib.loads(path.read_text("utf-8"), parse_float=lists.read_float)
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        hint = near_path(path, "name a TOML file with --config")
        raise ConfigError(message, hint=hint) from error
    except (ValueError, RecursionError) as error:  # of tomllib, or of Python for a huge number
        message = f"{path}: not TOML: {error}"
        raise ConfigError(message, hint="docs/how-to/list-of-items.md shows a file") from error


def _converted(
    table: dict[str, Any], keys: dict[str, t.Key], path: Path, of: str = ""
) -> dict[str, Any]:
    """The options of a table; ``items`` is relative to the file. Raises ConfigError."""
    where = f"{path}: {of}".removesuffix(": ")
    found = _with_quantities(t.convert(table, keys, where), lambda key: f"{where}: {key}")
    for name in ("items", "commands") & found.keys():
        found[name] = str(path.parent / found[name])
    return found


def read_stages(path: Path) -> dict[str, dict[str, Any]] | None:
    """The stages of a file, as :meth:`Run.create` takes them; None: it has none.

    Raises ConfigError: as for the options of a list.
    """
    table = _read_toml(path)
    if "stages" not in table:
        return None
    for key in table.keys() - {"stages"}:
        message = f"{path}: {key!r} beside stages"
        raise ConfigError(message, hint="write it into the table of a stage")
    if not isinstance(table["stages"], dict) or not all(
        isinstance(one, dict) for one in table["stages"].values()
    ):
        raise t.wrong(f"{path}: stages", table["stages"], "tables such as [stages.train]")
    stages = {}
    for name, given in table["stages"].items():
        stage = _converted(given, _STAGE_KEYS, path, f"stages.{name}")
        if sources := _sources(stage):
            stage["items"] = make_items(sources, stage.get("command"))
        stages[name] = stage
    return stages
