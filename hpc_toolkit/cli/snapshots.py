"""Commands of results as files: snapshot and verify."""

import typer


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
