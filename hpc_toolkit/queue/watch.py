"""A worker's watch over the other workers of its run: who died, and how many live.

Workers of a node die together or in sight of each other: one of them sees at once when another
ends, without the filesystem (:mod:`hpc_toolkit.worker.node`), and its heartbeat shows to other
nodes that the node lives. So one worker of each node, its observer, watches one other node.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING

from hpc_toolkit.queue.control import SILENT_NODE, FreeUnit
from hpc_toolkit.queue.pacing import NAMES_EVERY
from hpc_toolkit.queue.presence import host_part
from hpc_toolkit.queue.units import parse_claim

if TYPE_CHECKING:
    from hpc_toolkit.queue.leases import Liveness, Verdict
    from hpc_toolkit.queue.view import RunView, StageView
    from hpc_toolkit.system.clock import Clock

_MOST_PASSED = 8
"""Nodes past which one look around the ring goes, because they do not show that they live."""
_MOST_MATES = 64
"""Workers of the own node at which one look looks, because they do not answer; also workers of
other nodes at which it looks for the first time: a node has many that finished long ago."""
_PART_OF_LEASE = 0.5
"""A node is dead after this part of a lease, if all of its workers are silent and others beat."""
_SEVERAL = 2
_BEATS = 3.0
"""Heartbeats of a node that all of its workers must miss."""
_TOLD_WITHIN_S = 20.0
"""Seconds within which idle workers try to take over what all of them were told of."""
_AGAIN_S = 5.0
_STUCK_S = 10.0
"""Pause of this process itself after which silences are counted anew: its server may have failed,
and nodes that find their server again do so one after the other."""


@lru_cache(maxsize=1 << 14)
def _on_ring(host: str) -> float:
    """A node's position on a ring of length 1.

    Nodes whose names are alike must not be neighbors: a chassis or a rack dies together. A CRC puts
    similar names side by side.
    """
    return random.Random(host).random()


def _age(worker: str) -> tuple[int, str]:
    """Sort key: the first process of a node comes first; it is its observer in most cases."""
    pid = worker.rpartition("-")[0].rpartition("-")[2]
    return int(pid) if pid.isdigit() else 0, worker


class Watch:
    """Looks at all other workers, or at the next node if the filesystem is shared.

    Only a worker that looks twice can see a silence, so each node needs another one whose observer
    always looks at it: the one before it on the ring of all nodes.
    """

    def __init__(self, liveness: Liveness, worker: str, clock: Clock) -> None:
        self.liveness, self.worker, self.clock = liveness, worker, clock
        self.host = host_part(worker)
        self._hosts: dict[str, list[str]] = {}
        """All known workers of each node, in the order of the ring from this one on."""
        self.met: Collection[str] = ()
        """Workers of this node that are known without a listing, dead ones too."""
        self._new = 0
        """Workers at which this look may look for the first time."""
        self._contacts: dict[str, str] = {}
        """The worker of each node that was its observer at the last look."""
        self._looks = 0
        self._looked: dict[str, int] = {}
        """The last look at each node."""
        self._gone: set[str] = set()
        self._moved = self._unstuck = clock.monotonic()
        self.living = 0
        """Workers alive at the last look; an estimate if some were skipped."""
        self.nodes = 0
        """Nodes with living workers, estimated in the same way."""
        self.lease_left_s = math.inf
        """Seconds until the first silent worker counts as dead; infinite if none is silent."""

    def moves(self) -> None:
        """Note that this process runs; to be called at least once in some seconds."""
        now = self.clock.monotonic()
        if now - self._moved > _STUCK_S:
            self._unstuck = now
        self._moved = now

    def forget(self, worker: str) -> None:
        """Do not report a death that all workers know of already."""
        self._gone.add(worker)

    def look(self, at_most: int | None = None, mates: Collection[str] = ()) -> dict[str, Verdict]:
        """Return the workers that died since the last look; count the living ones.

        ``at_most``: look at this many other nodes, and past silent ones on the ring, and at those
        workers of this node that are not among ``mates``, which are known to live; None: at all.
        """
        # At the first look, other workers may not have started yet.
        lists = self._looks == 1 or self._looks % NAMES_EVERY == 0
        self._looks += 1
        if lists or at_most is None:
            self._list()
        if at_most is None:
            looked = {
                one: self.liveness.verdict(one) for ones in self._hosts.values() for one in ones
            }
            self.lease_left_s = math.inf
        else:
            self._gone.difference_update(mates)
            looked = self._look_at_own(set(mates), again=lists)
            looked |= self._look_at_others(at_most, again=lists)
        alive = {name for name, verdict in looked.items() if verdict.alive}
        left = {name for name, verdict in looked.items() if verdict.finished} | alive
        died = {name: one for name, one in looked.items() if name not in left | self._gone}
        self._gone.difference_update(alive)  # they were silent but not dead
        self._gone.update(died)
        least_s = min(map(self.liveness.lease_left_s, alive), default=math.inf)
        self.lease_left_s = min(self.lease_left_s, least_s)
        self._estimate(alive, looked, len(mates), exact=at_most is None)
        return died

    def _list(self) -> None:
        own, hosts = _on_ring(self.host), dict[str, list[str]]()
        for name in self.liveness.names():
            hosts.setdefault(host_part(name), []).append(name)
        ring = sorted(hosts, key=lambda host: ((_on_ring(host) - own) % 1.0, host))
        self._hosts = {host: sorted(hosts[host], key=_age) for host in ring}

    def _left(self, host: str, *, again: bool = True) -> list[str]:
        """Workers of a node that may live; ``again``: those that counted as dead too."""
        return self._of(self._hosts.get(host, ()), again=again)

    def _of(self, names: Collection[str], *, again: bool) -> list[str]:
        return [
            name
            for name in names
            if not self.liveness.is_final(name) and (again or name not in self._gone)
        ]

    def _look_at_own(self, mates: set[str], *, again: bool) -> dict[str, Verdict]:
        known = {*self._hosts.get(self.host, ()), *self.met}
        left = self._of(known - mates - {self.worker}, again=again)
        # Hosts of the same name share what there is to look at.
        left.sort(key=lambda one: (one in self._gone, one < self.worker, one))
        return {name: self.liveness.verdict(name) for name in left[:_MOST_MATES]}

    def _look_at_others(self, at_most: int, *, again: bool) -> dict[str, Verdict]:
        """Look at the next nodes on the ring, up to the first ones that are not silent.

        ``again``: look at workers that counted as dead too.
        """
        looked: dict[str, Verdict] = {}
        heard, passed, silent, self._new, others = 0, 0, list[str](), _MOST_MATES, False
        for host in self._hosts:
            left = self._left(host, again=again)
            if host == self.host or not left:
                continue
            # Beyond a silent node, a beat since an older look does not show that a node still
            # lives: neighbors on the ring may have died together.
            recent = not silent or self._looked.get(host) == self._looks - 1
            self._looked[host] = self._looks
            if self._hears(host, left, looked):
                others = True
                heard, passed = heard + recent, passed + (not recent)
            elif any(looked[name].alive for name in left if name in looked):
                silent.append(host)
            if heard >= at_most or len(silent) + passed >= _MOST_PASSED or self._new == 0:
                break
        self.lease_left_s = math.inf
        others = others or (silent != [] and self._hears_behind({self.host, *silent}, looked))
        for host in silent:
            self._judge(host, looked, others=others)
        return looked

    def _hears_behind(self, silent: set[str], looked: dict[str, Verdict]) -> bool:
        """Whether a node beyond those that one look passes beat since the look before."""
        left = {host: self._left(host, again=False) for host in self._hosts if host not in silent}
        last = [host for host, names in left.items() if names][-_SEVERAL:]
        # The first look at a node shows no beat.
        recent = {host for host in last if self._looked.get(host) == self._looks - 1}
        self._looked.update(dict.fromkeys(last, self._looks))
        return not recent.isdisjoint([one for one in last if self._hears(one, left[one], looked)])

    def _hears(self, host: str, left: list[str], looked: dict[str, Verdict]) -> bool:
        """Look at the workers of a node until one shows that the node lives."""
        known = self._contacts.get(host)
        new = not any(map(self.liveness.has_seen, left))
        for name in sorted(left, key=lambda one: (one != known, _age(one))):
            if not self.liveness.has_seen(name):
                if self._new == 0:
                    continue
                self._new -= 1
            looked[name] = verdict = self.liveness.verdict(name)
            silent_s, interval_s = self.liveness.silence_of(name)
            beats = verdict.alive and silent_s <= interval_s
            if beats and self.liveness.watches_for(name):
                self._contacts[host] = name
                self._gone.difference_update(self._hosts[host])  # the node was suspended, not lost
                return True
            if beats and new:  # it may become the observer in a moment
                return True
        return False

    def _judge(self, host: str, looked: dict[str, Verdict], *, others: bool) -> None:
        """Declare the workers of a silent node dead, if they were silent for long enough.

        A node that lives always has a worker that beats often. ``others``: whether another node
        beats; if none does, the file server may be at fault, and only a full lease decides. So it
        does for a single worker, which may wait for the server alone, as after the loss of a host
        that had the same file open.
        """
        living = [name for name in self._left(host) if name in looked and looked[name].alive]
        if not looked.keys() >= set(self._left(host, again=False)):
            return  # others of it may beat
        if not others or len(living) < _SEVERAL:
            return
        silences = [self.liveness.silence_of(name) for name in living]
        longest_s, interval_s = max(silences)
        if (known := self._contacts.get(host)) is not None:
            silent_s, interval_s = self.liveness.silence_of(known)
            longest_s = max(longest_s, silent_s)
        lease_s = max(_PART_OF_LEASE * self.liveness.lease_s, _BEATS * interval_s)
        longest_s = min(longest_s, self.clock.monotonic() - self._unstuck)
        left_s = max(lease_s - longest_s, _BEATS * interval_s - min(silences)[0])
        if left_s > 0.0:
            self.lease_left_s = min(self.lease_left_s, left_s)
            return
        notices = {name: self.liveness.notice(name, "lease", SILENT_NODE) for name in living}
        for name, notice in notices.items():
            if notice is not None:
                self.liveness.take_notice(notice)
                looked[name] = self.liveness.verdict(name)

    def _estimate(
        self, alive: set[str], looked: dict[str, Verdict], mates: int, *, exact: bool
    ) -> None:
        """Estimate how many workers and nodes live, from those at which this one looked."""
        if exact:
            self.living = self.nodes = len(alive)
            return
        seen = {host_part(name) for name in looked} - {self.host}
        lives = {host_part(name) for name in alive} - {self.host}
        hosts = {one for one in self._hosts if self._left(one, again=False)} - {self.host}
        part = 1.0 if hosts <= seen else (len(lives) + 1) / (len(seen) + 1)
        self.nodes = 1 + round(len(hosts) * part)
        each = [self.liveness.watches_for(self._contacts.get(host, "")) or 1 for host in lives]
        self.living = round(self.nodes * (sum(each) + mates + 1) / (len(each) + 1))


def _left_by(view: RunView, liveness: Liveness, worker: str, verdict: Verdict) -> list[FreeUnit]:
    """The units that a dead worker held, by its journal and its last heartbeat.

    If it may have claimed one since, of which it wrote no line yet, its death alone, with no unit.
    """
    evidence, _, explained = verdict.evidence.partition(", ")
    notice = liveness.notice(worker, evidence, verdict.explained or explained)
    if notice is None:
        return []
    view.poll_journal(worker)
    stage_name, _, claim = liveness.claim_of(worker).partition("/")
    found = []
    for name, stage in view.stages.items():
        units = set(stage.state.begun)
        if name == stage_name and (parsed := parse_claim(f"{claim}.lock")) is not None:
            units.add(parsed[0])
        held = [one for one in sorted(units) if stage.holders([one]) == {worker}]
        found += [FreeUnit(name, one, stage.claims.generation(one), notice) for one in held]
    return found or [FreeUnit("", "", 0, notice)]


class LeftUnits:
    """Units whose owners are dead: found by this worker, or by another one that told all."""

    def __init__(self, view: RunView, watch: Watch) -> None:
        self._view, self._watch, self._liveness = view, watch, watch.liveness
        self._clock = watch.clock
        self._random = random.Random(watch.worker)
        self._found: set[FreeUnit] = set()
        self._generations: dict[tuple[str, str], int] = {}
        self._at = math.inf

    @property
    def due(self) -> bool:
        """Whether to try to take one over."""
        return self._clock.monotonic() >= self._at

    def look(self, at_most: int | None, mates: Collection[str]) -> tuple[list[FreeUnit], int]:
        """Find units by :meth:`Watch.look`; also how many died of whom no unit is known."""
        found, unknown = list[FreeUnit](), 0
        died = self._watch.look(at_most, mates)
        if died:
            self._view.poll_claims()
        for name, verdict in died.items():
            units = _left_by(self._view, self._liveness, name, verdict)
            found += units
            unknown += not any(one.unit for one in units)
        self._found.update(found)
        self._add(found, 0)
        return found, unknown

    def hear_of(self, units: list[FreeUnit], workers: int) -> None:
        """Hear from another worker what it found; ``workers`` hear of it."""
        units = [one for one in units if one not in self._found]
        for one in units:
            self._liveness.take_notice(one.owner)
            self._watch.forget(one.owner.worker)
        self._add(units, workers)

    def _add(self, units: list[FreeUnit], workers: int) -> None:
        units = [one for one in units if one.unit]
        for one in units:
            known = self._generations.get((one.stage, one.unit), 0)
            self._generations[one.stage, one.unit] = max(known, one.generation)
        if units:  # not all must try at once
            within_s = min(_TOLD_WITHIN_S, workers / len(self._generations))
            at = self._clock.monotonic() + self._random.uniform(0.0, within_s)
            self._at = min(self._at, at)

    def choose(self) -> list[tuple[StageView, str]]:
        """The units that nobody has taken over yet, in random order; lists the claims."""
        stages, left = self._view.stages, dict[tuple[str, str], int]()
        for name in {name for name, _ in self._generations}.intersection(stages):
            stages[name].claims.refresh()
        for (name, unit), generation in self._generations.items():
            stage = stages.get(name)
            if stage is None:
                continue
            if stage.state.units.get(unit) is None:
                stage.poll_log()
            if unit in stage.state.open and stage.claims.generation(unit) <= generation:
                left[name, unit] = generation
        self._generations, self._at = left, math.inf
        if left:
            self._at = self._clock.monotonic() + self._random.uniform(0.5, 1.0) * _AGAIN_S
        return [(stages[of], unit) for of, unit in self._random.sample(sorted(left), len(left))]
