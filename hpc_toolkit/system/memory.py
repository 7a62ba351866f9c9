"""Out of memory, CUDA's or the host's: told apart, and answered by the workload."""

from __future__ import annotations

import sys
import traceback
from typing import Any

TRIES = 8
"""How often in a row one item is run again after its workload made it smaller."""


_OF_THE_HOST = "DefaultCPUAllocator: "
"""With it torch begins to say, by a plain RuntimeError, that it got no memory of the host."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: ``MemoryError``, or torch's errors, known by a name and a text."""
    names = {known.__name__ for known in type(error).__mro__}
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names:
        return True
    return isinstance(error, RuntimeError) and _OF_THE_HOST in str(error)


class Shrinking:
    """Asks one workload for less, a bounded number of times for each item."""

    def __init__(self, workload: object) -> None:
        self._on_oom = getattr(workload, "on_oom", None)
        self._index = -1
        self._tries = 0
        self.context: Any = None
        """With what to run the items again, after an :meth:`ask` that gave None."""

    def ask(
        self, error: BaseException, context: Any, items: list[dict[str, Any]], index: int
    ) -> BaseException | None:
        """What to report as the failure, or None if the items should be run again, smaller.

        Args:
            error: what ended the items.
            context: theirs; None where it was being loaded.
            items: those that were taken and have no result, at least one.
            index: of the first of them in the pass; each item has its own number of tries.
        """
        if index != self._index:
            self._index, self._tries = index, 0
        while self._on_oom is not None and is_out_of_memory(error) and self._tries < TRIES:
            self._tries += 1
            _free_frames(error)
            try:
                answer = self._on_oom(context, items)
            except Exception as another:  # noqa: BLE001 - the boundary of the user's code
                error = another
                continue
            if answer is None or answer is False:
                return error
            text = f"hpctk: {error!s:.200}; again, smaller ({self._tries} of {TRIES})\n"
            sys.stderr.write(text)
            self.context = context if answer is True else answer
            return None
        return error


def _free_frames(error: BaseException) -> None:
    """Drop the local variables of the calls that failed: they hold the memory that is missing."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
