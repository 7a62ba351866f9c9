"""The command that writes an example project: new."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import click

from hpc_toolkit.cli.arguments import argument, value
from hpc_toolkit.cli.help import LIST, Commands, HelpCommand
from hpc_toolkit.rundir.examples import EXAMPLES, write_example


class _NewCommand(HelpCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the examples where NAME is missing."""
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as missing:
            rows = [f"\n  hpctk new NAME --example {one:8}  {EXAMPLES[one]}" for one in EXAMPLES]
            examples = f"Examples:{''.join(rows)}"
            raise click.MissingParameter(examples, ctx, missing.param) from None


def register(app: Commands) -> None:
    app.add(new, name="new", cls=_NewCommand, panel=LIST)


def new(
    name: Annotated[str, argument("NAME", "Directory to create.")],
    example: Annotated[str, value("|".join(EXAMPLES), "Example to write.")] = "list",
) -> None:
    """Create a directory with an example to run and change.

    Its README.md shows the commands, here and on Slurm.

    Examples:
        hpctk new first
        hpctk new search --example campaign
    """
    commands = write_example(Path(name), example)
    print(name, flush=True)
    for command in (f"cd {shlex.quote(name)}", *commands):
        print(f"  {command}", file=sys.stderr)
