"""A workload's ``prefetch`` beside its work: in one thread, for one group at a time."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def prefetch_of(workload: object) -> Callable[[Any], object] | None:
    """Its method ``prefetch``; None where there is none."""
    found = getattr(workload, "prefetch", None)
    return found if callable(found) else None


class Ahead:
    """Calls ``prefetch`` for the group that was named last, and nobody waits for it.

    The thread is a daemon: neither the end of a pass nor that of the process waits for a call that
    takes long or never returns. What it raises is a line in the log.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: tuple[Callable[[Any], object], Any] | None = None
        self._open = self._runs = False

    def open(self) -> None:
        """Begin to call: when a group was loaded, since two threads that import torch and the like
        for the first time may find modules half made."""
        with self._lock:
            self._open = True
            self._start()

    def name(self, workload: object, group: Any, *, loads: Any = None) -> None:
        """Have a group prefetched as soon as the call before has returned, instead of one that was
        named and not begun.

        Args:
            workload: nothing is done where it has no ``prefetch``.
            group: None if nobody knows which comes next.
            loads: the group that is loaded now, for which it is too late.
        """
        prefetch = prefetch_of(workload)
        if prefetch is None:
            return
        with self._lock:
            if group is not None:
                self._next = prefetch, group
            elif self._next is not None and self._next[1] == loads:
                self._next = None
            self._start()

    def _start(self) -> None:
        if self._runs or self._next is None or not self._open:
            return
        self._runs = True
        try:
            threading.Thread(target=self._call, name="prefetch", daemon=True).start()
        except RuntimeError as error:  # no thread can be had now
            self._runs = False
            (_, group), self._next = self._next, None
            _warn(group, error)

    def _call(self) -> None:
        while True:
            with self._lock:
                if self._next is None:
                    self._runs = False
                    return
                (prefetch, group), self._next = self._next, None
            try:
                prefetch(group)
            except BaseException as error:  # noqa: BLE001 - the boundary of the user's code
                _warn(group, error)


def _warn(group: Any, error: BaseException) -> None:
    said = f"{type(error).__name__}: {error}".replace("\n", " ")
    sys.stderr.write(f"hpctk: {group!r:.200} is not prefetched: {said:.300}\n")
