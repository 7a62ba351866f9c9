"""What fails in a long benchmark is a row of its table, and the other rows are measured."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_SHOWN = 200
"""Characters of what was seen."""


@dataclass(frozen=True)
class Failure:
    """What was seen instead of an outcome."""

    seen: str
    """In one line."""

    @classmethod
    def of(cls, error: Exception, title: str) -> Failure:
        """Say on the terminal all that was seen."""
        print(f"{title}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        words = " ".join(str(error).replace("|", "/").split())
        return cls(f"failed: {words[:_SHOWN] or type(error).__name__}")


T = TypeVar("T")


def tried(title: str, play: Callable[[], T]) -> T | Failure:
    """What something came to; whatever happens to it, the other rows are worth having."""
    try:
        return play()
    except Exception as error:  # noqa: BLE001 - see above
        return Failure.of(error, title)
