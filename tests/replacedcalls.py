"""Temporarily replaces functions of :mod:`os` in a test."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar, Self


class ReplacedCalls:
    """Inside the block, replaces each function in ``CALLS`` by the result of :meth:`wrap`."""

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
        """Return the function to call instead of ``real``."""
        raise NotImplementedError
