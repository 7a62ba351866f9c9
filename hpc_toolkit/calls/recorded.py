"""The calls that a run has: recorded results, the code that made them, and calls that are left.

Also the scripts that use the run, because calls of earlier code end only if no script needs them.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.items import Item, canonical
from hpc_toolkit.queue.leases import DEFAULT_LEASE_S
from hpc_toolkit.queue.units import Claims
from hpc_toolkit.results.explain import unit_items
from hpc_toolkit.rundir.files import list_names, read_fresh, share, write_new
from hpc_toolkit.rundir.journal import encode_line, release_line
from hpc_toolkit.rundir.layout import WITHDRAWN, RunPaths, StagePaths
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.ranks import RankInfo, boot_id, host_name, process_ticks
from hpc_toolkit.system.terminal import note
from hpc_toolkit.worker.calls import CODE, FUNCTION
from hpc_toolkit.worker.membership import Counts, Membership, new_name

if TYPE_CHECKING:
    from hpc_toolkit.calls import Call
    from hpc_toolkit.run import Run

Place = tuple[str, int]
"""The unit of a call, and its position."""


class Recorded:
    """The calls of a run: results with the code that made them, and where the other calls are."""

    def __init__(self, run: Run, on_change: str, shown: Path) -> None:
        """``shown``: the directory of the run as its user named it."""
        if on_change not in ("rerun", "keep", "error"):
            raise ConfigError(f"on_change must be rerun, keep or error, got {on_change!r}")
        (self._stage,) = run.view.stages.values()
        self._view, self._entries = run.view, 0
        self.rows: dict[bytes, dict[str, Any]] = {}
        self.places: dict[bytes, Place] = {}
        """Of calls that are not finished, or were added since."""
        self._root, self._on_change = shown, on_change
        self.compares_code = on_change != "keep"
        self._noted: set[tuple[str, str]] = set()
        self._codes: dict[Any, Counter[Any]] = {}
        """Name of a function -> how many results there are of each code of it; the same for a call
        that reaches other code."""
        self.withdrawn = Counter[bytes]()
        for row in run.table(partial=True):
            item = row["item"]
            if row["worker"].startswith(WITHDRAWN):
                self.withdrawn[self.key(item)] += 1
                continue
            self.rows[self.key(item)] = row
            for what, code in _codes_of(item):
                self._codes.setdefault(what, Counter())[code] += 1
        self._left: dict[str, dict[str, dict[bytes, Place]]] = {}
        """Function -> its code -> calls that were pending when this executor began."""
        self.obsolete: set[str] = set()
        """Functions of which calls are left whose code is another one now."""
        self.find(only=self._stage.state.open)

    def find(self, only: Iterable[str] | None = None) -> None:
        """Find the places of calls in segments that were added, also by other processes."""
        for entry, segment in self._stage.log.segments.items():
            units = segment.units if entry > self._entries else ()
            for unit in (one for one in units if only is None or one.name in only):
                left = () if only is None else {*self._stage.state.pending(unit.name)}
                items = unit_items(self._stage, unit)
                for position, item in zip(unit.items, items, strict=True):
                    key = self.key(item)
                    self.places[key] = place = unit.name, position
                    code = code_of(item)
                    if position in left and code and self.compares_code and not is_lambda(item):
                        codes = self._left.setdefault(item["function"], {})
                        codes.setdefault(code, {})[key] = place
        self._entries = self._stage.log.length

    def replaces(self, item: Item) -> bool:
        """Whether there are obsolete calls now: of the function of this one, with other code."""
        if (codes := self._left.get(item["function"])) is not None:
            codes.pop(code_of(item), None)
            self.obsolete.add(item["function"])
        return bool(self.obsolete)

    def withdraw(self, presence: Presence, lock: AbstractContextManager[Any]) -> None:
        """Fail obsolete calls that were not started, unless another script may wait for them."""
        with lock:
            changed, self.obsolete = self.obsolete, set()
            taken = {name: self._left.pop(name) for name in changed}
        for name, codes in taken.items() if presence.is_alone() else ():
            left = {place: key for places in codes.values() for key, place in places.items()}
            ended = withdraw(self._view.paths, self._stage.paths, left)
            with lock:
                for place in ended:
                    self.withdrawn[left[place]] += 1
                    del self.places[left[place]]
            if ended:
                what = f"{counted(len(ended), 'call')} of the code before were not started"
                note(f"{name} changed: {what}, and do not run")
                self._view.poll()

    def key(self, item: Item) -> bytes:
        return key_of(item, code=self.compares_code)

    def notice(self, call: Call) -> None:
        """Say, once, that calls run again because the code of their function changed.

        Raises ConfigError: it changed, and must not.
        """
        name = call.item["function"]
        for what, code in _codes_of(call.item) if self.compares_code else ():
            known = self._codes.get(what)
            # Several functions may be called <lambda>: none of them is another one that changed.
            if not known or code in known or (what == name and is_lambda(call.item)):
                continue
            if self._on_change == "error":
                message = f"the code of {name} changed since {self._root} has calls of it"
                hint = "use another directory, or on_change='rerun' or 'keep'"
                raise ConfigError(message, hint=hint)
            said = f"its calls run again; {counted(known.total(), 'result')} of the code before"
            if what != name:
                said = "calls with it run again; results of the code before"
            known[code] = 0
            if (name, code) not in self._noted:
                self._noted.add((name, code))
                changed = name if what == name else f"code in what {name} holds or is given"
                note(f"{changed} changed: {said} stay in {self._root}")


def _codes_of(item: Item) -> Iterator[tuple[Any, str]]:
    """What has code in a call, and the fingerprint of that code."""
    yield item["function"], code_of(item)
    if code := code_of(item, CODE):
        yield key_of(item, code=False), code


def code_of(item: Item, place: str = FUNCTION) -> str:
    """The fingerprint of a call's function; "" if it is part of an installed package."""
    return str(item.get("stored", {"same": {}})["same"].get(place, ""))


def is_lambda(item: Item) -> bool:
    """Whether a call's function has a name that many functions have."""
    return str(item["function"]).endswith("<lambda>")


def key_of(item: Item, *, code: bool = True) -> bytes:
    """Bytes that are equal iff two items are the same call; ``code``: of the same code."""
    kept = item.get("stored")
    if kept is None:
        return canonical(item)
    same, types = kept["same"], kept.get("types", {})
    left_out = () if code else (CODE,) if is_lambda(item) else (CODE, FUNCTION)
    known = {place: one for place, one in same.items() if place not in left_out}
    # Not where a part is stored.
    kinds = {at: [tag[0], *tag[4:]] if at in same else tag for at, tag in types.items()}
    return canonical({**item, "stored": [known, kinds]})


BEAT_S = 30.0
_SILENT_S = 4 * BEAT_S
_SUFFIX = ".script"


class Presence:
    """The file that shows that an executor of this process uses a run."""

    def __init__(self, calls: Path) -> None:
        self._path = calls / f"{os.urandom(8).hex()}{_SUFFIX}"
        self._beat_at = float("-inf")

    def beat(self) -> None:
        """Create the file, or set its time again; to be called at least every 30 s."""
        now = time.monotonic()
        if now < self._beat_at + BEAT_S / 2:
            return
        if self._beat_at < 0:
            self._path.parent.mkdir(exist_ok=True)
            share(self._path.parent)
            one = [host_name(), boot_id(), os.getpid(), process_ticks(os.getpid())]
            write_new(self._path, [json.dumps(one).encode()])
        os.utime(self._path)
        self._beat_at = now

    def is_alone(self) -> bool:
        """Whether no other executor seems to use the run."""
        os.utime(self._path)
        # Of both files the time is the file server's.
        now, own = self._path.stat().st_mtime, [host_name(), boot_id()]
        for path in (self._path.parent / name for name in list_names(self._path.parent)):
            if path.suffix == _SUFFIX and path != self._path:
                with suppress(OSError, ValueError):
                    *where, pid, ticks = json.loads(read_fresh(path))
                    silent_s = now - path.stat().st_mtime
                    lives = process_ticks(pid) == ticks if where == own else silent_s < _SILENT_S
                    if lives:
                        return False
        return True

    def leave(self) -> None:
        with suppress(OSError):
            self._path.unlink()


def withdraw(
    paths: RunPaths, stage: StagePaths, places: Iterable[tuple[str, int]]
) -> list[tuple[str, int]]:
    """Fail calls in units that no worker has claimed; return their units and positions.

    This claims the units as a worker does, so no worker can start them at the same time.
    """
    claims = Claims(stage)
    claims.refresh()
    units: dict[str, list[int]] = {}
    for unit, item in places:
        if not claims.generation(unit):
            units.setdefault(unit, []).append(item)
    if not units:
        return []
    clock, ended = SystemClock(), list[tuple[str, int]]()
    member = Membership(paths, RankInfo(), clock, DEFAULT_LEASE_S, name=new_name(WITHDRAWN))
    facts = {"error": "not started: its function changed", "seconds": 0.0}
    for unit, items in units.items():
        if claims.create(unit, 1, member.name):
            named = {"unit": f"{stage.name}/{unit}", "generation": 1, "at": round(clock.wall(), 3)}
            each = ({"type": "permanent", **named, "item": item, **facts} for item in items)
            lines, start = b"".join(map(encode_line, each)), member.journal.size
            counts = {"lines": len(items), "done": 0, "failed": len(items), "seconds": 0.0}
            member.journal.append(lines + release_line(start, lines, **named, **counts))
            ended += [(unit, item) for item in items]
    member.finish(Counts(0, len(ended), 0), "calls whose function changed")
    member.journal.close()
    member.lock.close()
    return ended
