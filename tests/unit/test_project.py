"""What the project says about itself, and the parts of 'make test', are the same in every file."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from hpc_toolkit import __version__
from tests.documents import REPOSITORY
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
