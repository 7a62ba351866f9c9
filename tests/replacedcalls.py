"""Functions of :mod:`os` that a test replaces for a while."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Callable


class ReplacedCalls:
    """While inside, each function that ``CALLS`` names is what :meth:`wrap` makes of it."""

    CALLS: ClassVar[tuple[str, ...]]

    def __enter__(self) -> Self:
        self._real = {name: getattr(os, name) for name in self.CALLS}
        for name, real in self._real.items():
            setattr(os, name, self.wrap(name, real))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in the place of ``real``."""
        raise NotImplementedError
