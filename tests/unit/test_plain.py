"""The commands that are read without click get the arguments that click would give them."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_toolkit import cli
from hpc_toolkit.cli import plain_arguments, statusview, working

PLAIN = [
    "work",
    "work runs/first",
    "work runs/first --workers 4",
    "work --workers=4 runs/first --strict-code",
    "work runs/first --idle-exit=1000d --lease=90s --deadline @1790000000 --grace 5",
    "status",
    "status runs/first --json",
    "status --watch --check --no-slurm -v runs/first",
    "status --slurm --verbose",
    "work --monitor --cpus-per-worker 2",
]
UNUSUAL = [
    "work --help",
    "work -h",
    "work --engine ray",
    "work one two",
    "work --workers",
    "work --workers=",
    "work --workers many",
    "work --workers -1",
    "work --workers ٣",
    "work --workers 1 --workers 2",
    "work --deadline --lease 1m",
    "work --strict-code=yes",
    "work --work 2",
    "work -- runs/first",
    "work -",
    "status --json=1",
    "status -vv",
    "status --workers 2",
]


PANELS = {"work": working.PANELS, "status": statusview.PANELS}


def command_named(name: str) -> Any:
    group: Any = cli.load_commands(name)
    return group.commands[name]


@pytest.mark.parametrize("line", PLAIN)
def test_the_arguments_are_those_of_the_full_command_line(line: str) -> None:
    name, *words = line.split()

    found = plain_arguments(PANELS[name], words)

    assert found == command_named(name).make_context(name, list(words)).params


@pytest.mark.parametrize("line", UNUSUAL)
def test_the_full_command_line_reads_what_is_unusual(line: str) -> None:
    name, *words = line.split()

    assert plain_arguments(PANELS[name], words) is None


@pytest.mark.parametrize("name", ["work", "status"])
def test_every_variable_of_an_option_is_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = [one.envvar for one in command_named(name).params if one.envvar]

    for variable in variables:
        with monkeypatch.context() as changed:
            changed.setenv(variable, "1")
            assert plain_arguments(PANELS[name], []) is None, variable
