"""The host x item matrix of the journals: what failed where, and its outcome elsewhere."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from hpc_toolkit.queue.state import ItemState
from hpc_toolkit.queue.streaks import AGAIN_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Collection

    from hpc_toolkit.queue.view import RunView


class Opinion(Enum):
    """The outcome, on other workers or hosts, of an item that failed here."""

    DONE = auto()
    FAILED = auto()
    OPEN = auto()
    """No other worker tried it, and one may."""
    NONE = auto()
    """No other worker will try it: lines written here alone have finished it."""


class Key(NamedTuple):
    """An item of any stage."""

    stage: str
    unit: str
    item: int


class Matrix:
    """What the journals of a view say about hosts and items; as recent as the view."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._hosts: dict[str, str] = {}

    def host_of(self, worker: str) -> str:
        """Host on which a worker runs or ran; "" if unknown, which proves nothing."""
        if worker not in self._hosts:
            presence = self._view.presence(worker)
            if presence is None:
                return ""
            self._hosts[worker] = presence.host
        return self._hosts[worker]

    def workers_on(self, host: str) -> set[str]:
        """Workers of a host that wrote an attempt."""
        names = {name for stage in self._view.stages.values() for name in stage.state.streaks}
        return {name for name in names if self.host_of(name) == host}

    def streak(self, workers: Collection[str], since: float) -> dict[Key, int]:
        """Items, with weights, that failed since the last result of these workers of one host."""
        streaks = [
            (name, stage.state.streaks[worker])
            for name, stage in self._view.stages.items()
            for worker in workers
            if worker in stage.state.streaks
        ]
        after = max([since, *(streak.done_at for _, streak in streaks)])
        found: dict[Key, int] = {}
        for stage, streak in streaks:
            for (unit, item), (at, weight) in streak.hurt.items():
                if at >= after:
                    key = Key(stage, unit, item)
                    # If two workers of a host tried an item, one of them repeated it.
                    found[key] = found[key] + max(weight, AGAIN_WEIGHT) if key in found else weight
        return found

    def opinion(self, key: Key, here: Collection[str]) -> Opinion:
        """The outcome of an item on all workers except those ``here``."""
        state = self._view.stages[key.stage].state
        unit = state.units[key.unit]
        history = unit.histories.get(key.item)
        done = unit.clean[0] if unit.clean is not None else None
        if history is not None and history.done is not None:
            done = history.done.worker
        if done is not None:
            return Opinion.DONE if self._is_elsewhere(done, here) else Opinion.NONE
        floor = state.floor(unit.unit.entry, key.item)
        failures = history.failures if history is not None else {}
        hurt = [ref.worker for ref in failures.values() if ref.generation > floor]
        deaths = [death for death in unit.deaths.values() if death.item == key.item]
        hurt += [death.worker for death in deaths if not death.explained]
        if any(self._is_elsewhere(worker, here) for worker in hurt):
            return Opinion.FAILED
        pending = state.item_state(unit, key.item) is ItemState.PENDING
        return Opinion.OPEN if pending else Opinion.NONE

    def _is_elsewhere(self, worker: str, here: Collection[str]) -> bool:
        """Whether a worker is on a known host and not among those ``here``.

        A worker on the same host can vouch for a worker; only other hosts can vouch for a host.
        """
        return worker not in here and self.host_of(worker) != ""
