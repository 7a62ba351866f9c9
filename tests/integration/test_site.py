"""The documentation site: it builds without a warning, of dead links too, and is complete."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import griffe
import pytest

from hpc_toolkit import cli
from hpc_toolkit.campaign import tables
from hpc_toolkit.slurm.clusters.facts import KEYS
from hpc_toolkit.slurm.clusters.keys import PARTITION_KEYS
from tests import site
from tests.documents import REPOSITORY, public_names

pytestmark = [pytest.mark.slow, pytest.mark.soak]  # unit/test_docs.py follows links


class Page(HTMLParser):
    """The navigation, anchors and loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.listed: list[str] = []
        """Links of the navigation."""
        self.loaded: list[str] = []
        """What a browser loads with the page."""
        self.anchors: set[str] = set()
        self._navs = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self._navs += tag == "nav"
        if tag == "a" and "href" in given and self._navs:
            self.listed.append(given["href"])
        elif tag == "link" and given["rel"] in ("stylesheet", "icon", "preload"):
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])

    def handle_endtag(self, tag: str) -> None:
        self._navs -= tag == "nav"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("site") / "site"
    printed = site.build(root)
    assert "No issues found" in printed
    assert "warning" not in printed.lower()
    return root


@pytest.fixture(scope="module")
def read(built: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(built.rglob("*.html")) if path.name != "404.html"}


def followed(path: Path, links: list[str]) -> Iterator[Path]:
    """The files to which links within the site lead."""
    for link in links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc:
            yield (path.parent / unquote(parts.path)).resolve() if parts.path else path


def test_every_page_is_in_the_navigation(built: Path, read: dict[Path, Page]) -> None:
    index = built / "index.html"
    listed = set(followed(index, read[index].listed))

    assert len(read) == len(site.pages())
    assert [path.name for path in read if path not in listed] == []


def test_pages_load_only_files_of_the_site(read: dict[Path, Page]) -> None:
    for path, page in read.items():
        files = list(followed(path, page.loaded))

        assert len(files) == len(page.loaded) > 0, page.loaded
        assert [file for file in files if not file.is_file()] == [], path


def test_the_reference_has_every_command_option_key_and_public_name(
    built: Path, read: dict[Path, Page]
) -> None:
    def anchors(page: str) -> set[str]:
        return read[built / f"reference/{page}.html"].anchors

    options = {
        f"{name.replace(' ', '-')}{max(option.opts, key=len)}"
        for name, command in walk(cli.load_commands(), "hpctk")
        for option in command.params
        if option.param_type_name == "option" and option.help
    }
    public = {f"{module}.{name}" for module, names in public_names().items() for name in names}
    package: Any = griffe.load("hpc_toolkit", search_paths=[REPOSITORY])
    undescribed = [
        name for name in public if not package[name.removeprefix("hpc_toolkit.")].has_docstring
    ]
    keys = {f"search-{key}" for key in tables._SEARCH} | {f"tasks-{key}" for key in tables._TASKS}

    assert options - anchors("commands") == set()
    assert keys - anchors("campaign-file") == set()
    keys = {*KEYS, *(f"partitions-{key}" for key in PARTITION_KEYS)}
    assert keys - anchors("cluster-file") == set()
    assert public - anchors("api") == set()
    assert undescribed == []
    print(f"{len(options)} options, {len(public)} public names")


def walk(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for word, command in getattr(group, "commands", {}).items():
        yield f"{name} {word}", command
        yield from walk(command, f"{name} {word}")
