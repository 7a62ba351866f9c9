"""The help: short, plain, with examples, and with all that the documents name."""

from __future__ import annotations

import functools
import io
import os
import re
import shlex
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from hpc_toolkit import cli
from hpc_toolkit.cli.scriptoptions import PANELS
from hpc_toolkit.system.options import by_name
from tests import manpage
from tests.documents import REPOSITORY, USER_DOCS

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 80


def walk(group: Any, *words: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        full = (*words, name)
        yield " ".join(full), command
        if hasattr(command, "commands"):
            yield from walk(command, *full)


ROOT: Any = cli.load_commands()
COMMANDS = dict(walk(ROOT))
VISIBLE = sorted(name for name, command in COMMANDS.items() if not command.hidden)


def helped(name: str, option: str = "--help", *, width: int = WIDTH) -> str:
    printed = io.StringIO()
    with (
        patch.dict(os.environ, COLUMNS=str(width)),
        redirect_stdout(printed),
        pytest.raises(SystemExit) as ended,
    ):
        ROOT.main([*name.split(), option], prog_name="hpctk")
    assert ended.value.code == 0
    return printed.getvalue()


def test_the_help_of_hpctk_fits_one_screen() -> None:
    lines = helped("").splitlines()
    shown = [name for name in VISIBLE if " " not in name]

    assert len(lines) <= 40
    assert max(map(len, lines)) <= WIDTH
    assert len(shown) <= 24
    assert [name for name in shown if not any(line.split()[:1] == [name] for line in lines)] == []


@pytest.mark.parametrize("name", VISIBLE)
def test_the_help_of_a_command_is_short_and_has_examples(name: str) -> None:
    lines = helped(name).splitlines()

    assert len(lines) <= 75
    assert max(map(len, lines)) <= WIDTH
    assert "Examples:" in lines
    examples = lines[lines.index("Examples:") + 1 :]
    assert any(f"hpctk {name}" in line for line in examples)


def test_the_options_of_every_example_are_there() -> None:
    seen = 0
    for name in VISIBLE:
        text = helped(name, width=200).partition("Examples:\n")[2].replace("\\\n", "")
        for line in text.splitlines():
            words = re.split(r" [|&;>]|\$\(", line)[0].strip()
            if not words.startswith("hpctk "):
                continue
            command, rest = ROOT, shlex.split(words, comments=True)[1:]
            while hasattr(command, "commands"):
                command = command.commands[rest.pop(0)]
            context = command.context_class(command, **command.context_settings)
            command.make_parser(context).parse_args(rest)
            seen += 1
    assert seen > len(VISIBLE)


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS)])
def test_help_all_shows_what_the_help_leaves_out(name: str) -> None:
    command = COMMANDS[name] if name else ROOT
    spelled = [
        max(option.opts, key=len) for option in command.params if option.param_type_name == "option"
    ]
    hidden = [
        max(option.opts, key=len)
        for option in command.params
        if getattr(option, "hidden", False) and option.help
    ]
    shown = helped(name).split()
    subcommands = getattr(command, "commands", {})

    assert [option for option in hidden if option in shown] == []
    more = hidden or any(one.hidden for one in subcommands.values()) or not name
    assert ("--help-all" in shown) == bool(more)
    everything = helped(name, "--help-all", width=200).replace(",", " ").split()
    refused = {max(option.opts, key=len) for option in command.params if not option.help}
    assert [one for one in spelled if one not in everything and one not in refused] == []
    assert [one for one in subcommands if one not in everything] == []


@pytest.mark.parametrize(
    "words",
    [
        ("status", "run", "{}"),
        ("status", "--{}"),
        ("render", "--nodes", "{}"),
        ("render", "--{}", "1"),
        ("cluster", "{}"),
        ("--{}",),
        ("{}",),
    ],
)
def test_a_usage_error_shows_what_was_typed_as_text(words: tuple[str, ...]) -> None:
    hostile = [word.replace("{}", "x\x1b]0;t\x07\x9b2J\u202e\ry") for word in words]

    ended = CliRunner().invoke(ROOT, hostile)

    assert ended.exit_code == 2
    assert "\\x1b" in ended.output
    assert ended.output.replace("\n", "").isprintable()


def test_the_man_page_is_the_help() -> None:
    assert manpage.PAGE.read_text(encoding="utf-8") == manpage.rendered()


def test_every_command_of_the_help_is_at_a_glance() -> None:
    text = (REPOSITORY / "docs/commands.md").read_text(encoding="utf-8")
    commands = [
        name
        for name in VISIBLE
        if name.partition(" ")[0] in VISIBLE and not hasattr(COMMANDS[name], "commands")
    ]

    assert [name for name in commands if not re.search(rf"`hpctk {name}\b", text)] == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/commands.md", *USER_DOCS])
def test_commands_and_options_of_a_document_exist(name: str) -> None:
    text = (REPOSITORY / name).read_text(encoding="utf-8")

    for words in re.findall(r"(?:`|\$ |\(|^)hpctk ([a-z]+[^`\n|)]*)", text, re.MULTILINE):
        # The words behind "--", in quotes or behind "&" are those of another program.
        own = re.sub("'[^']*'", "", words.partition(" -- ")[0]).partition(" & ")[0]
        command, *rest = own.split()
        assert command in COMMANDS, words
        if rest and f"{command} {rest[0]}" in COMMANDS:
            command += f" {rest[0]}"
        elif rest and rest[0].startswith("kubernetes-"):
            # These templates of render have options of their own.
            command += f" {rest[0]}"
        for option in re.findall(r"(?<=\s)--[a-z-]+", own):
            assert option in options_of(command), f"hpctk {command} has no {option}"


@functools.cache
def options_of(command: str) -> set[str]:
    found = set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", helped(command, "--help-all", width=300)))
    if command in ("render", "submit", "scaling run"):
        found |= {option.spelling for option in by_name(PANELS).values()}  # some are hidden
    return found
