"""The parts into which 'make test' divides the tests leave none out and run none twice."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def lines() -> list[str]:
    """Every call of pytest in 'make test', as make shows it."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    shown = subprocess.run(
        ["make", "-n", "test"], cwd=ROOT, env=environ, check=True, capture_output=True, text=True
    ).stdout
    return [line for line in shown.splitlines() if " -m pytest " in line]


def calls() -> list[list[str]]:
    """The words of each that are pytest's own."""
    found = map(shlex.split, lines())
    return [words[words.index("pytest") + 1 :] for words in found]


def takes(words: list[str], file: str) -> bool:
    """Whether a call of pytest looks into a file of tests."""
    left_out = [word.partition("=")[2] for word in words if word.startswith("--ignore=")]
    named = [word for word in words if word.startswith("tests/")] or ["tests"]

    def within(paths: list[str]) -> bool:
        return any(file == path or file.startswith(f"{path}/") for path in paths)

    return within(named) and not within(left_out)


@pytest.mark.parametrize(
    ("marks", "directories"),
    [
        ("not soak", {"unit", "model"}),
        ("not soak and not alone", {"faults", "integration", "slurm"}),
        ("nfs and not soak and not alone", {"sharedfs"}),
        ("not nfs and not soak and not alone", {"sharedfs"}),
    ],
)
def test_every_file_is_in_one_part_for_its_marks(marks: str, directories: set[str]) -> None:
    parts = [words for words in calls() if marks in words]

    taken = {file: sum(takes(words, file) for words in parts) for file in FILES}

    mine = {file for file in FILES if file.split("/")[1] in directories}
    assert {file for file, times in taken.items() if times} == mine
    assert set(taken.values()) == {0, 1}


@pytest.mark.parametrize("mark", ["newslurm", "alone"])
def test_every_file_with_a_mark_is_in_its_part(mark: str) -> None:
    (words,) = [words for words in calls() if any(word.startswith(f"{mark} and") for word in words)]

    mine = {file for file in FILES if f"pytest.mark.{mark}" in (ROOT / file).read_text()}
    assert {file for file in FILES if takes(words, file)} == mine


def test_every_directory_and_every_path_of_a_part_is_there() -> None:
    paths = {
        word.partition("=")[2] or word for words in calls() for word in words if "tests/" in word
    }

    assert {path for path in paths if not (ROOT / path).exists()} == set()
    assert {file.split("/")[1] for file in FILES} == {
        *("unit", "model", "faults", "integration", "sharedfs", "slurm")
    }


def test_a_signal_to_make_reaches_pytest_and_no_shell_between() -> None:
    """Labs and mounts would outlive tests that are not told to end."""
    assert {line.partition(" ")[0] for line in lines()} == {"exec"}
