"""The documents' blocks run and print what they say; the commands that they name exist.

Fenced blocks of ``console``, ``sh`` and ``python`` are run in the order of a document, in a
directory of its own. A ``console`` block shows commands behind ``$`` and what they print, which
must be what they print but for numbers and workers' names. A comment in front of a block says
otherwise: ``<!-- file: NAME -->`` writes it to a file, ``<!-- not run: REASON -->`` leaves it
alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.cli.scriptoptions import PANELS
from hpc_toolkit.system.options import by_name
from tests.documents import PACKAGE, REPOSITORY, USER_DOCS, Block, read_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKER = re.compile(r"\b[\w-]+-\d+-[0-9a-f]{6}\b")
NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")


class Shell:
    """Runs the blocks of one document in a directory."""

    def __init__(self, root: Path, programs: Path) -> None:
        self.root = root
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

    def run_block(self, block: Block) -> None:
        if block.file:
            (self.root / block.file).write_text(block.text)
        elif block.not_run is not None:
            pass
        elif block.language == "sh":
            self.run("bash", "-euo", "pipefail", "-c", block.text)
        elif block.language == "python":
            self.run(sys.executable, "-c", block.text)
        elif block.language == "console":
            for command, printed in transcript(block.text):
                found = self.run("bash", "-c", command)
                assert blurred(found) == blurred(printed), command


def transcript(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a block, and what it says that they print."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, printed


def blurred(text: str) -> str:
    """A text without what differs from run to run."""
    return NUMBER.sub("N", WORKER.sub("WORKER", text)).strip()


def slow(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [slow(name) for name in USER_DOCS])
def test_blocks_of_a_document_do_and_print_what_it_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    shell = Shell(tmp_path / "here", tmp_path)
    ran = 0
    for block in read_blocks(REPOSITORY / name):
        try:
            shell.run_block(block)
        except AssertionError as error:
            error.add_note(f"in {name}, line {block.line}")
            raise
        ran += block.language in ("console", "sh", "python") and block.not_run is None
    assert ran


def test_a_console_block_that_prints_something_else_is_noticed(tmp_path: Path) -> None:
    shell = Shell(tmp_path, tmp_path)

    shell.run_block(Block(1, "console", "$ echo 3 items of n1-12-0a1b2c\n7 items of vm-3-ffffff\n"))
    with pytest.raises(AssertionError, match="echo done"):
        shell.run_block(Block(1, "console", "$ echo done\nfailed\n"))
    with pytest.raises(AssertionError, match="exit code 3"):
        shell.run_block(Block(1, "sh", "exit 3\n"))


@pytest.fixture(scope="module")
def commands() -> dict[str, set[str]]:
    """The options of every command, hidden ones too; ``cluster show`` is one as well."""
    found = {}
    for name in subcommands():
        for full in [f"{name} {inner}" for inner in subcommands(name)] or [name]:
            found[full] = set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", helped(*full.split())))
    assert {"init", "work", "cluster show"} <= set(found)
    scripts = {option.spelling for option in by_name(PANELS).values()}
    for name in ("render", "submit", "scaling run"):
        found[name] |= scripts  # some are hidden
    return found


def helped(*words: str, option: str = "--help-all") -> str:
    """What ``hpctk WORDS --help-all`` prints, on a terminal wide enough to cut nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "hpc_toolkit", *words, option],
        cwd=REPOSITORY,
        env={**os.environ, "COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def subcommands(*words: str, option: str = "--help-all") -> list[str]:
    """The words that can follow."""
    text = helped(*words, option=option)
    if "COMMAND [ARGS]" not in text:
        return []
    return re.findall(r"^  ([a-z]+) {2,}\S", text.partition("\nOptions:")[0], re.MULTILINE)


def test_every_command_of_the_help_is_in_the_readme() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    shown = [
        full
        for name in subcommands(option="--help")
        for full in [f"{name} {inner}" for inner in subcommands(name, option="--help")] or [name]
    ]

    assert [name for name in shown if not re.search(rf"`hpctk {name}\b", text)] == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", *USER_DOCS])
def test_commands_and_options_of_a_document_exist(name: str, commands: dict[str, set[str]]) -> None:
    first = {command.partition(" ")[0] for command in commands}
    text = (REPOSITORY / name).read_text(encoding="utf-8")

    named = re.findall(r"(?:`|\$ |\(|^)hpctk ([a-z]+)([^`\n|)]*)", text, re.MULTILINE)

    for word, rest in named:
        assert word in first
        # Some commands have two words, such as 'hpctk lab up'.
        second = (rest.split() or [""])[0]
        known = commands.get(word) or commands.get(f"{word} {second}", set())
        if second.startswith("kubernetes-"):
            # These templates of render have options of their own.
            known = set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", helped(word, second)))
        # What follows "--" are the words of another program.
        for option in re.findall(r"(?<=\s)--[a-z-]+", rest.partition(" -- ")[0]):
            assert option in known, f"hpctk {word} has no {option}"


def test_i7_status_changes_nothing_below_the_run(tmp_path: Path) -> None:
    shell = Shell(tmp_path, tmp_path)
    (tmp_path / "items.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    shell.run("hpctk", "init", "run", "--command", "exit {a}", "--items", "items.jsonl")
    shell.run("hpctk", "work", "run")
    before = everything_below(tmp_path / "run")

    printed = shell.run("hpctk", "status", "run", "--json")

    assert json.loads(printed)["stages"]["items"]["failed"] == 2
    assert everything_below(tmp_path / "run") == before


def everything_below(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """What a reader could leave behind: names, contents, times of change, of directories too."""
    found = {}
    for path in sorted(root.rglob("*")):
        told = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (told.st_ctime_ns, told.st_size, data)
    return found


def test_hpctk_of_the_documents_is_this_checkout(tmp_path: Path) -> None:
    shell = Shell(tmp_path, tmp_path)

    where = shell.run(sys.executable, "-c", "import hpc_toolkit; print(hpc_toolkit.__file__)")

    assert Path(where.strip()).parent == PACKAGE
    assert shutil.which("hpctk", path=shell.environ["PATH"]) == str(tmp_path / "hpctk")
