"""Writes example projects: code, items or a campaign, and a README.md with commands that run."""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError, RunError, near_miss
from hpc_toolkit.rundir import files

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = {
    "list": "call a function for each item of a list",
    "campaign": "search for the best of many models",
    "training": "train on several ranks, and resume (needs torch)",
    "notebook": "start workers from a notebook (needs Jupyter)",
}
"""The examples by name; the files of each are in ``examples/new`` of the repository."""

_NAME = re.compile(r"\w[\w.-]*")
_IGNORED = b"/runs/\n/slurm/\n/results.*\n__pycache__/\n.ipynb_checkpoints/\n"


def write_example(path: Path, example: str) -> list[str]:
    """Create a directory with an example, completely or not at all.

    Returns the commands to run there first, as its README.md shows them. Raises ConfigError for an
    invalid name and an unknown example, and RunError if the directory exists or cannot be made.
    """
    if not _NAME.fullmatch(path.name) or not str(path).isprintable():
        message = f"{str(path)!r} cannot be the name of a new directory"
        hint = "use letters, digits, '.', '_' and '-', and begin with a letter or a digit"
        raise ConfigError(message, hint=hint)
    if example not in EXAMPLES:
        message = f"there is no example {example!r}"
        raise ConfigError(message, hint=near_miss(example, list(EXAMPLES)))
    exists = RunError(f"{path} exists", hint="use another name; only an empty directory is filled")
    source = resources.files("hpc_toolkit.rundir") / "data" / "examples" / example
    with files.new_directory(path, exists=exists) as staging:
        for file in source.iterdir():
            if file.is_file():  # Python may have compiled the code, into a directory
                files.write_new(staging / file.name, [file.read_bytes()])
        files.write_new(staging / ".gitignore", [_IGNORED])
    readme = (source / "README.md").read_text(encoding="utf-8")
    block = readme.partition("```console\n")[2].partition("```")[0]
    return [line[2:] for line in block.splitlines() if line.startswith("$ ")]
