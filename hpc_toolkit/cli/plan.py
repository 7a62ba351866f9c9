"""The command that says what the rest of a run would take."""

import typer


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
