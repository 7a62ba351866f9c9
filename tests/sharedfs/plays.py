"""Scenarios as they are played: on several filesystems at once, which doctor examines."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any

from tests.sharedfs import scenarios
from tests.sharedfs.ceph import CephFS
from tests.sharedfs.filesystems import Bindfs, GlusterFS, MooseFS
from tests.sharedfs.nfs import NFS3, NFS42, NFS3Cached
from tests.sharedfs.outcome import MEASURED, SAID, Outcome, said_by
from tests.sharedfs.rehearsal import SMALL, Rehearsal, Size

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.sharedfs.filesystems import Filesystem
    from tests.sharedfs.scenarios import Scenario


Examined = tuple[Rehearsal, dict[str, Any]]
"""A run that doctor examined, and what it said."""
FUSE_KINDS: tuple[type[Filesystem], ...] = (GlusterFS, MooseFS, CephFS, Bindfs)
"""Hosts are namespaces."""
NFS_KINDS: tuple[type[Filesystem], ...] = (NFS3, NFS42, NFS3Cached)
"""Hosts are kernels."""

_OF_KERNELS = (
    *(scenarios.orderly_restart, scenarios.power_cut, scenarios.power_cut_of_a_graph),
    scenarios.power_cut_of_proven_locks,
)
"""These need hosts that can lose their power, or a server whose service is not all of it."""
_UNDISTURBED = (scenarios.one_machine, scenarios.additions, scenarios.takeover)
"""These are played where others, whom a lost host would hit as well, use the same hosts."""


def is_played(kind: type[Filesystem], scenario: Scenario) -> bool:
    """Whether a scenario is played on this kind of filesystem."""
    if kind.set_of:
        return scenario in _UNDISTURBED
    return scenario not in _OF_KERNELS or kind.loses_power


IN_MAKE_TEST: dict[Scenario, tuple[type[Filesystem], ...]] = {
    scenarios.one_machine: (Bindfs,),  # where two mounts of one machine do not share their locks
    scenarios.campaign: (GlusterFS,),
    scenarios.additions: (NFS3Cached,),  # the client that caches most
    scenarios.kills: (NFS42,),
    scenarios.takeover: (Bindfs, NFS42),  # without and with locks that reach the other host
    scenarios.proven_locks: (MooseFS, CephFS, NFS42),  # each has locks of its own
    scenarios.partition: (CephFS,),  # which evicts the host
    scenarios.server_restart: (GlusterFS, MooseFS),  # users get an error, or wait
    scenarios.orderly_restart: (),
    # Until it has evicted the host, only CephFS would be waited for. NFSv3 frees no lost locks.
    scenarios.power_cut: (NFS3,),
    scenarios.power_cut_of_a_graph: (),
    scenarios.power_cut_of_proven_locks: (NFS42,),
}
"""Where a scenario of the small size takes a path of its own; 'make soak' plays it on all."""

_GENTLE = (
    *(scenarios.one_machine, scenarios.campaign, scenarios.additions),
    *(scenarios.kills, scenarios.takeover),
)
"""These disturb nothing but the processes of their own run. All others must not begin before the
examination ended."""
_TOGETHER: tuple[tuple[Scenario, ...], ...] = (
    (*_GENTLE, scenarios.proven_locks),
    # These disturb a host or a server, each that of another filesystem.
    (scenarios.partition, scenarios.server_restart),
    (scenarios.power_cut, scenarios.power_cut_of_proven_locks),
)
"""Scenarios of 'make test' that are played beside each other, since they consist of waiting."""


class Plays:
    """Has scenarios played on several filesystems at once, since they consist of waiting.

    ``hpctk doctor`` examines each filesystem for as long as the first ones take.
    """

    def __init__(
        self, filesystems: dict[str, Filesystem], make_directory: Callable[[str], Path]
    ) -> None:
        self._filesystems = filesystems
        self._make_directory = make_directory
        self._threads = ThreadPoolExecutor(max_workers=6 * len(filesystems))
        self._rehearsals: list[Rehearsal] = []
        self._examined: dict[tuple[Size, str], Future[Examined]] = {}
        self._outcomes: dict[tuple[Scenario, Size, str], Future[Outcome]] = {}
        self._turns: defaultdict[tuple[Scenario, str], Lock] = defaultdict(Lock)
        """Of two sizes on one filesystem, either would meet a host that the other has cut off."""

    def outcome(self, scenario: Scenario, size: Size, name: str) -> Outcome:
        """What a scenario of a size came to on one filesystem."""
        self._examine_all(size)
        for one in self._beside(scenario, size, name):
            for each in self._names(one):
                early = size is not SMALL or self._is_early(one, each)
                asked = (one, each) == (scenario, name)
                if (asked or early) and (one, size, each) not in self._outcomes:
                    future = self._threads.submit(self._play, one, size, each)
                    self._outcomes[one, size, each] = future
        return self._outcomes[scenario, size, name].result()

    def _is_early(self, scenario: Scenario, name: str) -> bool:
        return type(self._filesystems[name]) in IN_MAKE_TEST[scenario]

    def _beside(self, scenario: Scenario, size: Size, name: str) -> tuple[Scenario, ...]:
        """The scenarios that begin with this one: at full size each has the machine to itself."""
        if size is SMALL and self._is_early(scenario, name):
            return next((group for group in _TOGETHER if scenario in group), (scenario,))
        return (scenario,)

    def report(self, size: Size, name: str) -> dict[str, Any]:
        """What doctor says of a filesystem."""
        self._examine_all(size)
        return self._examined[size, name].result()[1]

    def examines(self, name: str) -> bool:
        """Whether there is a report about a filesystem."""
        return name in self._names(scenarios.proven_locks)

    def close(self) -> None:
        """End what is played although no test asks for it any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for rehearsal in self._rehearsals:
            rehearsal.close()
        self._threads.shutdown()

    def _names(self, scenario: Scenario) -> list[str]:
        return [name for name, one in self._filesystems.items() if is_played(type(one), scenario)]

    def _examine_all(self, size: Size) -> None:
        for name in self._names(scenarios.proven_locks):
            if (size, name) not in self._examined:
                self._examined[size, name] = self._threads.submit(self._examine, size, name)

    def _rehearsal(self, scenario: Scenario, size: Size, name: str) -> Rehearsal:
        title = scenario.__name__
        cwd = self._make_directory(f"{title}-{name}")
        made = Rehearsal(self._filesystems[name], cwd, size, f"{title}-{size.items}")
        self._rehearsals.append(made)
        return made

    def _examine(self, size: Size, name: str) -> Examined:
        rehearsal = self._rehearsal(scenarios.proven_locks, size, name)
        report = scenarios.examination(rehearsal)
        SAID[name] = said_by(report)
        return rehearsal, report

    def _play(self, scenario: Scenario, size: Size, name: str) -> Outcome:
        if scenario not in _GENTLE:
            self._examined[size, name].result()
        with self._turns[scenario, name]:
            if scenario is scenarios.proven_locks:
                rehearsal, _ = self._examined[size, name].result()
            else:
                rehearsal = self._rehearsal(scenario, size, name)
            try:
                outcome = scenario(rehearsal)
            finally:
                rehearsal.close()
        MEASURED.append((name, scenario.__name__.replace("_", " "), outcome))
        return outcome
