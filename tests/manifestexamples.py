"""The manifests in docs/how-to/manifests; ``python -m tests.manifestexamples`` renders them."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.unit.jobcommands import call

EXAMPLES = sorted((Path(__file__).parents[1] / "docs/how-to/manifests").iterdir())


def rendered_again(path: Path) -> str:
    """What the command in the first lines of a manifest prints."""
    line = path.read_text(encoding="ascii").splitlines()[2]
    argv = shlex.split(line.removeprefix("#"))
    end = argv.index("--") if "--" in argv else len(argv)
    return call("render", *argv[2:end], "-o", "-", *argv[end:]).stdout


if __name__ == "__main__":
    for example in EXAMPLES:
        example.write_text(rendered_again(example), encoding="ascii")
