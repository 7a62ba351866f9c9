"""The man page docs/hpctk.1, from the help of hpctk; ``python -m tests.manpage`` writes it."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import patch

from hpc_toolkit import __version__, cli
from tests.documents import REPOSITORY

PAGE = REPOSITORY / "docs/hpctk.1"
STATUS = {
    "0": "Success.",
    "1": "An error, which the last lines name with a hint how to fix it.",
    "2": "The command line is not valid.",
    "75": "Nothing is wrong, but work is left: run the same command again.",
}
VARIABLES = {
    "HPCTK_RUN": "The run directory if a command names none.",
    "HPCTK_CLUSTER": "The cluster if --cluster is not given: a name or a TOML file.",
}


def rendered() -> str:
    """The page. A row of the help has its name and its text two or more spaces apart."""
    group: Any = cli.load_commands()
    printed = io.StringIO()
    with patch.dict(os.environ, COLUMNS="200"), redirect_stdout(printed):
        group.main(["--help"], prog_name="hpctk", standalone_mode=False)
    usage, text, *sections = printed.getvalue().strip().split("\n\n")
    page = [f'.TH HPCTK 1 "" "hpctk {__version__}"', ".SH NAME", f"hpctk - {text.rstrip('.')}"]
    page += [".SH SYNOPSIS", ".B " + usage.removeprefix("Usage: "), ".SH COMMANDS"]
    page += ["hpctk COMMAND --help describes a command, with examples."]
    for section in sections:
        heading, *rows = section.splitlines()
        page += [f".SH {heading[:-1].upper()}" if heading == "Options:" else f".SS {heading[:-1]}"]
        page += _tagged(dict(row.strip().split("  ", 1) for row in rows))
    page += [".SH EXIT STATUS", *_tagged(STATUS), ".SH ENVIRONMENT", *_tagged(VARIABLES)]
    return "\n".join(page).replace("-", "\\-") + "\n"


def _tagged(rows: dict[str, str]) -> list[str]:
    return [line for tag, text in rows.items() for line in (".TP", f".B {tag}", text.strip())]


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
