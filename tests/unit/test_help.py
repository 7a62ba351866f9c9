"""The help has all that the documents name; options are alike, and read in two ways alike.

Errors of options and of a filesystem say what to do.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from hpc_toolkit import cli
from hpc_toolkit.cli import plain_arguments, statusview, working
from hpc_toolkit.cli.render import MANIFEST_PANELS, manifest_command
from hpc_toolkit.cli.scriptoptions import PANELS
from hpc_toolkit.engines.kubernetes import KINDS, ManifestSpec, render_manifest
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.render.script import template_names
from tests import manpage
from tests.documents import REPOSITORY, USER_DOCS

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


def test_the_help_names_every_template() -> None:
    (said,) = re.findall(r"(work-queue, .*) or train-\.\.\.", helped("render", width=200))
    assert sorted(re.split(", | or ", said)) == [
        name for name in template_names() if not name.startswith("train-")
    ]


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS)])
def test_help_all_shows_what_the_help_leaves_out(name: str) -> None:
    command = COMMANDS[name] if name else ROOT
    options = [
        (max(one.opts, key=len), one) for one in command.params if one.param_type_name == "option"
    ]
    spelled = [word for word, _ in options]
    hidden = [word for word, one in options if one.hidden]
    shown = helped(name).split()
    subcommands = getattr(command, "commands", {})

    assert not name or command.help.partition("Examples:")[0].strip().endswith(".")
    assert [word for word, one in options if not one.help] == []
    assert [option for option in hidden if option in shown] == []
    more = hidden or any(one.hidden for one in subcommands.values()) or not name
    assert ("--help-all" in shown) == bool(more)
    everything = helped(name, "--help-all", width=200).replace(",", " ").split()
    assert [one for one in (*spelled, *subcommands) if one not in everything] == []


NEEDED = [
    (name, param.opts[0])
    for name, command in COMMANDS.items()
    for param in command.params
    if param.param_type_name == "option" and param.required
]
CHOICES = [
    (name, param.opts[0])
    for name, command in COMMANDS.items()
    for param in command.params
    if re.fullmatch(r"[a-z0-9-]+(\|[a-z0-9-]+)+", param.metavar or "")
]


@pytest.mark.parametrize(("name", "option"), NEEDED)
def test_a_command_without_an_option_that_it_needs_says_so(name: str, option: str) -> None:
    others = [word for one, needed in NEEDED if one == name and needed != option
              for word in (needed, "1")]  # fmt: skip
    arguments = ["1" for param in COMMANDS[name].params if param.param_type_name == "argument"]

    ended = CliRunner().invoke(ROOT, [*name.split(), *others, *arguments])

    assert ended.exit_code == 2
    assert f"Missing option '{option}'" in ended.output


@pytest.mark.parametrize(("name", "option"), CHOICES)
def test_a_word_that_is_no_choice_of_an_option_is_refused(name: str, option: str) -> None:
    ended = CliRunner().invoke(ROOT, [*name.split(), option, "nonsense"])

    assert ended.exit_code == 2
    assert "'nonsense' is not one of " in ended.output


@pytest.mark.parametrize(
    ("words", "least", "most"), [("submit --jobs", 1, 1000), ("plan --items", 1, 10**7)]
)
def test_a_number_beyond_the_limits_of_an_option_is_refused(
    words: str, least: int, most: int
) -> None:
    for number in (least - 1, most + 1):
        ended = CliRunner().invoke(ROOT, [*words.split(), str(number)])

        assert ended.exit_code == 2
        assert f"'{number}' is not a number from {least} to {most}" in ended.output


@pytest.mark.parametrize(
    "words",
    [
        *("status run {}", "status --{}", "render --nodes {}", "render --{} 1", "cluster {}"),
        *("--{}", "{}"),
    ],
)
def test_a_usage_error_shows_what_was_typed_as_text(words: str) -> None:
    hostile = [word.replace("{}", "x\x1b]0;t\x07\x9b2J\u202e\ry") for word in words.split()]

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


def test_options_in_scripts_and_messages_exist() -> None:
    """A script's header once named an option that had been dropped."""
    files = [*REPOSITORY.glob("templates/*.j2"), *REPOSITORY.glob("hpc_toolkit/**/*.py")]

    found = 0
    for file in files:
        text = file.read_text(encoding="utf-8")
        for command, own in re.findall(r"hpctk ([a-z]+(?: [a-z]+)?)\b([^`'\"\n|)]*)", text):
            name = command if command in COMMANDS else command.partition(" ")[0]
            for option in re.findall(r"(?<=\s)--[a-z][a-z-]+", own.partition(" -- ")[0]):
                of = [one for one in COMMANDS if one == name or one.startswith(f"{name} ")]
                of += [f"render {kind}" for kind in KINDS if name == "render"]
                if of:
                    assert any(option in options_of(one) for one in of), f"{file}: {name} {option}"
                    found += 1
    assert found > 40


@functools.cache
def options_of(command: str) -> set[str]:
    found = set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", helped(command, "--help-all", width=300)))
    if command in ("render", "submit", "scaling run"):
        found |= {one.spelling for group in PANELS.values() for one in group}  # some are hidden
    return found


UNITS = {"SECONDS", "MINUTES", "HOURS", "MS"}
ITEM = ("ITEM", ["--item"])
SBATCH = {"--time", "--time-min"}
"""Options of sbatch, in which a number without a unit has a meaning."""

DURATIONS = [
    *("init r --items - --timeout", "work r --deadline", "work r --idle-exit", "work r --lease"),
    *("work r --grace", "plan --items 5 --item-time"),
    *(f"plan --items 5 --item-time 1s --{one}" for one in ("within", "time-limit")),
    *("launch --start-timeout", "launch --shutdown-timeout"),
    *("render --lease", "render --idle-exit"),
    *(f"batch work --run r --{one}" for one in ("shrink-every", "check-within")),
    *("batch command --check-within", "batch train --run-dir d --check-within"),
]
SIZES = ["work r --memory-per-worker", "preflight --free"]


def every_option() -> list[tuple[str, Any]]:
    manifests = [(kind, manifest_command(kind)) for kind in KINDS]
    commands = [("", ROOT), *COMMANDS.items(), *manifests]
    return [(name, option) for name, command in commands for option in command.params]


def test_no_option_has_a_unit_of_its_own_and_an_item_is_named_alike_everywhere() -> None:
    found = [
        (command, option.opts[-1])
        for command, option in every_option()
        if option.metavar in UNITS
        or (option.metavar == "TIME" and option.opts[-1] not in SBATCH)
        or option.opts[-1].rpartition("-")[2] in ("seconds", "minutes", "hours", "ms")
    ]
    items = [command for command, one in every_option() if (one.metavar, one.opts) == ITEM]

    assert found == []
    assert sorted(set(items)) == ["explain", "logs", "retry", "try"]


@pytest.mark.parametrize(("words", "fix"), [(DURATIONS, "5s, 5min or 5h"), (SIZES, "5M or 5G")])
def test_a_bare_number_is_refused_with_the_option_and_the_fix(
    words: list[str], fix: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "items.jsonl").write_text("{}\n")
    CliRunner().invoke(ROOT, ["init", "r", "--items", "items.jsonl", "--command", "true"])
    for given in map(str.split, words):
        tail = ["script"] if given[0] in ("launch", "batch") else []
        tail += ["program"] if given[0] == "batch" and given[1] != "work" else []
        ended = CliRunner().invoke(ROOT, [*given, "5", *tail], input="{}")
        error = ended.exception
        assert isinstance(error, ConfigError), (given, ended.output, error)
        assert error.message == f"{given[-1]}: '5' has no unit"
        assert error.hint == f"write {fix}"


def test_every_duration_and_size_of_a_manifest_needs_a_unit() -> None:
    options = [one for group in MANIFEST_PANELS.values() for one in group]
    named = [one for one in options if one.metavar in ("DURATION", "SIZE")]
    assert {one.name for one in named} == {"time", "mem", "shm"}
    for one in named:
        given: dict[str, Any] = {one.name: "5", "image": "a/b:1", "command": ("train.py",)}
        with pytest.raises(ConfigError, match=f"{one.spelling}: '5' has no unit"):
            render_manifest(ManifestSpec(kind="kubernetes-ddp", job_name="x", **given))


PLAIN = [
    *("work", "work runs/first", "work runs/first --workers 4", "status"),
    *("work --workers=4 runs/first --strict-code", "status --slurm --verbose"),
    "work runs/first --idle-exit=1000d --lease=90s --deadline @1790000000 --grace 5",
    *("status runs/first --json", "work --monitor --cpus-per-worker 2"),
    "status --watch --check --no-slurm -v runs/first",
]
UNUSUAL = [
    *("work --help", "work -h", "work --engine ray", "work one two", "work --workers", "work -"),
    *("work --workers=", "work --workers many", "work --workers -1", "work --workers ٣"),
    *("work --workers 1 --workers 2", "work --deadline --lease 1m", "work --strict-code=yes"),
    *("work --work 2", "work -- runs/first", "status --json=1", "status -vv", "status --workers 2"),
]


READ_PLAINLY = {"work": working.PANELS, "status": statusview.PANELS}


@pytest.mark.parametrize(
    ("line", "plain"), [*((one, True) for one in PLAIN), *((one, False) for one in UNUSUAL)]
)
def test_plain_arguments_are_those_of_the_full_command_line_which_reads_what_is_unusual(
    line: str, plain: bool
) -> None:
    name, *words = line.split()

    found = plain_arguments(READ_PLAINLY[name], words)

    assert found == (COMMANDS[name].make_context(name, list(words)).params if plain else None)


@pytest.mark.parametrize("name", ["work", "status"])
def test_every_variable_of_an_option_is_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = [one.envvar for one in COMMANDS[name].params if one.envvar]

    for variable in variables:
        with monkeypatch.context() as changed:
            changed.setenv(variable, "1")
            assert plain_arguments(READ_PLAINLY[name], []) is None, variable


# Python raises BrokenPipeError for ESHUTDOWN as well.
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.ENOSPC])
def test_a_filesystem_that_does_not_answer_is_no_bug_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    def refuse(_: str) -> None:
        raise OSError(code, os.strerror(code), "/project/run/head")

    monkeypatch.setattr(cli, "load_commands", refuse)

    # Not main(), which ends the whole process where nothing must be taken down.
    with pytest.raises(SystemExit) as caught:
        cli._run("")

    assert caught.value.code == 75
    assert capsys.readouterr().err == (
        f"error: /project/run/head: {os.strerror(code)}\n"
        "hint: fix that and try again; nothing that was recorded is lost\n"
    )
