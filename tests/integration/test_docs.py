"""The documents' blocks run and print what they say.

Fenced blocks of ``console``, ``sh`` and ``python`` are run in the order of a document, in a
directory of its own. A ``console`` block shows commands behind ``$`` and what they print, which
must be what they print but for numbers and workers' names. A comment in front of a block says
otherwise: ``<!-- file: NAME -->`` writes it to a file, ``<!-- not run: REASON -->`` leaves it
alone.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_toolkit.system.ranks import host_name
from tests.documents import EXAMPLE_DOCS, REPOSITORY, USER_DOCS, Block, read_blocks
from tests.notebooks import execute

WORKER = re.compile(r"\b[\w-]+-\d+-[0-9a-f]{6}\b")
DURATION = re.compile(r"\b\d[\d.]* (?:ms|s|min \d\d s|h \d\d min)\b")
MOMENTS = re.compile(r"(?:at|\b\d\d:\d\d to) \d\d:\d\d\b")
NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")


class Shell:
    """Runs the blocks of one document in a directory."""

    def __init__(self, root: Path, programs: Path) -> None:
        self.root = root
        """Where the next command runs."""
        self._left_in = programs / "left-in"
        for name, words in {"hpctk": "-m hpc_toolkit ", "python": ""}.items():
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}"$@"\n')
            program.chmod(0o755)
        hidden = ("SLURM", "SBATCH", "HPCTK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        self.environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith(hidden)},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
        }

    def run(self, *argv: str) -> str:
        """What a command prints, errors included."""
        done = subprocess.run(
            argv,
            cwd=self.root,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout}"
        return done.stdout

    def type(self, text: str, *options: str) -> str:
        """What commands print in a shell that leaves the next one where it ends."""
        stay = f"trap 'pwd >{shlex.quote(str(self._left_in))}' EXIT"
        printed = self.run("bash", *options, "-c", f"{stay}\n{text}")
        self.root = Path(self._left_in.read_text().strip())
        return printed

    def run_block(self, block: Block) -> None:
        if block.file:
            (self.root / block.file).write_text(block.text)
        elif block.not_run is not None:
            pass
        elif block.language == "sh":
            self.type(block.text, "-euo", "pipefail")
        elif block.language == "python":
            self.run(sys.executable, "-c", block.text)
        elif block.language == "console":
            for command, printed in transcript(block.text):
                found = self.type(command)
                assert blurred(found) == blurred(printed), command


def transcript(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a block, and what it says that they print."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, printed


def blurred(text: str) -> str:
    """A text without what differs from run to run."""
    text = re.sub("^stopping: .*\n", "", text, flags=re.MULTILINE)  # if it takes a while
    text = re.sub(rf"\bon {re.escape(host_name())}\b", "on n1", WORKER.sub("WORKER", text))
    text = MOMENTS.sub("at TIME", DURATION.sub("N s", text))
    return NUMBER.sub("N", text).strip()


SHORT = {
    *("README.md", "runs/README.md", "docs/how-to/list-of-items.md", "docs/how-to/python.md"),
    "docs/how-to/slurm-script.md",
}
"""Of each kind of commands one document; those of the others have tests of their own besides."""


def slow(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow if name in SHORT else pytest.mark.soak)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [slow(name) for name in USER_DOCS])
def test_blocks_of_a_document_do_and_print_what_it_says(name: str, tmp_path: Path) -> None:
    shell = Shell(tmp_path / "here", tmp_path)
    make_directory(shell, name)
    ran = 0
    for block in read_blocks(REPOSITORY / name):
        try:
            shell.run_block(block)
        except AssertionError as error:
            error.add_note(f"in {name}, line {block.line}")
            raise
        ran += block.language in ("console", "sh", "python") and block.not_run is None
    assert ran


def make_directory(shell: Shell, name: str) -> None:
    """The directory in which a document's blocks run: an example's README.md comes with files."""
    shell.root.mkdir()
    if name in EXAMPLE_DOCS:
        shell.run("hpctk", "new", str(shell.root), "--example", EXAMPLE_DOCS[name])
        for notebook in shell.root.glob("*.ipynb"):
            execute(notebook, shell.root, shell.environ)
