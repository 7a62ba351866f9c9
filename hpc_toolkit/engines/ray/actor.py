"""The code of a Ray actor: it starts one rank's process, waits for it and passes signals on.

This module does not import ray; :mod:`hpc_toolkit.engines.ray.cluster` makes an actor of the class.
Its methods run concurrently, in Ray's threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_toolkit.engines.ray.rank import Order
from hpc_toolkit.system.ranks import host_name
from hpc_toolkit.worker.worker import EXIT_LEFT

CONCURRENCY = 3
"""Concurrent calls: one waits for the end, one for the start, and one passes on a signal."""
_STDERR = 2


class RankActor:
    """One rank of a run."""

    def __init__(self, order: str) -> None:
        self._order = Order.from_json(order)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._told: list[int] = []

    def run(self) -> dict[str, Any]:
        """Start the rank's process and wait until it has ended.

        Returns:
            Its exit ``code``, negative for a signal, and the ``error`` that it reported, or None.
        """
        read_fd, write_fd = os.pipe()
        try:
            missing = self._missing()
            if missing:
                return {"code": 1, "error": missing}
            with self._lock:
                if self._told:
                    return {"code": EXIT_LEFT, "error": None}
                self._child = subprocess.Popen(
                    self._order.argv(write_fd),
                    cwd=self._order.cwd,
                    env=self._order.environment(os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=_STDERR,
                    pass_fds=(write_fd,),
                    # A terminal's ^C must reach only the driver, which passes it on once.
                    process_group=0,
                )
            os.close(write_fd)
            write_fd = -1
            self._started.set()
            code = self._child.wait()
            return {"code": code, "error": _report(read_fd)}
        finally:
            self._started.set()
            os.close(read_fd)
            if write_fd >= 0:
                os.close(write_fd)

    def identity(self) -> tuple[str, int]:
        """Wait for the worker's start and return its host and PID; the PID is 0 without a start."""
        self._started.wait()
        return host_name(), self._child.pid if self._child is not None else 0

    def tell(self, number: int) -> None:
        """Pass a signal on to the worker; a signal before its start prevents the start."""
        with self._lock:
            self._told.append(number)
            if self._child is not None:
                with suppress(ProcessLookupError):
                    self._child.send_signal(number)

    def _missing(self) -> dict[str, Any] | None:
        for directory in (self._order.root, self._order.cwd):
            if not Path(directory).is_dir():
                message = f"{host_name()}, a node of the Ray cluster, has no directory {directory}"
                hint = "a run must be on a filesystem that all nodes share"
                return {"message": message, "hint": hint, "code": 1}
        return None


def _report(fd: int) -> dict[str, Any] | None:
    """Return the error that the ended process wrote to the pipe, or None; never waits."""
    os.set_blocking(fd, False)
    with suppress(BlockingIOError, ValueError):
        found: dict[str, Any] = json.loads(os.read(fd, 4096) or b"{}")
        return found or None
    return None
