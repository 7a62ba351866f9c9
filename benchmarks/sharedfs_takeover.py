"""How soon does an item run elsewhere after its worker was killed, on real shared filesystems?

Each case has workers that are killed together in the middle of a long item each, and as many that
wait, with the default heartbeat and lease. Killed workers started some seconds apart, so that
their heartbeats come at different times. The first item that starts after the kill is taken from
the items' own trace.

- same host: the waiting workers are on the host of the killed ones;
- other host: they are on the other one; locks were proven by ``hpctk doctor`` before, or not;
- dead node: locks were proven. The host's network link is cut at the server's end, and then its
  client of the filesystem and all its workers are killed: as with a node that lost its power, the
  server hears nothing of it. bindfs has no server; its process on that host is killed. With NFS
  the host is a kernel, which is killed.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from failures import Failure, tried

from hpc_toolkit.queue.leases import DEFAULT_LEASE_S
from tests.sharedfs.filesystems import mounted
from tests.sharedfs.nfs import NFS3, NFS42
from tests.sharedfs.plays import FUSE_KINDS
from tests.sharedfs.rehearsal import HIT, SPARED, Rehearsal, Size

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sharedfs.filesystems import Filesystem
    from tests.sharedfs.hosts import Hosts
    from tests.sharedfs.ranks import Ranks

_VICTIMS = 3
_APART_S = 3.3
"""Between the starts of two; no part of the interval of heartbeats."""
_SETTLED_S = 30.0
"""After so long those who wait look as seldom as they ever do."""
_SIZE = Size(
    items=_VICTIMS,
    seconds=3600.0,
    workers=1,
    lease_s=DEFAULT_LEASE_S,
    silence_s=0.0,
    limit_s=3 * DEFAULT_LEASE_S,
)


@dataclass(frozen=True)
class Case:
    """Who dies, who takes over, and what is known of the filesystem."""

    title: str
    watcher: str
    proven: bool
    rounds: int
    whole_node: bool = False


CASES = (
    Case("same host", HIT, proven=False, rounds=3),
    Case("other host, locks proven", SPARED, proven=True, rounds=2),
    Case("other host, locks not proven", SPARED, proven=False, rounds=1),
    Case("dead node", SPARED, proven=True, rounds=1, whole_node=True),
)


@dataclass(frozen=True)
class Found:
    """What one case came to on one filesystem."""

    filesystem: str
    title: str
    seconds: list[float]
    """Empty if the case failed."""
    evidence: list[str]
    """By which the deaths were seen, or what was seen instead."""


def measure(directory: Path) -> list[Found]:
    """All cases on all filesystems, side by side; the dead node last, for it stays dead."""
    (directory / "hosts").mkdir()
    threads = ThreadPoolExecutor(32)
    with mounted(directory / "hosts", (*FUSE_KINDS, NFS3, NFS42)) as filesystems:
        found = []
        try:
            for last in (False, True):
                cases = [case for case in CASES if case.whole_node is last]
                futures = [
                    threads.submit(_try, filesystem, case, directory)
                    for filesystem, case in itertools.product(filesystems.values(), cases)
                    # What is proven nowhere is the same as not proven.
                    if filesystem.locks_reach or case.whole_node or not case.proven
                ]
                found += [future.result() for future in futures]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
    order = [case.title for case in CASES]
    return sorted(found, key=lambda one: order.index(one.title))


def _try(filesystem: Filesystem, case: Case, directory: Path) -> Found:
    title = f"{filesystem.name} {case.title}"
    found = tried(title, lambda: _play(filesystem, case, directory))
    if isinstance(found, Failure):
        return Found(filesystem.name, case.title, [], [found.seen])
    return found


def _play(filesystem: Filesystem, case: Case, directory: Path) -> Found:
    found = Found(filesystem.name, case.title, [], [])
    for number in range(case.rounds):
        name = f"{case.title.replace(' ', '-').replace(',', '')}-{number}"
        cwd = directory / f"{filesystem.name}-{name}"
        cwd.mkdir()
        run = Rehearsal(filesystem, cwd, _SIZE, name)
        try:
            seconds, evidence = _kill(run, case)
        finally:
            run.close()
        found.seconds.extend(seconds)
        found.evidence.extend(evidence)
    return found


def _kill(run: Rehearsal, case: Case) -> tuple[list[float], list[str]]:
    run.init(_VICTIMS)
    if case.proven:
        run.examine()
    victims = []
    for _ in range(_VICTIMS):
        victims.append(run.work(HIT))
        time.sleep(_APART_S)
    run.until(lambda: len(run.busy(HIT)) == _VICTIMS, "workers in the middle of items")
    for _ in range(_VICTIMS):
        run.work(case.watcher)
    run.until(lambda: len(run.presences()) == 2 * _VICTIMS, "workers that wait")
    time.sleep(_SETTLED_S)
    at = time.time()
    if case.whole_node and run.filesystem.loses_power:
        run.filesystem.power_off(HIT)
        for one in victims:
            one.process.kill()
    elif case.whole_node:
        run.filesystem.cut(HIT)
        _kill_all_on(run.hosts, HIT)
    else:
        _kill_ranks(run.hosts, victims)
    started = run.until(lambda: _started(run, at), "items that run elsewhere")
    lines = run.until(lambda: _deaths(run), "lines about the deaths")
    return [one - at for one in started], lines


def _kill_ranks(hosts: Hosts, victims: list[Ranks]) -> None:
    family = list(itertools.chain.from_iterable(one.family() for one in victims))
    hosts.signal(HIT, family, signal.SIGSTOP)
    hosts.signal(HIT, family[::-1], signal.SIGKILL)  # children first: see Ranks.kill


def _kill_all_on(hosts: Hosts, host: str) -> None:
    """Everything that has the host's network, but for the process that keeps its namespaces."""
    network = hosts.call(host, "readlink", "/proc/self/ns/net").strip()
    for one in hosts.processes():
        with suppress(OSError):
            if one.name != "sleep" and os.readlink(f"/proc/{one.pid}/ns/net") == network:
                os.kill(one.pid, signal.SIGKILL)


def _started(run: Rehearsal, at: float) -> list[float]:
    """When each item started for the first time after a moment; [] until all have."""
    lines = sorted(run.told(), key=lambda words: float(words[4]))
    again = [(words[1], float(words[4])) for words in lines if float(words[4]) > at]
    first = dict(reversed(again))
    return list(first.values()) if len(first) == _VICTIMS else []


def _deaths(run: Rehearsal) -> list[str]:
    """By what each death was seen; [] until all are told."""
    found = [one["evidence"] for one in run.records() if one["type"] == "death"]
    return found if len(found) >= _VICTIMS else []
