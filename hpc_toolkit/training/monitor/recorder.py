"""Write samples to a file from a thread that runs beside the work."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.rundir import files
from hpc_toolkit.training.monitor.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable

LEAST_INTERVAL_S = 0.05
"""Shortest interval: more frequent samples cost more than they tell."""


class Monitor:
    """``with Monitor(path): ...`` appends samples to ``path`` until the block ends.

    A line is one JSON object: a header, then a sample every ``interval_s`` and one at the end (see
    :class:`hpc_toolkit.training.monitor.sampler.Sampler`). An existing file is appended to, and
    each start writes a header. Only one process may write to a file. A failed write ends the
    monitor but not the work; ``error`` then has the reason.

    A process that forks must use :func:`hpc_toolkit.training.monitor.watching`: this is a thread.

    Args:
        path: the file; its directory must exist.
        interval_s: seconds between samples.
        sampler: reads the values; by default of this host, and of this process with descendants.

    Raises:
        ConfigError: psutil or pynvml is not installed, or the interval is too short.
    """

    def __init__(
        self, path: str | Path, interval_s: float = 1.0, *, sampler: Sampler | None = None
    ) -> None:
        check_interval(interval_s)
        self.path = Path(path)
        self.error = ""
        self._interval_s = interval_s
        self._sampler = sampler if sampler is not None else Sampler()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> Self:
        """Begin to sample."""
        if self._sampler.no_gpus:
            sys.stderr.write(f"note: the monitor samples no GPUs: {self._sampler.no_gpus}\n")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the last sample."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            record(self._sampler, self.path, self._interval_s, self._ends.wait)
        except OSError as error:
            self.error = f"{self.path}: {error.strerror}"
            sys.stderr.write(f"warning: the monitor stopped: {self.error}\n")


def check_interval(interval_s: float) -> None:
    """Reject an invalid interval.

    Raises:
        ConfigError: the interval is too short, infinite or NaN.
    """
    if not LEAST_INTERVAL_S <= interval_s < float("inf"):
        message = f"the monitor's interval must be at least {LEAST_INTERVAL_S} s, got {interval_s}"
        raise ConfigError(message, hint="1 s is usual")


def record(
    sampler: Sampler, path: Path, interval_s: float, ends: Callable[[float], object]
) -> None:
    """Append a header and samples until ``ends`` returns true; it waits for a number of seconds.

    Raises:
        OSError: a line could not be written.
    """
    fd = files.open_or_create(path, os.O_WRONLY | os.O_APPEND)
    try:
        _append(fd, sampler.header(interval_s))
        began = last = time.monotonic()
        count, over = 0, False
        while not over:
            # Count intervals from the start, so that samples do not drift; skip missed ones.
            passed = (time.monotonic() - began) // interval_s
            over = bool(ends(max(0.0, began + (passed + 1) * interval_s - time.monotonic())))
            # A CPU percentage over a very short time means nothing.
            if count and over and time.monotonic() - last < 0.1 * interval_s:
                break
            _append(fd, sampler.sample())
            last, count = time.monotonic(), count + 1
    finally:
        os.close(fd)
        sampler.close()


def _append(fd: int, line: dict[str, Any]) -> None:
    files.write_all(fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")
