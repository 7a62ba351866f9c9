"""benchmarks/results.md: each benchmark writes the section of its own title and no other."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from hpc_toolkit.rundir.trust import mount_of

RESULTS = Path(__file__).parent / "results.md"


def facts(where: Path | None = None) -> str:
    """Date, commit, command and machine, on one line.

    Args:
        where: a directory whose filesystem matters to what was measured.
    """
    commit = _git("rev-parse", "--short=7", "HEAD") or "unknown"
    changed = " with changes" if _git("status", "--porcelain", "--", "hpc_toolkit") else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    parts = [
        f"{datetime.now(UTC):%Y-%m-%d}",
        f"commit {commit}{changed}",
        f"`{command}`",
        f"{len(os.sched_getaffinity(0))} cores",
        f"{memory:.0f} GiB",
        *([mount_of(where).kind] if where is not None else []),
        f"Python {platform.python_version()}.",
    ]
    return ", ".join(parts)


def _git(*argv: str) -> str:
    git = ["git", "-C", str(RESULTS.parent.parent), *argv]
    with suppress(FileNotFoundError):  # nothing measured is lost for want of git
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table."""
    rule = ["---"] * len(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def write_section(title: str, lines: list[str], path: Path = RESULTS) -> None:
    """Put a section in the place of the one with its title, or at the end."""
    text = path.read_text(encoding="utf-8")
    head = f"## {title}\n"
    before, found, rest = text.partition(head)
    if not found:
        before, rest = text.rstrip("\n") + "\n\n", ""
    at = rest.find("\n## ")
    after = "" if at < 0 else rest[at:]
    body = "\n".join(lines).rstrip("\n") + "\n"
    path.write_text(before + head + body + after, encoding="utf-8")
