"""Commands that are called in this process."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

from hpc_toolkit.cli import load_commands
from hpc_toolkit.errors import HpcToolkitError


def call(*words: object, **settings: Any) -> Result:
    return CliRunner().invoke(load_commands(str(words[0])), [*map(str, words)], **settings)


def refused(*words: object, **settings: Any) -> HpcToolkitError:
    """The error with which a command ended."""
    error = call(*words, **settings).exception
    assert isinstance(error, HpcToolkitError), repr(error)
    return error
