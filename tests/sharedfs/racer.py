"""One host's side of a race for names; it is told when to begin and up to where to look.

    python -m tests.sharedfs.racer DIRECTORY OWN SECONDS

Says ``ready``, and on a line of its input races; what came of it is a line of JSON. On the next
line, a number, it says what it reads of so many names.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_toolkit.rundir import files


def race(directory: Path, own: str, seconds: float) -> dict[str, Any]:
    """Create names in one order, as the other side does; who loses one jumps ahead to meet again.

    Gives the owner that each name has by ``create_name`` (None where it refused the name and nobody
    has it), and how many names were asked for more than once.
    """
    asked = 0
    symlink = os.symlink

    def counted(*words: Any) -> None:
        nonlocal asked
        asked += 1
        symlink(*words)

    os.symlink = counted  # type: ignore[assignment]
    owners: dict[int, str | None] = {}
    index, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        owners[index] = None
        with suppress(FileNotFoundError):
            owners[index] = files.create_name(directory / str(index), own)
        index += 1 if owners[index] == own else random.randint(1, 3)
    return {"owners": owners, "again": asked - len(owners), "end": index}


def look(directory: Path, number: int) -> list[str | None]:
    """The owner of each name, None where there is none."""
    found: list[str | None] = []
    for index in range(number):
        owner = None
        with suppress(FileNotFoundError):
            owner = os.readlink(directory / str(index))
        found.append(owner)
    return found


def main() -> None:
    directory, own, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(race(directory, own, seconds)), flush=True)
    print(json.dumps(look(directory, int(sys.stdin.readline()))), flush=True)


if __name__ == "__main__":
    main()
