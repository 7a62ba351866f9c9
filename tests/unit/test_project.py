"""What the project says about itself is the same in every file."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

from hpc_toolkit import __version__
from tests.documents import REPOSITORY

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
