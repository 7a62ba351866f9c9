"""Commands that measure how a training scales, and say what it costs."""

import typer


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
