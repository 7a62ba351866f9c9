"""Examples: the copies that 'hpctk new' writes, and what their README files count."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_toolkit.cli.mapping import EXAMPLES, write_example
from hpc_toolkit.errors import ConfigError, RunError
from tests.documents import EXAMPLE_DOCS, REPOSITORY

SOURCE = REPOSITORY / "examples/new"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_its_directory_in_the_repository(tmp_path: Path, example: str) -> None:
    (SOURCE / example / "__pycache__").mkdir(exist_ok=True)  # as an import leaves it

    commands = write_example(tmp_path / "first", example)

    source = {
        path.name: path.read_bytes() for path in (SOURCE / example).iterdir() if path.is_file()
    }
    written = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    assert "README.md" in source
    assert written.pop(".gitignore").splitlines()[0] == b"/runs/"
    assert written == source
    assert 2 <= len(commands) <= 3
    readme = source["README.md"].decode()
    assert all(f"\n$ {command}\n" in readme for command in commands)
    assert names(tmp_path) == ["first"]
    assert names(SOURCE) == sorted(EXAMPLES)


@pytest.mark.parametrize("document", EXAMPLE_DOCS)
def test_the_readme_of_an_example_is_short_and_its_links_work_anywhere(document: str) -> None:
    text = (REPOSITORY / document).read_text(encoding="utf-8")

    assert len(text.splitlines()) <= 60
    assert "](" not in text
    for path in re.findall(r"https://\S*/blob/main/(\S+\.md)", text):
        assert (REPOSITORY / path).is_file(), path


UNSAFE = [
    *("", ".", "..", "/", "-x", ".x", "a b", "a;b", "$(a)", "a\nb", "a\x1b[2J", "a\n/b", "\udcff"),
]


@pytest.mark.parametrize("name", UNSAFE)
def test_a_name_that_is_unsafe_to_type_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match="cannot be the name") as caught:
        write_example(Path(name), "list")

    assert caught.value.message.isprintable()
    assert "letters, digits" in caught.value.hint
    assert names(tmp_path) == []


@pytest.mark.parametrize("taken", ["file", "directory", "symlink", "dangling"])
def test_what_exists_is_refused_and_kept(tmp_path: Path, taken: str) -> None:
    target = tmp_path / "first"
    (tmp_path / "other").mkdir()
    if taken == "directory":
        target.mkdir()
        (target / "mine").touch()
    elif taken == "file":
        target.write_text("mine")
    else:
        target.symlink_to("other" if taken == "symlink" else "nowhere")
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(RunError, match="first exists") as caught:
        write_example(target, "list")

    assert caught.value.hint == "use another name; only an empty directory is filled"
    assert sorted(tmp_path.rglob("*")) == before


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
