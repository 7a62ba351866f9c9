"""What happens to a run on a shared filesystem; each scenario ends with a whole run, or fails."""

from __future__ import annotations

import json
import math
import signal
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.sharedfs.hosts import HOSTS
from tests.sharedfs.rehearsal import HIT, SPARED

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sharedfs.outcome import Ended, Outcome
    from tests.sharedfs.ranks import Ranks
    from tests.sharedfs.rehearsal import Rehearsal

    Scenario = Callable[[Rehearsal], Outcome]

_ROUNDS = 3
_FIRST_ITEMS, _LONG_ITEMS = 24, 5
_MOST_ASKS = 12
_NEVER_S = 600.0
_AFTER_LOCKS_S = 20.0
"""A busy machine may take seconds to free the locks of a killed process; the lease comes later."""
_ALONE_S, _ALONE_ITEM_S = 20.0, 0.8
"""For so much longer than the lease has a host alone work: its workers look at the silent ones
every 10 s, and must still have items then."""
_COMPLETE, _LEFT = 0, 75


def one_machine(run: Rehearsal) -> Outcome:
    """Nothing happens, but both mounts are on hosts of one name: a machine that mounts it twice.

    At the end some workers wait for the items of others, and look whether those live.
    """
    run.names = dict.fromkeys(HOSTS, "machine")
    # Nobody is to be silent for so long, however busy this machine is.
    run.lease_s = _NEVER_S
    began = time.monotonic()
    run.init(3 * run.size.workers, seconds=15 * run.size.seconds)
    ranks = [run.work(host) for host in HOSTS]
    return run.outcome(_all_end(run, ranks), time.monotonic() - began)


def kills(run: Rehearsal) -> Outcome:
    """A worker of each host is killed in the middle of its unit; its command starts another."""
    run.lease_s = _AFTER_LOCKS_S
    run.init(run.size.items, "--open")
    ranks = [run.work(host) for host in HOSTS]
    run.until_begun(run.size.items // 4)
    began, since = time.monotonic(), time.time()
    for host in HOSTS:
        with run.held(host, feed=run.size.items // 4) as workers:
            run.hosts.signal(host, workers[:1], signal.SIGKILL)
    run.hpctk(SPARED, "seal", run.run)
    return run.outcome(_all_end(run, ranks), time.monotonic() - began, since=since)


def takeover(run: Rehearsal) -> Outcome:
    """The last worker but one of a host dies, and then the last one."""
    run.lease_s = _AFTER_LOCKS_S
    run.init(_FIRST_ITEMS, "--open")
    first, second = run.work(HIT, 1), run.work(HIT, 1)
    run.until_begun(4)
    began = time.monotonic()
    with run.held(HIT, feed=_FIRST_ITEMS) as workers:
        (victim,) = (one for one in (first, second) if workers[0] in one.family())
        victim.kill()
    other = second if victim is first else first
    run.until(lambda: _deaths(run) == 1, "a takeover on the same host")
    near_s = time.monotonic() - began
    spared = run.work(SPARED, 1)
    run.until(lambda: run.living(SPARED), f"a worker of {SPARED}")
    run.item_s = 10 * run.size.seconds
    run.add(_LONG_ITEMS)
    with run.held(HIT, feed=_LONG_ITEMS) as workers:
        assert set(workers) <= set(other.family()), f"{workers} are busy, not {other}"
        gone = time.monotonic()
        other.kill()
    assert run.living(HIT) == []
    run.hpctk(SPARED, "seal", run.run)
    ended = _all_end(run, [spared])
    far_s = time.monotonic() - gone
    notes: dict[str, Any] = {
        "near_s": near_s,
        "far_s": far_s,
        "lease_s": run.lease_s,
        "trace": run.told(),
    }
    return run.outcome(ended, time.monotonic() - began, **notes, records=run.records())


def additions(run: Rehearsal) -> Outcome:
    """Items are added from both hosts while all workers wait; then the run is sealed."""
    # A living worker that is taken for dead would leave a claim that nobody gives back.
    run.lease_s = _NEVER_S
    each = run.size.items // (_ROUNDS + 1)
    run.init(each, "--open")
    ranks = [run.work(host) for host in HOSTS]
    began = time.monotonic()
    waits, said = [], ""
    status = partial(run.hpctk, SPARED, "status", run.run, "--json")
    for number in range(_ROUNDS):
        run.until(lambda: run.begun() and run.idle(), "workers that wait")
        # The other host may see the last lines of a journal later than the counts beside them.
        said = run.until(lambda: json.loads(status().out)["reason"], "why nothing moves")
        before = len(run.begun())
        run.hpctk(HOSTS[number % 2], "add", run.run, "--items", run.items(each))
        added = time.monotonic()
        run.until_begun(before + 1)
        waits.append(time.monotonic() - added)
    run.until(run.idle, "workers that wait")
    run.hpctk(HIT, "seal", run.run)
    ended = _all_end(run, ranks)
    return run.outcome(ended, time.monotonic() - began, waits=waits, said=said)


def campaign(run: Rehearsal) -> Outcome:
    """The coordinator decides on one host and adds what it asks for while the workers of both wait.

    All must wake for each ask, since its items wait for each other.
    """
    run.lease_s = _NEVER_S
    run.init_campaign(min(_MOST_ASKS, run.size.items // _FIRST_ITEMS))
    ranks = [run.work(host) for host in HOSTS]
    run.until(lambda: len(run.presences()) == len(HOSTS) * run.size.workers, "all workers")
    began = time.monotonic()
    coordinator = run.start(HIT, "campaign", "coordinate", run.run)
    ended = _all_end(run, [coordinator, *ranks])
    (trials,) = (text.splitlines() for text in run.read("bandit/trials.jsonl").values())
    arms = [
        arm for line in map(json.loads, trials) if line["type"] == "ask" for arm in line["arms"]
    ]
    return run.outcome(ended, time.monotonic() - began, arms=arms, shares=_shares(run))


def _shares(run: Rehearsal) -> set[int]:
    """How many results of the bandit's stage a worker has."""
    done = [line for line in run.records() if line["type"] == "done"]
    found = Counter(line["by"] for line in done if line["unit"].startswith("tasks/"))
    return {found[worker] for worker in run.presences()}


def examination(run: Rehearsal) -> dict[str, Any]:
    """Make the run of :func:`proven_locks`, and have both hosts examine it."""
    run.item_s = 10 * run.size.seconds
    run.init(1, "--open")
    return run.examine()


def proven_locks(run: Rehearsal) -> Outcome:
    """The worker of a host dies; both hosts have examined the run's directory before.

    First it falls silent: where locks reach the other host, the one that it still holds tells that
    it is not dead.
    """
    ranks = run.work(HIT, 1)
    with run.held(HIT, feed=1):
        lease_s = _NEVER_S if run.filesystem.locks_reach else run.lease_s
        spared = run.work(SPARED, 1, lease_s=lease_s)
        run.until(lambda: len(run.presences()) == len(HOSTS), f"the worker of {SPARED}")
        began = time.monotonic()
        ranks.kill()
    run.hpctk(SPARED, "seal", run.run)
    return run.outcome(_all_end(run, [spared]), time.monotonic() - began)


def partition(run: Rehearsal) -> Outcome:
    """A host is cut off for longer than the lease, and comes back after the run was gathered."""
    _outlast_the_server(run)
    run.init(run.size.items, "--open")
    cut_off, spared = run.work(HIT), run.work(SPARED)
    run.until_begun(run.size.items // 4)
    with run.held(HIT, feed=run.size.items // 4):
        began, since = time.monotonic(), time.time()
        run.filesystem.cut(HIT)
    try:
        run.hpctk(SPARED, "seal", run.run)
        ended = _all_end(run, [spared])
        whole_s = time.monotonic() - began
        published = run.outcome(ended, whole_s, since=since, living=(SPARED,))
        time.sleep(max(0.0, run.size.silence_s - (time.monotonic() - began)))
    finally:
        run.filesystem.heal(HIT)
    healed = time.monotonic()
    ended += _all_end(run, [cut_off], codes=(_COMPLETE, _LEFT))
    back_s = time.monotonic() - healed
    notes: dict[str, Any] = {"published": published.rows, "back_s": back_s}
    found = run.outcome(ended, whole_s, **notes)
    # What the host did since it is back is no standstill of the other one.
    return replace(found, standstill_s=published.standstill_s, taken_over_s=published.taken_over_s)


def _outlast_the_server(run: Rehearsal) -> None:
    """Have nobody taken for dead who waits for the server, as with the default lease of 180 s."""
    run.lease_s += run.filesystem.holds_up_s(run.size)


def power_cut(run: Rehearsal) -> Outcome:
    """A host loses its power, and stays away until the other one has finished the run."""
    return _cut_power(run, proven=False)


def power_cut_of_proven_locks(run: Rehearsal) -> Outcome:
    """The same after both hosts examined the directory, so that free locks are looked for."""
    return _cut_power(run, proven=True)


def power_cut_of_a_graph(run: Rehearsal) -> Outcome:
    """The same with items that follow others; the notes say which began before those were done."""
    found = _cut_power(run, proven=False, pairs=True)
    first = {("start", ""): 0.0}
    for what, item, *_, at in run.told():
        first[what, item] = min(float(at), first.get((what, item), math.inf))
    early = [
        item
        for what, item in first
        if what == "start"
        and item.isdecimal()
        and int(item) % 2
        # What the lost host told last is lost with it.
        and first[what, item] < first.get(("end", str(int(item) - 1)), 0.0)
    ]
    return replace(found, notes={**found.notes, "early": early})


def _cut_power(run: Rehearsal, *, proven: bool, pairs: bool = False) -> Outcome:
    _outlast_the_server(run)
    run.item_s = max(run.size.seconds, _ALONE_ITEM_S)
    alone = math.ceil(run.size.workers * (run.lease_s + _ALONE_S) / run.item_s)
    together = alone // 4
    run.init((together + alone) // 2 * 2, pairs=pairs)
    if proven:
        assert run.examine()["locks_proven"], "doctor proved no locks"
    lost, spared = run.work(HIT), run.work(SPARED)
    run.until_begun(together)
    run.until(lambda: run.busy(HIT), f"a worker of {HIT} in the middle of an item")
    began, since = time.monotonic(), time.time()
    run.filesystem.power_off(HIT)
    try:
        lost.process.kill()
        ended = _all_end(run, [spared])
        seconds = time.monotonic() - began
        return run.outcome(ended, seconds, since=since, living=(SPARED,))
    finally:
        run.filesystem.power_on(HIT)


def server_restart(run: Rehearsal) -> Outcome:
    """The server is killed and started again; workers that leave are started again, as by Slurm."""

    def restart() -> str | None:
        run.filesystem.crash()
        told = None
        if not run.filesystem.hangs:
            told = run.hpctk(HIT, "status", run.run, codes=(_LEFT,)).err
        run.filesystem.restart()
        return told

    return _while_the_server(restart, run)


def orderly_restart(run: Rehearsal) -> Outcome:
    """The server's service is ended and started again, as its administrator does it."""
    return _while_the_server(run.filesystem.restart_in_order, run)


def _while_the_server(restart: Callable[[], str | None], run: Rehearsal) -> Outcome:
    run.init(run.size.items)
    ranks = [run.work(host) for host in HOSTS]
    run.until_begun(run.size.items // 4)
    began, since = time.monotonic(), time.time()
    told = restart()
    ended: list[Ended] = []
    while ranks:
        left = _all_end(run, ranks, codes=(_COMPLETE, _LEFT))
        ended += left
        assert time.monotonic() - began < run.size.limit_s, f"workers leave all the time: {left}"
        ranks = [run.work(one.host) for one in left if one.code == _LEFT]
    return run.outcome(ended, time.monotonic() - began, since=since, told=told)


def _all_end(
    run: Rehearsal, ranks: list[Ranks], codes: tuple[int, ...] = (_COMPLETE,)
) -> list[Ended]:
    """Wait until all workers ended, by themselves and as expected."""
    ended = [one.ended(limit_s=run.size.limit_s) for one in ranks]
    for one in ended:
        assert one.code in codes, f"workers of {one.host} ended with {one.code}: {one.err}"
    return ended


def _deaths(run: Rehearsal) -> int:
    return sum(record["type"] == "death" for record in run.records())
