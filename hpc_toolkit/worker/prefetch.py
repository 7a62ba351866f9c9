"""Prefetch: call a workload's ``prefetch`` in one thread, for one group at a time."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def prefetch_of(workload: object) -> Callable[[Any], object] | None:
    """The workload's ``prefetch`` method; None if it has none."""
    found = getattr(workload, "prefetch", None)
    return found if callable(found) else None


class Prefetch:
    """Calls ``prefetch`` for the group that was named last; nothing waits for it.

    The thread is a daemon: neither the end of a request nor the end of the process waits for a call
    that takes long or never returns. An exception becomes a line in the log.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: tuple[Callable[[Any], object], Any] | None = None
        self._open = self._runs = False

    def open(self) -> None:
        """Allow calls; to be called once a group is loaded.

        Two threads that import torch or the like for the first time may find a half-initialized
        module.
        """
        with self._lock:
            self._open = True
            self._start()

    def name(self, workload: object, group: Any, *, loads: Any = None) -> None:
        """Name the group to prefetch once the running call has returned.

        It replaces a group that was named and not begun.

        Args:
            workload: nothing is done if it has no ``prefetch``.
            group: None if the next group is not known.
            loads: the group that is being loaded now, for which a prefetch is too late.
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
        except RuntimeError as error:  # no thread can be started now
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
