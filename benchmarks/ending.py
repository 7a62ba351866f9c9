"""Ends what a benchmark started, also when it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tracefile import send

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIMIT_S = 60.0


def children(pid: int) -> list[int]:
    """Processes that a process started and that run."""
    with suppress(OSError):
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def family(pid: int) -> list[int]:
    """A process, those that it started, those that these started, and so on."""
    found = [pid]
    for one in found:
        found += children(one)
    return found


def end(*processes: subprocess.Popen[bytes], limit_s: float = _LIMIT_S) -> None:
    """Ask processes to leave, wake whom they wait for, and kill the families that do not go."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
            send(signal.SIGCONT, *family(process.pid))
    for process in processes:
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            send(signal.SIGKILL, *family(process.pid))
            process.wait()


def interrupted() -> NoReturn:
    """Leave at once when hosts and mounts are gone: threads may wait long for what went with
    them."""
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)


@contextmanager
def ended(*processes: subprocess.Popen[bytes]) -> Iterator[None]:
    """None of them is left behind, whatever happens inside."""
    try:
        yield
    finally:
        end(*processes)
