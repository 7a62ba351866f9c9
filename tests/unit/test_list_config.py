"""A file with the options of 'hpctk init'."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.run import Run
from tests.unit.jobcommands import call

FILE = """\
command = "echo {seed}"
count = 3
key = "seed"
group_by = "seed"
max_attempts = 2
timeout = "5min"
no_retry = "timeout"
max_failures = "5%"
open = true
items_per_claim = 2
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def init(*words: str) -> Any:
    found = call("init", "run", *words)
    return found.exception if found.exit_code else Run.open("run")


def test_a_file_has_all_options_of_a_list() -> None:
    Path("bench.toml").write_text(FILE)

    run = init("--config", "bench.toml")

    stage = run.manifest.stages[0]
    assert run.items() == [{"seed": 0}, {"seed": 1}, {"seed": 2}]
    assert (stage.workload.command, stage.group_by) == ("echo {seed}", "seed")
    assert (stage.max_attempts, stage.timeout_s, stage.max_failures) == (2, 300.0, "5%")
    assert (stage.no_retry, stage.items_per_claim) == ("timeout", 2)
    run.add([{"seed": 9}])


def test_items_per_claim_sizes_the_units_also_of_items_that_are_added() -> None:
    words = ("--count", "7", "--command", "true", "--items-per-claim", "3", "--open")
    ended = call("init", "run", *words)

    run = Run.open("run")
    run.add([{"index": 7 + number} for number in range(4)])

    assert ended.stdout == "run\n"
    assert ended.stderr == "7 items in 3 units of 1 to 3; one claim takes a unit\n"
    run.view.poll()
    segments = run.view.stages["items"].log.segments.values()
    assert [[unit.count for unit in one.units] for one in segments] == [[3, 3, 1], [3, 1]]


def test_items_are_beside_the_file_and_options_and_grids_are_tables() -> None:
    Path("below").mkdir()
    Path("below/items.csv").write_text("n\n7\n")
    sleep = "hpc_toolkit.science.workloads.synthetic:Noop"
    text = f'items = "items.csv"\nworkload = "{sleep}"\noptions = {{ value = 3 }}\n'
    Path("below/b.toml").write_text(text)

    found = init("--config", "below/b.toml", "--option", "value=4")
    Path("g.toml").write_text('command = "true"\ngrid = { a = ["x", 2], b = "0:4:2" }')
    grid = call("init", "grid", "--config", "g.toml")

    assert isinstance(found, Run | Exception)
    assert grid.exit_code == 0
    assert Run.open("grid").items() == [{"a": a, "b": b} for a in ("x", 2) for b in (0, 2, 4)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("timeout", "no_retry = 'timeout' needs a timeout"),
        ("oom --timeout 1h", "no_retry must be 'timeout' or names of exceptions, got 'oom'"),
    ],
)
def test_a_failure_that_cannot_happen_or_is_unknown_is_not_excluded_from_retries(
    words: str, message: str
) -> None:
    error = init("--count", "3", "--command", "true", "--no-retry", *words.split())

    assert isinstance(error, ConfigError), repr(error)
    assert error.message == message
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuont = 3", "b.toml: unknown key 'cuont'"),
        ("count = 0", "b.toml: count: 0 is not a whole number from 1"),
        ("count = true", "b.toml: count: True is not a whole number"),
        ("timeout = 3", "timeout"),
        ("grid = 3", "b.toml: grid: 3 is not a table such as"),
        ("grid = { a = [] }", "b.toml: grid.a: [] is not a list of values"),
        ("grid = { a = [[1]] }", "b.toml: grid.a: [[1]] is not a list of values"),
        ("count 3", "b.toml: not TOML"),
        (f"count = {'1' * 5000}", "b.toml: not TOML"),
        (f"x = {'[' * 3000}", "b.toml: not TOML"),
        ("count = 1\noptions = { a = 2020-01-01 }", "is not a table of values that JSON has"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(text: str, message: str) -> None:
    Path("b.toml").write_text(f"{text}\n")

    error = init("--config", "b.toml", "--command", "true")

    assert isinstance(error, ConfigError), json.dumps(str(error))
    assert message in error.message
    assert not Path("run").exists()


NOOP = "hpc_toolkit.science.workloads.synthetic:Sleep"
AS_TEXT = {"x": "3.10", "y": "1e5", "n": "9007199254740993.0"}
WRITTEN = '{"x": 3.10, "y": 1e5, "n": 9007199254740993.0}\n'


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (("--command", "echo {x}"), {}),
        (("--workload", NOOP), {"x": 3.1, "y": 1e5, "n": 9007199254740992.0}),
        (("--workload", NOOP, "--text", "x", "--text", "n"), {"y": 1e5}),
        (("--command", "echo {x}", "--number", "y"), {}),
    ],
)
def test_a_number_of_a_list_reaches_a_command_as_written(
    words: tuple[str, ...], numbers: dict[str, float]
) -> None:
    Path("l.jsonl").write_text(WRITTEN)
    Path("b.toml").write_text("grid = { x = [3.10], y = [1e5], n = [9007199254740993.0] }")

    for source in (("--items", "l.jsonl"), ("--config", "b.toml")):
        assert init(*source, *words).items() == [{**AS_TEXT, **numbers}]
        shutil.rmtree("run")
