"""Lists the documents that are tested, and reads their fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_toolkit.cli.mapping import EXAMPLES

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "hpc_toolkit"
GUIDES = sorted(
    str(path.relative_to(REPOSITORY))
    for folder in ("how-to", "moving", "tutorials")
    for path in (REPOSITORY / "docs" / folder).glob("*.md")
    if path.name != "README.md"
)
EXAMPLE_DOCS = {f"examples/new/{name}/README.md": name for name in EXAMPLES}
"""The examples of ``hpctk new`` by their documents, whose blocks run in the new directory."""
USER_DOCS = ["README.md", "runs/README.md", "docs/gallery.md", *GUIDES, *EXAMPLE_DOCS]
"""Documents whose blocks are run."""
DOCS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "runs/README.md", "examples/new/*/*.md")
    for path in REPOSITORY.glob(pattern)
)
_COMMENT = re.compile(r"<!-- (file|not run): (.*) -->")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    line: int
    """Number of its first line in the document."""
    language: str
    text: str
    file: str = ""
    """The file to which the block is written; "" for none."""
    not_run: str | None = None
    """Why the block is not run; None if it is run."""


def read_blocks(path: Path) -> Iterator[Block]:
    lines = path.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    marks: dict[str, str] = {}
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            comment = _COMMENT.fullmatch(lines[number - 1]) if number else None
            marks = {comment[1]: comment[2]} if comment else {}
            continue
        text = "\n".join(lines[start + 1 : number]) + "\n"
        yield Block(start + 2, lines[start][3:], text, marks.get("file", ""), marks.get("not run"))
        start = None
    assert start is None, f"{path}: a block that starts in line {start} has no end"


def public_names() -> dict[str, list[str]]:
    """The names of hpc_toolkit that a program may import, by their modules."""
    text = (REPOSITORY / "docs/reference/api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(hpc_toolkit[\w.]*)` \| (.*?) \|", text, re.MULTILINE)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}
