"""The commands that submit jobs, follow and cancel them, called in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from hpc_toolkit.cli import reading, statusview
from hpc_toolkit.cli import submit as submit_commands
from hpc_toolkit.cli.help import Commands
from hpc_toolkit.errors import HpcToolkitError


def call(*arguments: str) -> Result:
    app = Commands(help="")
    statusview.register(app)
    reading.register(app)
    submit_commands.register(app)
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> HpcToolkitError:
    """The error with which a command ended."""
    error = call(*arguments).exception
    assert isinstance(error, HpcToolkitError), repr(error)
    return error
