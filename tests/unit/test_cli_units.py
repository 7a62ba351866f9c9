"""Every option that takes a duration, a size or an item says so in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from hpc_toolkit.cli import load_commands
from hpc_toolkit.cli.manifests import PANELS, manifest_command
from hpc_toolkit.engines.kubernetes import KINDS, ManifestSpec, render_manifest
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.options import by_name

if TYPE_CHECKING:
    from collections.abc import Iterator

UNITS = {"SECONDS", "MINUTES", "HOURS", "MS"}
SBATCH = {"--time", "--time-min"}
"""Options of sbatch, in which a number without a unit has a meaning."""

DURATIONS = [
    ("init", "r", "--items", "-", "--timeout"),
    ("work", "r", "--deadline"),
    ("work", "r", "--idle-exit"),
    ("work", "r", "--lease"),
    ("work", "r", "--grace"),
    ("work", "r", "--monitor", "--monitor-interval"),
    ("plan", "--items", "5", "--item-time"),
    ("plan", "--items", "5", "--item-time", "1s", "--load-time"),
    ("plan", "--items", "5", "--item-time", "1s", "--within"),
    ("plan", "--items", "5", "--item-time", "1s", "--time-limit"),
    ("launch", "--start-timeout"),
    ("launch", "--shutdown-timeout"),
    ("render", "--lease"),
    ("render", "--idle-exit"),
    ("scaling", "run", "-o", "d", "--sample-cost"),
    ("batch", "work", "--run", "r", "--shrink-every"),
    ("batch", "work", "--run", "r", "--check-within"),
    ("batch", "command", "--check-within"),
    ("batch", "train", "--run-dir", "d", "--check-within"),
    ("batch", "ray", "--check-within"),
]
SIZES = [
    ("work", "r", "--memory-per-worker"),
    ("plan", "--items", "5", "--item-time", "1s", "--memory-per-worker"),
    ("preflight", "--free"),
    ("scaling", "collectives", "--sizes"),
]


def options(command: Any, name: str = "hpctk") -> Iterator[tuple[str, Any]]:
    for word, below in getattr(command, "commands", {}).items():
        yield from options(below, f"{name} {word}")
    for option in command.params:
        yield name, option


def every_option() -> list[tuple[str, Any]]:
    found = list(options(load_commands()))
    return found + [one for kind in KINDS for one in options(manifest_command(kind), kind)]


def test_no_option_has_a_unit_of_its_own() -> None:
    found = [
        (command, option.opts[-1])
        for command, option in every_option()
        if option.metavar in UNITS
        or (option.metavar == "TIME" and option.opts[-1] not in SBATCH)
        or option.opts[-1].rpartition("-")[2] in ("seconds", "minutes", "hours", "ms")
    ]

    assert found == []


def test_an_item_is_named_by_the_same_option_everywhere() -> None:
    found = {
        command.removeprefix("hpctk ")
        for command, option in every_option()
        if option.metavar == "ITEM" and option.opts == ["--item"]
    }

    assert found == {"explain", "logs", "retry", "try"}


@pytest.mark.parametrize(("words", "fix"), [(DURATIONS, "5s, 5min or 5h"), (SIZES, "5M or 5G")])
def test_a_bare_number_is_refused_with_the_option_and_the_fix(
    words: list[tuple[str, ...]], fix: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "items.jsonl").write_text("{}\n")
    CliRunner().invoke(
        load_commands("init"), ["init", "r", "--items", "items.jsonl", "--command", "true"]
    )
    for given in words:
        tail = ["script"] if given[0] in ("launch", "batch") else []
        tail += ["program"] if given[0] == "batch" and given[1] != "work" else []
        ended = CliRunner().invoke(load_commands(given[0]), [*given, "5", *tail], input="{}")
        error = ended.exception
        assert isinstance(error, ConfigError), (given, ended.output, error)
        assert error.message == f"{given[-1]}: '5' has no unit"
        assert error.hint == f"write {fix}"


def test_every_duration_and_size_of_a_manifest_needs_a_unit() -> None:
    named = [one for one in by_name(PANELS).values() if one.metavar in ("DURATION", "SIZE")]
    assert {one.name for one in named} == {"time", "mem", "shm"}
    for one in named:
        given: dict[str, Any] = {one.name: "5", "image": "a/b:1", "command": ("train.py",)}
        with pytest.raises(ConfigError, match=f"{one.spelling}: '5' has no unit"):
            render_manifest(ManifestSpec(kind="kubernetes-ddp", job_name="x", **given))
