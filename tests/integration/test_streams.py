"""Commands whose standard streams, encoding or current directory are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import Hpctk, journal_lines

PYTHON = (sys.executable, "-m", "hpc_toolkit")


def redirected(
    hpctk: Hpctk, how: str, *words: str, program: Sequence[str] = PYTHON
) -> subprocess.CompletedProcess[str]:
    """Start a program from bash with redirections such as ``2>&-``."""
    argv = ["/bin/bash", "-c", f'set -o pipefail; "$@" {how}', "bash", *program, *words]
    return subprocess.run(
        argv, env=hpctk.environment(), capture_output=True, text=True, check=False
    )


CLOSED = [">&-", "2>&-", "<&-", ">&- 2>&- <&-"]


@pytest.mark.parametrize("closed", CLOSED)
def test_work_with_closed_streams_completes_and_no_file_of_the_run_takes_their_number(
    hpctk: Hpctk, closed: str
) -> None:
    command = "echo out {id}; echo err >&2; ls -l /proc/$PPID/fd/[012] /proc/$$/fd/[012]"
    run = hpctk.make([{}] * 3, None, command=command)

    ended = redirected(hpctk, closed, "work", "run", "--workers", "2")

    assert ended.returncode == 0, ended.stderr
    assert run.status().complete
    assert [line["item"] for line in journal_lines(run, "done")] != []
    text = "".join(path.read_text() for path in run.paths.journals.iterdir())
    assert all(isinstance(json.loads(line), dict) for line in text.splitlines())
    log = "".join(path.read_text() for path in run.paths.logs.iterdir())
    assert log.count("out ") == log.count("err\n") == 3
    assert ".jsonl" not in log


@pytest.mark.parametrize("closed", [">&-", "2>&- <&-"])
def test_commands_with_closed_streams_do_their_work(hpctk: Hpctk, closed: str) -> None:
    hpctk.worked([{}], None, command="echo said")

    for words in (
        ("status", "run"),
        ("explain", "run", "--item", "0"),
        ("logs", "run"),
        ("gather", "run", "-o", "-"),
        ("try", "run"),
        ("init", "new", "--command", "true", "--count", "2"),
    ):
        ended = redirected(hpctk, closed, *words)
        assert ended.returncode == 0, (words, ended.stderr)
        assert bool(ended.stdout) == (">&-" not in closed.split()), words
    assert Run.open("new").status().stages["items"].pending == 2


@pytest.mark.parametrize("encoding", ["latin-1", "ascii:surrogateescape"])
def test_commands_escape_what_the_encoding_of_the_output_lacks(hpctk: Hpctk, encoding: str) -> None:
    command = 'echo → ü; [ {n} = "漢 ü" ]'
    hpctk.worked([{"n": "漢 ü"}, {"n": "→"}], None, command=command, max_attempts=1)

    def said(*words: str) -> str:
        program = ("env", f"PYTHONIOENCODING={encoding}", *PYTHON)
        ended = redirected(hpctk, "2>&1 | iconv -c -f utf-8 -t utf-8", *words, program=program)
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    assert r'"\u6f22 ' in said("explain", "run", "--item", "0")
    assert r"its output ends with: \u2192" in said("explain", "run", "--item", "1")
    assert r"\u2192" in said("status", "run")
    assert "→ ü\n" in said("logs", "run", "--item", "0")
    assert r'"n":"\u2192"' in said("gather", "run", "-o", "-")
    assert said("try", "run", "--item", "0").endswith("}\n")


@pytest.mark.parametrize("moved", [False, True], ids=["removed", "moved"])
def test_commands_in_a_directory_that_is_gone_work_or_say_so(hpctk: Hpctk, *, moved: bool) -> None:
    run = hpctk.make([{}] * 2, "sample_workloads:break_output")
    root = str(run.root.absolute())
    Path("gone").mkdir()
    leave = "mv ../gone ../moved" if moved else "rmdir ../gone"

    def inside(*words: str) -> subprocess.CompletedProcess[str]:
        Path("gone").mkdir(exist_ok=True)
        first = f"cd gone && {leave} && exec "
        argv = ["/bin/bash", "-c", f'{first} "$@"', "bash", *PYTHON, *words]
        ended = subprocess.run(
            argv, env=hpctk.environment(), capture_output=True, text=True, check=False
        )
        if moved:
            Path("moved").rmdir()
        return ended

    for words in (
        ("status", root),
        ("try", root),
        ("work", root, "--workers", "2"),
        ("explain", root, "--item", "0"),
        ("logs", root),
        ("gather", root, "-o", "-"),
    ):
        ended = inside(*words)
        assert ended.returncode == 0, (words, ended.stderr)
    assert run.status().complete
    new = inside("init", f"{root}-2", "--command", "true", "--count", "2")
    if moved:
        assert new.returncode == 0, new.stderr
        return
    assert new.returncode == 1
    assert new.stderr == (
        "error: the current directory: No such file or directory\n"
        "hint: change to a directory that exists\n"
    )
