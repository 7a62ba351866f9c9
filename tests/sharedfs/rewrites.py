"""One host's side of files that are rewritten in place, by the package's own writers and readers.

    python -m tests.sharedfs.rewrites write presence|head DIRECTORY
    python -m tests.sharedfs.rewrites read presence|head DIRECTORY

Each says ``ready``. The writer rewrites its file as often as a line of its input says, as fast as
it can, and answers with the last number that it wrote. The reader looks all the time; for a line,
which is a number and a limit in seconds, it says after how many seconds it saw that number, or
``stale``.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.presence import Presence, PresenceFile, read_presence
from hpc_toolkit.rundir.layout import StagePaths

_PAUSE_S = 0.002


class Beats:
    """A worker's presence."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "presence.json"

    def make(self) -> None:
        presence = Presence(worker="w", host="h", boot="b", pid=1, rank=0, job=None)
        self._file = PresenceFile(self._path, presence)

    def write(self, number: int) -> None:
        self._file.update(done=number)

    def read(self) -> int:
        presence = read_presence(self._path)
        return 0 if presence is None else presence.done


class Heads:
    """A stage's log, whose ``head`` says how many entries it has."""

    def __init__(self, directory: Path) -> None:
        self._paths = StagePaths(directory / "stage")

    def make(self) -> None:
        self._paths.make()
        self._log = StageLog(self._paths)
        # The first entry creates the file: a name that is looked for before may stay missing.
        self.write(0)

    def write(self, number: int) -> None:
        assert self._log.append(f"items/{number}.jsonl")
        self._log.length += 1

    def read(self) -> int:
        return StageLog(self._paths).hint() - 1


Rewritten = Beats | Heads
"""A file that one process rewrites and others read: its newest number, below 1 if none is seen."""
KINDS: dict[str, type[Rewritten]] = {"presence": Beats, "head": Heads}


def write(file: Rewritten) -> None:
    file.make()
    print("ready", flush=True)
    number = 0
    for line in sys.stdin:
        for _ in range(int(line)):
            number += 1
            file.write(number)
        print(number, flush=True)


def read(file: Rewritten) -> None:
    seen = file.read()

    def look() -> None:
        nonlocal seen
        while True:
            seen = file.read()
            time.sleep(_PAUSE_S)

    threading.Thread(target=look, daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        words, began = line.split(), time.monotonic()
        number, limit_s = int(words[0]), float(words[1])
        while seen < number and time.monotonic() - began < limit_s:
            time.sleep(_PAUSE_S)
        print("stale" if seen < number else f"{time.monotonic() - began:.3f}", flush=True)


if __name__ == "__main__":
    what, kind, where = sys.argv[1:]
    {"write": write, "read": read}[what](KINDS[kind](Path(where)))
