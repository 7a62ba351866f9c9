"""The parts of the reference that are generated from the code, as Markdown.

A page of docs/reference/ has a comment such as ``<!-- generated: commands -->`` for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import click
import griffe

from hpc_toolkit import cli
from hpc_toolkit.campaign import arms, settings, tables
from hpc_toolkit.cli.help import _ORDER
from hpc_toolkit.cli.render import TEMPLATES, manifest_command
from hpc_toolkit.engines.kubernetes import Kind
from hpc_toolkit.system import tomltable
from tests.clusterkeys import cluster_tables
from tests.documents import REPOSITORY, public_names


def plain(text: str) -> str:
    """A text in which Markdown sees no markup."""
    return re.sub(r"([\\*_<>`|\[\]])", r"\\\1", text)


class HelpPage:
    """Takes what commands write to click's formatter, as Markdown."""

    def __init__(self, command: str) -> None:
        self.text = f"### {command}\n\n"
        self._id = command.replace(" ", "-")
        self._heading = ""

    def write_usage(self, program: str, arguments: str = "") -> None:
        self.text += f"```text\n{program} {arguments}\n```\n"

    def write_paragraph(self) -> None:
        self.text += "\n"

    def write_text(self, text: str) -> None:
        self.text += f"{plain(text)}\n"

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._heading = f"\n**{name}**\n\n"
        yield

    def write_dl(self, rows: Iterable[tuple[str, str]]) -> None:
        for term, text in rows:
            option = re.match(r"(?:-\w, )?(--[\w-]+)", term)
            if option and option[1] == "--help":
                continue
            anchor = f'<a id="{self._id}{option[1]}"></a>' if option else ""
            self.text += f"{self._heading}{anchor}`{term}`\n:   {plain(text)}\n\n"
            self._heading = ""

    def write(self, text: str) -> None:
        if text == "Examples:\n":
            self.text += "**Examples**\n\n"
        else:
            lines = [line.removeprefix("  ") for line in text.splitlines()]
            self.text += "\n".join(["```sh", *lines, "```", ""])


def commands() -> str:
    """Every command with all its arguments and options, under the headings of the help."""
    root: Any = cli.load_commands()
    sections: dict[str, list[str]] = {heading: [] for heading in _ORDER}
    for name in root.list_commands(click.Context(root)):
        command = root.commands[name]
        sections[command.panel] += _helps(command, f"hpctk {name}")
    return "\n".join(
        f"## {heading}\n\n{''.join(helps)}" for heading, helps in sections.items() if helps
    )


def _helps(command: Any, name: str) -> Iterator[str]:
    page = HelpPage(name)
    context = command.context_class(command, info_name=name)
    context.meta["hpc_toolkit.help_all"] = True
    command.format_help(context, page)
    yield f"{page.text}\n"
    inner = dict(getattr(command, "commands", {}))
    if name == "hpctk render":
        inner = {kind: manifest_command(cast("Kind", kind)) for kind in TEMPLATES}
    for word, one in inner.items():
        yield from _helps(one, f"{name} {word}")


_KINDS = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "`true` or `false`",
    "dict[str, Any]": "table",
    "dict[str, str]": "table of texts",
    "dict[str, float]": 'table of seconds, or of texts such as `"10min"`',
    "dict[str, Kind]": "table of texts and lists",
    "tuple[int, ...]": "list of whole numbers",
    "tuple[str, ...]": "list of texts",
    "tuple[dict[str, Any], ...]": "list of tables",
}
"""What the file contains for a field of this type; other types have sections of their own."""
_DURATIONS: dict[object, str] = {
    tomltable.duration_s: 'seconds, or text such as `"10min"`',
    tomltable.duration_h: 'hours, or text such as `"90min"`',
}


def campaign() -> str:
    """The keys of a campaign's file, each table under its heading."""
    sections: list[tuple[str, Mapping[str, Any], str]] = [
        ("Top level", settings._CAMPAIGN, "settings.Campaign"),
        ("[[models]]", arms._MODEL, "arms.Model"),
        ("[[models]] with pythia", arms._PYTHIA, "arms._pythia"),
        ("[arms]", arms._ARMS, "arms.ArmRows"),
        ("[prepare]", tables._PREPARE, "tables.Work"),
        ("[metrics]", tables._METRICS, "tables.Work"),
        ("[tasks]", tables._TASKS, "tables.Work"),
        ("[search]", tables._SEARCH, "tables.Search"),
    ]
    package: Any = griffe.load("hpc_toolkit.campaign", search_paths=[REPOSITORY])
    text = ""
    for heading, keys, kind in sections:
        text += f"## {plain(heading)}\n\n"
        fields = dict(_fields(package[kind]))
        for key, one in keys.items():
            field, convert = one if isinstance(one, tuple) else (key, one)
            annotation, about = fields[field]
            value = _DURATIONS.get(convert) or _KINDS.get(annotation.removesuffix(" | None"))
            if value and key != "rows":
                text += _entry(f"{heading}-{key}", key, value, about)
    return text


def _fields(found: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    """Type and description of the fields of a class, or of the parameters of a function."""
    if found.is_class:
        for name, one in found.attributes.items():
            default = str(one.value or "")
            about = one.docstring.value if one.docstring else ""
            yield name, (str(one.annotation), about + _default(default))
    else:
        for one in found.docstring.parse("google")[1].value:
            default = str(found.parameters[one.name].default or "")
            yield one.name, (str(one.annotation), f"{one.description}{_default(default)}")


def _default(written: str) -> str:
    """The default value of a field, where the file could have it."""
    given = written.replace("'", '"').replace("False", "false")
    return f" Default: `{given}`." if re.fullmatch(r'"[^"]+"|\d+|false', given) else ""


def _entry(anchor: str, key: str, value: str, about: str) -> str:
    anchor = re.sub(r"[^\w]+", "-", anchor.lower()).strip("-")
    text = re.sub(r"\s+", " ", about).replace("``", "`")
    term = f'<a id="{anchor}"></a>`{key}`: {value}'
    return f"{term}\n:   {text[:1].upper()}{text[1:]}\n\n" if text else f"- {term}\n"


def cluster() -> str:
    """The keys of a cluster's file, each table under its heading."""
    text = ""
    for heading, rows in cluster_tables().items():
        text += f"\n## {plain(heading)}\n\n" if heading else ""
        prefix = f"{heading.strip('[]')}-" if heading else ""
        text += "".join(
            _entry(prefix + key, key, value, _code(about)) for key, value, about in rows
        )
    return text


def _code(text: str) -> str:
    return re.sub(r"(?<!\w)'([^']+)'", r"`\1`", text)


def api() -> str:
    """The public names of docs/reference/api.md, from their docstrings."""
    return "\n".join(
        f"::: {module}\n    options:\n      heading_level: 2\n      show_root_full_path: true\n"
        f"      toc_label: {module.removeprefix('hpc_toolkit.')}\n      members: {names}\n"
        for module, names in public_names().items()
    )


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "campaign": campaign,
    "cluster": cluster,
    "api": api,
}
