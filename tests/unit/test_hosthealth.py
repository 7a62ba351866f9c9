"""Sick hosts and workers; when a run stops by itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.control import SILENT_NODE, ControlReader, HealthNotice, give_health_notice
from hpc_toolkit.queue.leases import Liveness
from hpc_toolkit.queue.left import FIRST_ITEMS, parse_max_failures, pause_reason
from hpc_toolkit.queue.state import AGAIN_WEIGHT
from hpc_toolkit.worker.attempts import CONSECUTIVE_FAILURES as MOST
from hpc_toolkit.worker.hosthealth import Health, HostWatch, Key, Opinion, judge, may_wait
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun, ToyWorker

DONE, FAILED, OPEN, NONE = Opinion.DONE, Opinion.FAILED, Opinion.OPEN, Opinion.NONE


def health_of(*opinions: Opinion, others: bool = True) -> Health:
    seen = {Key("items", "000001-0", item): opinion for item, opinion in enumerate(opinions)}
    return judge(dict.fromkeys(seen, 1), seen, others=others)


@pytest.mark.parametrize(
    ("opinions", "health"),
    [
        ([], Health.WELL),
        *(([OPEN] * (MOST - 1), Health.WELL), ([OPEN] * MOST, Health.SUSPECT)),
        *(([DONE] * (MOST - 1) + [OPEN], Health.SUSPECT), ([DONE] * MOST, Health.SICK)),
        ([DONE] * MOST + [FAILED] * 50, Health.SICK),
        ([DONE] * (MOST - 1) + [FAILED], Health.WELL),
        ([FAILED] + [OPEN] * (MOST - 1), Health.WELL),
        *(([NONE] * 50, Health.WELL), ([DONE] * (MOST - 1) + [NONE] * 50, Health.WELL)),
    ],
)
def test_host_is_sick_where_others_finish_what_fails_there(
    opinions: list[Opinion], health: Health
) -> None:
    assert health_of(*opinions) is health


@given(st.lists(st.sampled_from(Opinion), max_size=40), st.booleans())
def test_failing_elsewhere_as_well_never_speaks_against_a_host(
    opinions: list[Opinion], others: bool
) -> None:
    order = [Health.WELL, Health.SUSPECT, Health.SICK]
    before = order.index(health_of(*opinions, others=others))
    for index, opinion in enumerate(opinions):
        if opinion is OPEN:
            changed = [*opinions[:index], FAILED, *opinions[index + 1 :]]
            assert order.index(health_of(*changed, others=others)) <= before


class Simulated:
    """Hosts that take items one after the other; what they see is always new."""

    def __init__(self, hosts: int, sick: set[int], items: int, bad: set[int], seed: int) -> None:
        self.sick, self.bad = sick, bad
        self.random = random.Random(seed)
        self.hosts = list(range(hosts))
        self.pending = dict.fromkeys(range(items), 0)
        self.done: dict[int, int] = {}
        self.failed_on: dict[int, list[int]] = {item: [] for item in range(items)}
        self.failures: dict[int, dict[Key, int]] = {host: {} for host in self.hosts}
        self.left: set[int] = set()

    def health(self, host: int) -> Health:
        failed = self.failures[host]
        opinions = {key: self.opinion(host, key.item) for key in failed}
        others = any(
            may_wait((len(failed), str(host)), (len(self.failures[other]), str(other)))
            for other in self.hosts
            if other not in self.left and other != host
        )
        return judge(failed, opinions, others=others)

    def opinion(self, host: int, item: int) -> Opinion:
        if item in self.done:
            return NONE if self.done[item] == host else DONE
        if any(other != host for other in self.failed_on[item]):
            return FAILED
        return OPEN if item in self.pending else NONE

    def work(self, host: int, max_attempts: int) -> None:
        asked = [item for item in self.pending if self.failed_on[item]]
        item = self.random.choice(
            asked if asked and self.random.random() < 0.5 else list(self.pending)
        )
        if host in self.sick or item in self.bad:
            key = Key("items", "unit", item)
            again = key in self.failures[host]
            weight = AGAIN_WEIGHT if again else 1
            self.failures[host][key] = self.failures[host].get(key, 0) + weight
            self.failed_on[item].append(host)
            self.pending[item] += 1
            if self.pending[item] == max_attempts:
                del self.pending[item]
        else:
            self.failures[host].clear()
            self.done[item] = host
            del self.pending[item]

    def run(self, max_attempts: int = 3) -> None:
        for _ in range(10_000):
            if not self.pending:
                return
            ready = []
            for host in self.hosts:
                if host in self.left:
                    continue
                health = self.health(host)
                if health is Health.SICK:
                    self.left.add(host)
                elif health is Health.WELL:
                    ready.append(host)
            assert ready, "every host waits for another"
            # A sick host is quick: it gets twenty turns while the others get one.
            for host in ready:
                for _ in range(20 if host in self.sick else 1):
                    if self.pending and self.health(host) is Health.WELL:
                        self.work(host, max_attempts)
        pytest.fail("the run does not end")


@given(
    hosts=st.integers(2, 5),
    items=st.integers(1, 80),
    bad=st.sets(st.integers(0, 79), max_size=30),
    ill=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_black_hole_is_stopped_after_8_good_items_and_no_well_host_leaves(
    hosts: int, items: int, bad: set[int], ill: bool, seed: int
) -> None:
    simulated = Simulated(hosts, {0} if ill else set(), items, bad, seed)

    simulated.run()

    assert simulated.left <= simulated.sick
    good = {item for item in range(items) if item not in bad}
    hurt = {item for item in good if 0 in simulated.failed_on[item]}
    assert len(hurt) <= MOST
    if not bad:
        assert good == simulated.done.keys()


class Ward:
    """A run of two hosts, seen by the watch of the worker ``me`` on host ``a``."""

    def __init__(self, root: Path, *, started: float = 0.0, name: str = "me") -> None:
        self.toy = ToyRun(root / "r", 40, unit=1, max_attempts=3)
        self.clock = ManualClock()
        self.me = self.toy.worker(name, host="a", started=started)
        self.other = self.toy.worker("other", host="b")
        self.view = self.toy.view()
        self.liveness = Liveness(self.toy.paths, self.clock, host="a", boot="none", lease_s=1e6)
        own: dict[str, Any] = {"own": self.me.presence.presence, "every_s": 1.0}
        self.watch = HostWatch(view=self.view, liveness=self.liveness, clock=self.clock, **own)

    def attempt(self, who: ToyWorker, items: Any, kind: str = "failed", **fields: Any) -> None:
        for item in items:
            unit = self.toy.unit_name(item)
            generation = 1 + self.toy.stage().claims.generation(unit)
            assert who.claim(unit, generation)
            who.attempt(item, kind, at=self.clock.wall(), **fields)
            who.release(self.clock.wall())
            if kind == "done":
                self.watch.weight = 0
            elif who is self.me:
                self.watch.note_failure(1)

    def notices(self) -> list[tuple[str, bool, bool]]:
        reader = ControlReader(self.toy.paths)
        reader.poll()
        return sorted((one.host, one.whole, one.sure) for one in reader.health)


@pytest.fixture
def ward(fast_dir: Path) -> Ward:
    return Ward(fast_dir)


def test_8_failures_in_a_row_hold_a_worker_until_others_tried_the_items(ward: Ward) -> None:
    ward.attempt(ward.me, range(MOST))
    assert ward.watch.check()
    assert ward.watch.check()
    assert ward.watch.hold
    assert (ward.notices(), ward.watch.reason) == ([("a", True, False)], "")

    ward.attempt(ward.other, range(MOST), "done")

    assert ward.watch.holds()
    reason = "host a is sick: 8 items in a row failed there, and others finished them"
    assert ward.watch.reason == reason
    assert ward.notices() == [("a", True, False), ("a", True, True)]


def test_failures_that_an_item_has_elsewhere_too_let_the_worker_go_on(ward: Ward) -> None:
    ward.attempt(ward.me, range(MOST))
    ward.watch.check()
    ward.attempt(ward.other, [0])

    assert not ward.watch.holds()
    assert (ward.watch.hold, ward.watch.reason) == (False, "")


def test_host_is_not_sick_while_another_of_its_workers_succeeds_but_the_worker_is(
    ward: Ward,
) -> None:
    """One GPU of four that fell off the bus."""
    ward.attempt(ward.me, range(MOST))
    ward.clock.advance(1)
    ward.attempt(ward.toy.worker("mate", host="a"), [30], "done")
    ward.watch.weight = MOST
    assert ward.watch.check()
    ward.attempt(ward.other, range(MOST), "done")

    ward.watch.check()

    assert ward.notices() == [("a", False, False), ("a", False, True)]
    assert ward.watch.reason.startswith("worker me is sick: 8 items")


@pytest.mark.parametrize(("explained", "holds"), [("", False), ("preemption", True)])
def test_deaths_elsewhere_speak_for_the_host_unless_they_are_explained(
    ward: Ward, explained: str, holds: bool
) -> None:
    ward.attempt(ward.me, range(MOST))
    assert ward.other.claim(ward.toy.unit_name(0), 2)
    ward.other.death(0, host="b", explained=explained)
    ward.other.release()

    assert ward.watch.check() is holds


def test_i3_the_silence_of_several_nodes_speaks_for_the_host_and_that_of_one_does_not(
    ward: Ward,
) -> None:
    ward.attempt(ward.me, range(MOST))
    holds = []
    for generation, host in enumerate(["b", "c"], 2):
        assert ward.other.claim(ward.toy.unit_name(0), generation)
        ward.other.death(0, host=host, explained=SILENT_NODE)
        ward.other.release()
        holds.append(ward.watch.check())

    assert holds == [True, False]


def test_notice_of_a_sick_host_is_read_as_it_was_given_and_asks_nobody_to_leave(ward: Ward) -> None:
    given = HealthNotice(
        host="b", worker="other", whole=True, sure=False, at=12.5, reason="8 items"
    )
    give_health_notice(ward.toy.paths, given)
    reader = ControlReader(ward.toy.paths)

    for _ in range(2):
        assert reader.poll() == ([], [])
        assert reader.health == [given]


def test_max_failures_is_a_count_or_a_share() -> None:
    found = [parse_max_failures(text) for text in ("0", "50", "5%", "0.5%")]
    assert found == [(0, False), (50, False), (5.0, True), (0.5, True)]
    for text in ("", "%", "-1", "101%", "nan%", "5 %%", "half", "1.5"):
        with pytest.raises(ConfigError, match="is neither a count nor a share"):
            parse_max_failures(text)


def run_of(fast_dir: Path, kinds: str, *, total: int = 40, **spec: Any) -> ToyRun:
    """A run whose first items ended as ``kinds`` says: d(one), f(ailed), p(ermanent)."""
    toy = ToyRun(fast_dir / "r", total, unit=total, **spec)
    worker = toy.worker("w")
    worker.claim(toy.unit_name(0))
    for item, kind in enumerate(kinds):
        worker.attempt(item, {"d": "done", "f": "failed", "p": "permanent"}[kind])
    worker.release()
    return toy


@pytest.mark.parametrize(
    ("kinds", "limit", "reason"),
    [
        # Fewer failures, or one result, let it go on.
        *((kinds, None, "") for kinds in ("", "d" + "f" * 30, "f" * 30 + "d")),
        ("f" * (FIRST_ITEMS - 1), None, ""),
        ("ppp", "3", ""),
        ("pppp", "3", "4 items of stage 'items' failed; the limit is 3"),
        ("p", "0", "1 item of stage 'items' failed; the limit is 0"),
        ("pppp", "10%", ""),
        ("ppppp", "10%", "5 items of stage 'items' failed; the limit is 10%"),
        ("p" * 40, "100%", ""),
        ("f" * 30, "3", ""),
    ],
)
def test_too_many_failures_at_the_begin_or_beyond_a_limit_are_a_reason_to_pause(
    fast_dir: Path, kinds: str, limit: str | None, reason: str
) -> None:
    assert pause_reason(run_of(fast_dir, kinds, max_failures=limit).stage()) == reason
