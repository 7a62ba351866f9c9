"""Memory that the workers of one simulation share: what all of them know of the run's list.

A worker's own knowledge is kept as its difference from the list, so thousands of workers fit into
the memory of one process. The code that uses it is the queue's own.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping, MutableSet
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from hpc_toolkit.queue.affinity import FreshUnits
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.state import UnitState
from hpc_toolkit.queue.units import Claims, parse_claim
from hpc_toolkit.rundir import files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from hpc_toolkit.queue.units import Segment, Unit
    from hpc_toolkit.queue.view import StageView


class Remaining(MutableSet[str]):
    """A set of names that is large at first and then shrinks."""

    def __init__(self, names: Mapping[str, object]) -> None:
        self._names = names
        self._gone: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._names and name not in self._gone

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name not in self._gone)

    def __len__(self) -> int:
        return len(self._names) - len(self._gone)

    def add(self, value: str) -> None:
        self._gone.discard(value)

    def discard(self, value: str) -> None:
        if value in self._names:
            self._gone.add(value)


class UnitStates(dict[str, UnitState]):
    """The states of units, made when they are first asked for."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        super().__init__()
        self._units = units

    def __missing__(self, name: str) -> UnitState:
        return self.setdefault(sys.intern(name), UnitState(self._units[name]))

    def get(self, name: str, default: object = None) -> UnitState | None:  # type: ignore[override]
        return self[name] if name in self._units else None


class Groups(MutableMapping[str, list["Unit"]]):
    """The units of each group; the lists are never changed in place."""

    def __init__(self, groups: Mapping[str, list[Unit]]) -> None:
        self._groups = groups
        self._changed: dict[str, list[Unit]] = {}
        self._gone: set[str] = set()

    def __getitem__(self, key: str) -> list[Unit]:
        if key in self._gone:
            raise KeyError(key)
        return self._changed.get(key) or self._groups[key]

    def __setitem__(self, key: str, units: list[Unit]) -> None:
        self._changed[key] = units

    def __delitem__(self, key: str) -> None:
        self._changed.pop(key, None)
        self._gone.add(key)

    def __contains__(self, key: object) -> bool:
        return key in self._groups and key not in self._gone

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._groups if key not in self._gone)

    def __len__(self) -> int:
        return len(self._groups) - len(self._gone)


class SharedFresh(FreshUnits):
    """Units that no worker has claimed; a run has one segment, all of whose units ``known`` has."""

    def __init__(self, known: FreshUnits, seed: str, rank: int, world_size: int) -> None:
        super().__init__(seed, rank, world_size)
        self._known = known

    def add(self, units: Iterable[Unit], key_of: Callable[[Unit], str | None]) -> None:
        if not self._known._groups:
            super().add(units, key_of)
        self._groups = Groups(self._known._groups)  # type: ignore[assignment]
        self._numbers = self._known._numbers


class SharedClaims(Claims):
    """Claims whose names are kept once, and taken apart once."""

    def _note(self, unit: str, generation: int) -> None:
        super()._note(sys.intern(unit), generation)

    def refresh(self) -> None:
        for name in files.list_names(self._paths.claims):
            unit, generation = _parsed(name)
            if generation > self.newest.get(unit, 0):
                self.newest[unit] = generation


@lru_cache(maxsize=1 << 16)
def _parsed(name: str) -> tuple[str, int]:
    unit, generation = parse_claim(name) or ("", 0)
    return sys.intern(unit), generation


class SharedLog(StageLog):
    """A log whose segments are kept once; each reader asks for them all the same."""

    segments_of: dict[str, Segment]

    def _read(self, target: str) -> None:
        number = self.length + 1
        if target in self.segments_of:
            self.segments[number] = self.segments_of[target]
            files.read_fresh(self.segments[number].path)
            return
        super()._read(target)
        if number in self.segments:
            self.segments_of[target] = self.segments[number]


def share(stage: StageView, units: Mapping[str, Unit], segments: dict[str, Segment]) -> None:
    """Have a stage's view, of which nothing was read, share its units and segments."""
    log = cast("SharedLog", stage.log)
    log.__class__, log.segments_of = SharedLog, segments
    # All units are known from the start, so a segment adds none.
    stage.state.add_units = lambda units: None  # type: ignore[method-assign]
    stage.claims = SharedClaims(stage.paths)
    stage.state.units = UnitStates(units)
    stage.state._open = Remaining(units)  # type: ignore[assignment]
    stage._taken = stage.log.length
