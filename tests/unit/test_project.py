"""Project files agree with each other; parts of 'make test'; examples that 'hpctk new' copies."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from hpc_toolkit import __version__
from hpc_toolkit.cli.mapping import EXAMPLES, write_example
from hpc_toolkit.errors import ConfigError, RunError
from tests.documents import EXAMPLE_DOCS, REPOSITORY
from tests.notebooks import EXAMPLE

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDRESS = PROJECT["urls"]["Repository"]
PLACEHOLDER = "OWNER/"
CITATION = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")


RECIPE = "packaging/conda/recipe.yaml"
NAMING = ["README.md", "CITATION.cff", "SECURITY.md", "CODE_OF_CONDUCT.md"]


@pytest.mark.parametrize(
    "name", [*NAMING, ".github/ISSUE_TEMPLATE/config.yml", "docs/zensical.toml", RECIPE]
)
def test_texts_name_the_repository_as_the_metadata_does(name: str) -> None:
    text = (REPOSITORY / name).read_text(encoding="utf-8")

    assert ADDRESS in text
    assert PLACEHOLDER in ADDRESS or PLACEHOLDER not in text


def test_every_address_of_the_metadata_is_in_the_repository_or_its_pages() -> None:
    pages = re.sub(r"^https://github.com/(\w+)/", r"https://\1.github.io/", ADDRESS)
    settings = tomllib.loads((REPOSITORY / "docs/zensical.toml").read_text(encoding="utf-8"))

    assert all(url.startswith((ADDRESS, pages)) for url in PROJECT["urls"].values())
    assert PROJECT["urls"]["Documentation"] == settings["project"]["site_url"] == pages


def test_workflows_use_actions_at_a_commit_that_nobody_can_move() -> None:
    for path in sorted((REPOSITORY / ".github/workflows").glob("*.yml")):
        used = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
        assert used, path
        for action in used:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), path


def test_the_citation_has_the_version_and_licence_of_the_package() -> None:
    fields = dict(re.findall(r"^([\w-]+): (.*)$", CITATION, re.MULTILINE))

    assert (fields["version"], fields["license"]) == (__version__, PROJECT["license"])


def test_the_conda_recipe_has_the_version_and_the_dependencies_of_the_metadata() -> None:
    recipe = yaml.safe_load((REPOSITORY / RECIPE).read_text(encoding="utf-8"))
    least = PROJECT["requires-python"].removeprefix(">=")
    needed = [re.sub(r"^(\w+)", r"\1 ", text) for text in PROJECT["dependencies"]]

    run = recipe["requirements"]["run"]

    assert recipe["context"] == {"version": __version__, "python_min": least}
    assert run == ["python >=${{ python_min }}", *needed, "__linux"]
    assert recipe["build"]["python"]["entry_points"] == [
        f"{name} = {target}" for name, target in PROJECT["scripts"].items()
    ]


ROOT = Path(__file__).parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


@cache
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


def test_the_example_is_kept_with_outputs_of_no_real_machine() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")

    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["execution_count"] for cell in code)
    assert "48 of 48" in text
    assert not any(word in text for word in ("/root", "/tmp", str(REPOSITORY)))


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
