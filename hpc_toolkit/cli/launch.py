"""The command that starts the ranks of a training script."""

import typer


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
