"""Arguments of the benchmarks: ``--help`` is what a script says of itself, and nonsense is refused.

Also imported where this project is not installed.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

# Some rehearse on the hosts of the tests, which are not installed.
sys.path.append(str(Path(__file__).parent.parent))


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        # What is off, or nothing, goes without saying.
        return super()._get_help_string(action) if action.default else action.help


def parser(doc: str | None) -> argparse.ArgumentParser:
    """For a script with this docstring; defaults are shown beside each option's help."""
    return argparse.ArgumentParser(description=doc, formatter_class=_Formatter)


def number(text: str) -> int:
    """A number of things, at least one."""
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    message = f"{text!r} is not a whole number above 0"
    raise argparse.ArgumentTypeError(message)


def number_or_none(text: str) -> int:
    """A number of things, or 0."""
    return 0 if text == "0" else number(text)


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if 0 < found < math.inf:
        return found
    message = f"{text!r} is not a number of seconds above 0"
    raise argparse.ArgumentTypeError(message)


def directory(text: str) -> str:
    """A directory that is there."""
    if Path(text).is_dir():
        return text
    message = f"there is no directory {text!r}"
    raise argparse.ArgumentTypeError(message)
