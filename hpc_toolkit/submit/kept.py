"""What was requested of jobs that are kept in the queue, and whose turn it is to submit some.

``jobs/keep-NAME.json`` is what a user requested; only the user's own commands write it. Only the
process whose turn it is submits jobs of this name, and then writes ``keep-NAME.state``. The turn is
a name that one process can create, ``keep-NAME.7``. It ends when the state has its number.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.rundir.trust import share
from hpc_toolkit.system.ranks import boot_id, host_name, process_ticks

FORMAT = 1
_LONGEST_TURN_S = 600.0
"""After this time the process that has the turn counts as lost; sbatch is tried for 120 s."""


class Kept:
    """The files of the kept jobs of one name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = path.with_suffix(".state")
        self._turn = 0

    def read(self) -> dict[str, Any]:
        """What was requested, with the state; {} if nothing was, or it cannot be read.

        ``ended``: why no more jobs are sent; ``turn``: the last turn that has ended; ``failed``:
        how many submissions in a row failed; ``sent``: jobs that may be in the queue.
        """
        request, state = _read(self.path), _read(self._state)
        if request.get("format") != FORMAT or "ended" not in request:
            return {}
        if state.get("started") != request.get("started"):  # of an earlier request
            state = {key: state[key] for key in ("turn", "sent") if key in state}
        ended = request["ended"] or state.get("ended", "")
        return {"turn": 0, "failed": 0, "sent": [], **state, **request, "ended": ended}

    def request(self, **facts: Any) -> None:
        """Write what a user requests."""
        self.path.parent.mkdir(exist_ok=True)
        share(self.path.parent)
        _write(self.path, {"format": FORMAT, **_read(self.path), **facts})

    def take_turn(self) -> bool:
        """Begin a turn, which :meth:`end_turn` ends; False if another process has it."""
        this = os.getpid()
        own = f"{host_name()}:{boot_id()}:{this}:{process_ticks(this)}:{os.urandom(4).hex()}"
        number = int(self.read().get("turn", 0))
        while True:
            number += 1
            name = self.path.with_suffix(f".{number}")
            holder = files.create_name(name, own)
            if holder == own:
                self._turn = number
                return True
            if not self._is_lost(name, holder):
                return False

    def end_turn(self, **state: Any) -> None:
        """Write what came of the turn, and let others have the next one."""
        _write(self._state, {**state, "turn": self._turn})

    def _is_lost(self, name: Path, holder: str) -> bool:
        """Whether the process that has a turn, or had it, is not going to submit any more."""
        *where, pid, ticks, _ = holder.split(":")
        if where == [host_name(), boot_id()]:
            return process_ticks(int(pid)) != int(ticks)
        os.utime(self.path)  # both times are those of the file server
        return self.path.stat().st_mtime - name.lstat().st_mtime > _LONGEST_TURN_S


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(files.read_fresh(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, record: dict[str, Any]) -> None:
    files.replace_file(path, [json.dumps(record).encode() + b"\n"])


def kept_jobs(paths: RunPaths) -> list[tuple[Kept, dict[str, Any]]]:
    """What is kept for a run, by name, each with what :meth:`Kept.read` returns."""
    names = sorted(files.list_names(paths.jobs))
    found = [
        Kept(paths.jobs / name)
        for name in names
        if name.startswith("keep-") and name.endswith(".json")
    ]
    return [(one, record) for one in found if (record := one.read())]
