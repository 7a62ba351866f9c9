"""Host health: detect a host on which items fail that other hosts finish.

Items fail fast on such a sick host, so it would drain the queue. The evidence is the host x item
matrix of the journals. After many failures in a row, a worker releases its unit and claims
nothing (it *holds*), and asks workers of other hosts to try the failed items. If they finish the
items, the host is sick and its workers exit. If the items fail there too, the items are at fault
and the host goes on. All this decides only what a worker claims, never the state of an item.

If items fail on all hosts alike, the run pauses.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from hpc_toolkit.queue.control import HealthNotice, give_health_notice
from hpc_toolkit.queue.left import FIRST_ITEMS, pause_reason
from hpc_toolkit.queue.presence import DRAINING, Presence, host_part
from hpc_toolkit.queue.state import AGAIN_WEIGHT, History, ItemState
from hpc_toolkit.worker.attempts import CONSECUTIVE_FAILURES

if TYPE_CHECKING:
    from hpc_toolkit.queue.leases import Liveness
    from hpc_toolkit.queue.view import RunView, StageView
    from hpc_toolkit.system.clock import Clock

HOLD_S = 300.0
"""Longest hold in seconds; then the worker goes on until as much has failed again."""
_MOST = 32
"""Other workers whose journals one reads: if hundreds read all of them, the rest would stall."""
_STARTING_S = 60.0
"""Workers of one host start within this time; earlier failures on the host do not count."""
_TWO = 2
"""Failures in a row from which a worker checks its host from time to time."""


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


class Health(Enum):
    """The health of a host, or of one worker, according to the matrix."""

    WELL = auto()
    SUSPECT = auto()
    """Many items failed in a row, and workers elsewhere may still try them."""
    SICK = auto()
    """Workers elsewhere finished the items that failed here."""


def judge(
    failed: Mapping[Key, int],
    opinions: Mapping[Key, Opinion],
    *,
    others: bool,
    limit: int = CONSECUTIVE_FAILURES,
) -> Health:
    """Judge whether a host, or one worker, is sick.

    Args:
        failed: the items that failed there since its last result, with their weights.
        opinions: the outcome of each of these items elsewhere.
        others: whether a living worker elsewhere does not fail itself.
        limit: weight of failures in a row that makes the host a suspect.
    """
    if sum(opinions[key] is Opinion.DONE for key in failed) >= CONSECUTIVE_FAILURES:
        return Health.SICK
    waiting = any(opinions[key] is Opinion.OPEN for key in failed)
    # Items that also failed elsewhere do not count against the host.
    weight = sum(w for key, w in failed.items() if opinions[key] in (Opinion.DONE, Opinion.OPEN))
    return Health.SUSPECT if others and waiting and weight >= limit else Health.WELL


def may_wait(here: tuple[int, str], there: tuple[int, str]) -> bool:
    """Whether a host may wait for another, by their failed items in a row, and their names.

    Two hosts never wait for each other.
    """
    return there < here and there[0] < CONSECUTIVE_FAILURES


class FailureCount:
    """A worker's failures in a row, and whether it holds because of them."""

    hold: bool = False
    """Whether no item may start until other hosts have tried the items that failed here."""
    weight: int = 0
    """Weight of the failures since the last result (:mod:`hpc_toolkit.queue.state`)."""
    check_at: int = CONSECUTIVE_FAILURES
    """Weight at which the host is checked."""

    def note_done(self) -> None:
        self.weight, self.check_at = 0, CONSECUTIVE_FAILURES

    def note_failure(self, weight: int) -> None:
        self.weight += weight

    def left(self, weight: int) -> int:
        """Number of failures of this weight up to the next check; at least 1."""
        return max(1, (self.check_at - self.weight) // weight)

    def check_if_many(self) -> None:
        """Check the host if enough failed in a row; if it is well, the next time after as many."""
        if self.weight >= self.check_at:
            self.check()
            self.check_at = self.weight + (
                1 if self.hold else max(self.weight, CONSECUTIVE_FAILURES)
            )

    def check(self) -> bool:
        """Judge the host and update :attr:`hold`; a worker that knows no other host holds never."""
        return self.hold


class HostWatch(FailureCount):
    """One worker's check of its own host, and whether the run should pause."""

    reason: str = ""
    """Why this worker must exit: its host, or itself, is sick; "" if it need not."""
    pause: str = ""
    """Why this worker must exit with an error: the run pauses, since many items failed; or ""."""

    def __init__(
        self, *, view: RunView, liveness: Liveness, clock: Clock, own: Presence, every_s: float
    ) -> None:
        """``every_s``: minimum seconds between two checks, unless failures demand one."""
        self.view, self.liveness, self.clock, self.own = view, liveness, clock, own
        self.every_s = every_s
        self._hosts: dict[str, str] = {}
        self._random = random.Random(self.own.worker)
        self._sample: list[str] = []
        self._looked: list[str] = []
        self._noticed = 0
        self._limit = CONSECUTIVE_FAILURES
        self._waited_for: tuple[bool, set[Key]] = (True, set())
        self._held_until: float | None = None
        self._next_check = self._judge_at = -math.inf
        self._judged = 0

    def judge_run_if_due(self, stage: StageView | None, failed: int, done: int) -> None:
        """Judge the failures of a unit run, which may take too long to wait for its end."""
        new = failed - self._judged
        if new and (new >= FIRST_ITEMS or self.clock.monotonic() >= self._judge_at):
            self.judge_run(stage, failed, done)

    def judge_run(self, stage: StageView | None, failed: int, done: int) -> None:
        """Set :attr:`pause` if the failures of all workers are a reason to pause the run.

        ``failed`` and ``done`` are this worker's attempts.
        """
        self._judged = failed
        if self.check_if_due():
            return
        self._judge_at = self.clock.monotonic() + self.every_s
        if stage is None or (stage.spec.max_failures is None and done):
            return
        self.read()
        reason = pause_reason(stage)
        # Failures on this host alone are not a reason while other hosts may finish the items.
        if reason and (stage.spec.max_failures is not None or not self.check()):
            self.pause = f"paused: {reason}"

    def holds(self) -> bool:
        """Whether nothing may be claimed now; checks again from time to time."""
        return self.hold and self.check_if_due()

    def check_if_due(self) -> bool:
        """Like :meth:`check`, but only after failures and at most every ``every_s`` seconds."""
        now = self.clock.monotonic()
        if (self.hold or self.weight >= _TWO) and now >= self._next_check:
            self.check()
            self._next_check = now + self.every_s
        return self.hold

    def check(self) -> bool:
        """Read the journals; return whether this worker must hold or exit."""
        self._next_check = -math.inf
        self.read()
        self.hold = False
        hosts = {self._host_of(worker) for worker in self._looked}
        if not hosts - {self.own.host, ""}:
            return False
        suspects = []
        for whole in (True, False):
            health, failed = self._judge(whole=whole)
            if health is Health.SICK:
                self.hold = True
                if not self.reason:
                    what = f"{len(failed)} items in a row failed there, and others finished them"
                    self.reason = f"{self._subject(whole)} is sick: {what}"
                    self._tell(self.reason, whole=whole, sure=True)
                return True
            if health is Health.SUSPECT:
                suspects.append((whole, failed))
        if suspects:
            self.hold = self._ask_others(*suspects[0])
        else:
            self._held_until = None
        return self.hold

    def read(self) -> None:
        """Read new journal lines.

        Among many workers, read only those of this host, of a random sample of others, and of all
        that had claimed the units with the items that failed here.
        """
        names = self.liveness.names()
        if len(names) <= _MOST:
            self._looked = names
            self.view.poll()
            return
        self._looked = self._choose(names)
        self.view.poll_logs()
        self.view.poll_claims()
        for name in self._looked:
            self.view.poll_journal(name)
        here = self._workers_on(self.own.host)
        for key in self._failed_in_a_row(here, self.own.started - _STARTING_S):
            stage = self.view.stages[key.stage]
            for generation in range(1, stage.claims.generation(key.unit) + 1):
                self.view.poll_journal(stage.owner(key.unit, generation))

    def _choose(self, names: list[str]) -> list[str]:
        """Workers of this host, and a random sample of others, kept until they are gone."""
        here = host_part(self.own.worker)
        mates = [name for name in names if host_part(name) == here]
        left = {name for name in names if not self.liveness.is_final(name)}.difference(mates)
        kept = [name for name in self._sample if name in left]
        others = sorted(left.difference(kept))
        new = self._random.sample(others, min(len(others), _MOST - len(kept)))
        self._sample = kept + new
        return mates + self._sample

    def take(self, notices: list[HealthNotice]) -> bool:
        """Process the new notices of a growing list; whether another host requests an opinion."""
        new, self._noticed = notices[self._noticed :], len(notices)
        elsewhere = [notice for notice in new if notice.host != self.own.host]
        if len(elsewhere) < len(new):
            self._next_check = -math.inf
        return not all(notice.sure for notice in elsewhere)

    def _judge(self, *, whole: bool) -> tuple[Health, dict[Key, int]]:
        """The health of the host (``whole``) or of this worker alone, and what failed in a row."""
        here = self._workers_on(self.own.host) if whole else {self.own.worker}
        failed = self._failed_in_a_row(here, self.own.started - _STARTING_S)
        if whole is self._waited_for[0] and not self._waited_for[1] <= failed.keys():
            # A waited-for item is not among them: a result came since.
            self._waited_for, self._limit = (True, set()), CONSECUTIVE_FAILURES
        opinions = {key: self._opinion(key, here) for key in failed}
        others = sum(failed.values()) >= self._limit and self._others(len(failed))
        health = judge(failed, opinions, others=others, limit=self._limit)
        return health, failed

    def _ask_others(self, whole: bool, failed: dict[Key, int]) -> bool:
        """Ask other hosts to try the items; return whether to hold until they have."""
        now = self.clock.monotonic()
        if self._held_until is None:
            self._held_until = now + HOLD_S
            asked = f"{len(failed)} items in a row failed on {self._subject(whole)}"
            self._tell(f"{asked}; other hosts are asked to try them", whole=whole, sure=False)
        if now < self._held_until:
            return True
        # No other host tried the items: all may be busy for hours, and this host may be well.
        self._held_until = None
        self._waited_for = (whole, set(failed))
        self._limit = sum(failed.values()) + CONSECUTIVE_FAILURES
        return False

    def _subject(self, whole: bool) -> str:
        return f"host {self.own.host}" if whole else f"worker {self.own.worker}"

    def _tell(self, reason: str, *, whole: bool, sure: bool) -> None:
        give_health_notice(
            self.view.paths,
            HealthNotice(
                host=self.own.host,
                worker=self.own.worker,
                whole=whole,
                sure=sure,
                at=round(self.clock.wall(), 3),
                reason=reason,
            ),
        )

    def _others(self, items: int) -> bool:
        """Whether a host that fails less has living workers that may try these items."""
        living: dict[str, set[str]] = {}
        for worker in self._looked:
            host = self._host_of(worker)
            if host not in ("", self.own.host) and self.liveness.verdict(worker).alive:
                presence = self.view.presence(worker)
                if presence is not None and presence.state != DRAINING:
                    living.setdefault(host, set()).add(worker)
        return any(
            may_wait((items, self.own.host), (len(self._failed_in_a_row(workers, -math.inf)), host))
            for host, workers in living.items()
        )

    def _host_of(self, worker: str) -> str:
        """Host on which a worker runs or ran; "" if unknown, which proves nothing."""
        if worker not in self._hosts:
            presence = self.view.presence(worker)
            if presence is None:
                return ""
            self._hosts[worker] = presence.host
        return self._hosts[worker]

    def _workers_on(self, host: str) -> set[str]:
        stages = self.view.stages.values()
        names = {name for stage in stages for name in stage.state.consecutive_failures}
        return {name for name in names if self._host_of(name) == host}

    def _failed_in_a_row(self, workers: Collection[str], since: float) -> dict[Key, int]:
        """Items, with weights, that failed since the last result of these workers of one host."""
        failures = [
            (name, stage.state.consecutive_failures[worker])
            for name, stage in self.view.stages.items()
            for worker in workers
            if worker in stage.state.consecutive_failures
        ]
        after = max([since, *(one.done_at for _, one in failures)])
        found: dict[Key, int] = {}
        for stage, one in failures:
            for (unit, item), (at, weight) in one.failed.items():
                if at >= after:
                    key = Key(stage, unit, item)
                    # If two workers of a host tried an item, one of them repeated it.
                    found[key] = found[key] + max(weight, AGAIN_WEIGHT) if key in found else weight
        return found

    def _opinion(self, key: Key, here: Collection[str]) -> Opinion:
        """The outcome of an item on all workers except those ``here``."""
        state = self.view.stages[key.stage].state
        unit = state.units[key.unit]
        history = unit.histories.get(key.item, History(0))
        done = unit.clean[0] if unit.clean is not None else None
        if history.done is not None:
            done = history.done.worker
        if done is not None:
            return Opinion.DONE if self._is_elsewhere(done, here) else Opinion.NONE
        floor = state.floor(unit.unit.entry, key.item)
        hurt = [ref.worker for ref in history.failures.values() if ref.generation > floor]
        hurt += [death.worker for death in state.suspects(key.unit).get(key.item, ())]
        if any(self._is_elsewhere(worker, here) for worker in hurt):
            return Opinion.FAILED
        pending = state.item_state(unit, key.item) is ItemState.PENDING
        return Opinion.OPEN if pending else Opinion.NONE

    def _is_elsewhere(self, worker: str, here: Collection[str]) -> bool:
        """Whether a worker is on a known host and not among those ``here``.

        A worker on the same host can vouch for a worker; only other hosts can vouch for a host.
        """
        return worker not in here and self._host_of(worker) != ""
