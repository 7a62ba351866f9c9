"""The documentation site: ``python -m tests.site DIRECTORY`` builds it there.

zensical reads pages from one directory, and knows only links between these pages. So the Markdown
of the repository is copied, with links to all other files leading to the repository, and the parts
of the reference that are generated from the code are put in (``tests/reference.py``).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import griffe

from tests.documents import REPOSITORY
from tests.reference import PARTS

BESIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/results.md": "benchmarks.md",
    "examples/weeks/README.md": "tutorials/weeks.md",
    "runs/README.md": "reference/format.md",
}
"""Pages that are not in docs/, and what they are called on the site."""

PICTURES = "assets/repository"
"""Where the site has pictures that are not in docs/."""
_PICTURES = {".gif", ".jpg", ".png", ".svg", ".webp"}

_LINK = re.compile(r'(\]\(|^\[[^\]]+\]: |(?:src|srcset|href)=")(?!\w+:|#)([^)"\s#]+)', re.MULTILINE)
_PART = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_FILE = re.compile(r"^<!-- file: (.*) -->\n```(\w+)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_EXAMPLE = re.compile(r"^(>>> .+(?:\n.+)*)", re.MULTILINE)
_LIST = re.compile(r"^((?!- |\d+\. |#| |\n).+\n)(?=- |\d+\. )", re.MULTILINE)


class Roles(griffe.Extension):
    """Turns roles of docstrings, such as :func:`make_policy`, and their examples into code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\1\n```", text)


@cache
def pages() -> dict[Path, Path]:
    """The pages of the site, by their files in the repository."""
    docs = REPOSITORY / "docs"
    found = {path: path.relative_to(docs) for path in sorted(docs.rglob("*.md"))}
    return found | {REPOSITORY / path: Path(page) for path, page in BESIDE.items()}


def page_text(path: Path, repository: str) -> str:
    """The Markdown of a page."""

    def link(match: re.Match[str]) -> str:
        target = (path.parent / match[2]).resolve()
        if page := pages().get(target) or pages().get(target / "README.md"):
            return match[1] + os.path.relpath(page, pages()[path].parent)
        if target.is_relative_to(REPOSITORY / "docs") and target.is_file():
            file = target.relative_to(REPOSITORY / "docs")
            return match[1] + os.path.relpath(file, pages()[path].parent)
        file = target.relative_to(REPOSITORY)
        if file.suffix in _PICTURES:
            return match[1] + os.path.relpath(f"{PICTURES}/{file}", pages()[path].parent)
        kind = "tree" if target.is_dir() else "blob"
        return f"{match[1]}{repository}/{kind}/main/{file}"

    def outside_blocks(text: str) -> str:
        # Without the empty line, the list would be part of the paragraph.
        return _LIST.sub(r"\1\n", _LINK.sub(link, text))

    text = path.read_text(encoding="utf-8")
    blocks = _FENCED.findall(text)
    parts = map(outside_blocks, _FENCED.split(text))
    text = "".join(part + block for part, block in zip(parts, [*blocks, ""], strict=True))
    text = _FILE.sub(r'```\2 title="\1"', text)
    return _PART.sub(lambda match: PARTS[match[1]](), text)


def prepare(directory: Path) -> None:
    """Write the configuration and the pages that zensical reads."""
    metadata = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    repository = metadata["project"]["urls"]["Repository"]
    others = shutil.ignore_patterns("*.toml", "*.1")
    shutil.copytree(REPOSITORY / "docs", directory / "pages", ignore=others)
    for path, page in pages().items():
        copy = directory / "pages" / page
        copy.parent.mkdir(exist_ok=True)
        text = page_text(path, repository)
        copy.write_text(text, encoding="utf-8")
        for picture in re.findall(rf'{PICTURES}/([^)"\s]+)', text):
            beside = directory / "pages" / PICTURES / picture
            beside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / picture, beside)
    # README.md, the list of topics, comes first: uppercase letters sort before lowercase ones.
    decisions = sorted((REPOSITORY / "docs/decisions").glob("*.md"))
    names = ", ".join(f'"decisions/{path.name}"' for path in decisions)
    settings = (REPOSITORY / "docs/zensical.toml").read_text(encoding="utf-8")
    settings = settings.replace('"decisions/*.md"', names)
    settings = settings.replace('"REPOSITORY"', f'"{REPOSITORY}"')
    (directory / "zensical.toml").write_text(settings, encoding="utf-8")


def build(site: Path) -> str:
    """Build the site, which replaces an older one; returns what zensical printed."""
    with TemporaryDirectory() as name:
        prepare(Path(name))
        done = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--strict"],
            cwd=name,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout)
        shutil.rmtree(site, ignore_errors=True)
        shutil.move(Path(name, "site"), site)
    return done.stdout


if __name__ == "__main__":
    print(build(Path(sys.argv[1])), end="")
