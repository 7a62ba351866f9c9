"""The counts of commands and lines in examples/weeks/README.md are those of the scripts."""

from __future__ import annotations

import re

import pytest

from tests.documents import REPOSITORY

WEEKS = REPOSITORY / "examples/weeks"
NAMES = sorted(path.stem for path in WEEKS.glob("*.sh"))
# What a user would not type: sizes of the tests, branches, and waiting for an event.
_NOT_TYPED = re.compile(r"\s*($|#|set |\w+=|if |else|fi$|while |.*\|\| exit 0)")


def count(script: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Commands, and lines of code or TOML, to the first result and in the week."""
    commands = lines = 0
    first, end = (0, 0), ""
    for line in script.replace("\\\n", " ").splitlines():
        if line == end:
            end = ""
        elif end:
            lines += not re.match(r"\s*(#|$)", line)
        elif here := re.search(r"<<'?(\w+)'?$", line):
            end = here[1]
        elif not _NOT_TYPED.match(line):
            commands += 1
            if line.endswith("# first result"):
                first = (commands, lines)
    return first, (commands, lines)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_the_counts_of_the_script(name: str) -> None:
    (first, first_lines), (week, week_lines) = count((WEEKS / f"{name}.sh").read_text())
    page = (WEEKS / "README.md").read_text()
    row = next(line for line in page.splitlines() if f"[{name}.sh]({name}.sh)" in line)
    cells = [cell.strip() for cell in row.split("|")]

    assert cells[2:4] == [f"{first}, {first_lines}", f"{week}, {week_lines}"]
