"""Workers of one run on one node: one of them watches other nodes, and sees when another ends."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_toolkit.queue.assignment import Picker
from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.leases import Liveness
from hpc_toolkit.queue.pacing import Pacing
from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.rundir.layout import read_manifest
from hpc_toolkit.system.processes import readable
from hpc_toolkit.worker import starting
from hpc_toolkit.worker.membership import ShownUnit
from hpc_toolkit.worker.node import Node, watch_if_due
from hpc_toolkit.worker.worker import Worker, WorkerOptions
from tests.manualclock import ManualClock
from tests.replacedcalls import CountedCalls
from tests.toyrun import ToyRun

Start = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path, clock: ManualClock) -> Iterator[Start]:
    """Starts a worker of the run on this node."""
    started: list[Node] = []

    def one(worker: str, *, local: bool = False) -> Node:
        started.append(Node(tmp_path, worker, clock, local=local))
        return started[-1]

    yield one
    for node in started:
        node.close()


def met(start: Start) -> tuple[Node, Node]:
    """An observer and a worker that know of each other."""
    nodes = start("a"), start("b")
    for node in nodes * 2:
        node.tick()
    return nodes


def test_the_first_worker_of_a_node_watches_for_all_and_sees_their_ends_at_once(
    start: Start,
) -> None:
    first, second, third = nodes = [start(name) for name in "abc"]
    for node in nodes:
        node.tick()

    assert [node.observes for node in nodes] == [True, False, False]
    first.tick()
    assert first.mates == {"b", "c"}
    assert (second.mates, third.mates) == (set(), set())

    second.close()  # as the kernel does when a process ends

    assert first.tick()
    assert first.mates == {"c"}


def test_when_the_observer_ends_another_worker_takes_its_place(start: Start) -> None:
    first, second, third = start("a"), start("b"), start("c")
    first.tick()
    for node in (second, third):
        node.tick()

    first.close()

    assert second.tick()
    assert third.tick()
    assert (second.observes, third.observes) == (True, False)
    second.tick()
    second.tick()
    assert second.mates == {"c"}


Crew = list[tuple[Node, Picker, Pacing, ControlReader]]


@pytest.fixture
def toy(fast_dir: Path) -> ToyRun:
    return ToyRun(fast_dir / "run", sealed=False)


@pytest.fixture
def crew(start: Start, toy: ToyRun, clock: ManualClock) -> Crew:
    """Three of 4,096 workers, on one of 512 nodes; each looks at ``head`` every 205 s by itself."""
    found = []
    for name in "abc":
        worker, node = toy.worker(f"n1-{name}", host="n1"), start(name)
        liveness = Liveness(toy.paths, clock, host="n1", boot="b", lease_s=180.0)
        picker = Picker(toy.view(), liveness, clock, worker.name, shared=True)
        nodes = 512 if name == "a" else 4096
        pacing = Pacing(clock, local=False, workers=4096, lease_s=180.0, seed=name, watchers=nodes)
        picker.look_for_items(pacing)
        pacing.worked()
        found.append((node, picker, pacing, ControlReader(toy.paths)))
    return found


def due(crew: Crew) -> list[bool]:
    for one in crew * 2:
        watch_if_due(*one)
    return [pacing.poll_due for _, _, pacing, _ in crew]


def test_one_worker_that_leaves_shows_all_others_of_its_node_that_no_item_is_left(
    crew: Crew,
) -> None:
    assert due(crew) == [False] * 3
    crew.pop()[0].close()
    assert due(crew) == [True, False]  # the observer, which then leaves too
    crew.pop(0)[0].close()
    assert due(crew) == [True]


def test_a_busy_observer_looks_for_new_items_while_another_worker_of_its_node_waits(
    crew: Crew, toy: ToyRun, clock: ManualClock
) -> None:
    (_, first, _, _), (_, second, waiting, _), _ = crew
    due(crew)

    def heads(seconds: int) -> int:
        with CountedCalls() as counted:
            for _ in range(seconds):
                clock.advance(1.0)
                due(crew)
        return counted.opened().count("head")

    assert heads(60) == 0  # nobody waits
    assert not waiting.scan_due()
    assert waiting.waits
    assert 1 <= heads(60) <= 60
    toy.log().seal()
    before = second.entries
    heads(60)
    assert (first.entries, second.entries) == (before + 1, before)
    assert waiting.poll_due
    waiting.polled(1)
    assert not due(crew)[1]  # it was told once


def test_a_worker_of_short_items_says_at_most_once_a_second_that_it_waits(
    start: Start, clock: ManualClock
) -> None:
    first, second = met(start)
    said = []
    for step in range(40):
        second.say_whether_waiting(step % 2 == 1)
        second.tick()
        first.tick()
        said.append(first.others_wait_since)
        clock.advance(0.1)

    assert said[11] is not None
    assert len({*said}) <= 5
    assert not second.wake_fds or not readable(*second.wake_fds, timeout_s=0.0)


def test_a_unit_is_shown_soon_after_its_claim_but_not_each_of_many_short_ones(
    clock: ManualClock,
) -> None:
    """After a power cut, only what the server has is known."""
    unit, shown = ShownUnit(clock), list[tuple[int, str]]()
    for second in range(60):
        claim = "" if second < 12 else "long" if second < 35 else f"short {second}"
        if second % 15 == 0 or unit.is_due(claim):  # a heartbeat is due every 15 s
            unit.show(claim)
            shown.append((second, claim))
        clock.advance(1.0)

    long = [(12, "long"), (15, "long"), (30, "long")]
    assert shown == [(0, ""), *long, (35, "short 35"), (45, "short 45"), (55, "short 55")]


def test_news_reach_all_workers_of_the_node_once(start: Start) -> None:
    first, second = start("a"), start("b")
    first.tick()
    assert second.tick()  # that it started: there may be requests
    assert not second.tick()

    first.tell(4096, news=True)

    assert second.tick()
    assert second.workers == 4096
    assert not second.tick()


def test_a_worker_whose_observer_is_frozen_watches_itself(start: Start, clock: ManualClock) -> None:
    first, second = start("a"), start("b")
    first.tick()
    second.tick()
    looks = []
    for _ in range(21):
        clock.advance(1.0)
        looks.append(second.tick())
    alone = second.observes
    assert alone
    assert sum(looks) == 1  # it looks at once

    first.tick()
    first.tick()
    second.tick()

    assert not second.observes
    assert first.mates == {"b"}


def test_an_observer_counts_a_frozen_worker_no_longer(start: Start, clock: ManualClock) -> None:
    first, second = met(start)
    assert (first.mates, second.mates) == ({"b"}, set())

    for _ in range(21):
        clock.advance(1.0)
        first.tick()

    assert first.mates == set()
    assert first.met == {"b"}


def test_workers_that_wait_for_their_server_together_do_not_all_look(
    start: Start, clock: ManualClock
) -> None:
    """Each would read the files of all the others as soon as the server answers again."""
    first, second = met(start)

    clock.advance(60.0)

    assert not second.tick()
    assert not second.observes
    assert not first.tick()
    assert first.mates == {"b"}


def test_news_for_which_there_was_no_room_are_told_later(start: Start) -> None:
    """A request to drain must reach a worker that was stopped for long."""
    first, second = met(start)
    for _ in range(5000):  # more than the kernel keeps
        first.tell(2, news=False)
    first.tell(2, news=True)
    assert not second.tick()

    first.tell(2, news=False)

    assert second.tick()


def test_a_worker_starts_where_no_socket_can_be_made(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(socket, "socket", refuse)
    node = start("a")

    assert not node.tick()
    assert node.observes


def test_workers_of_a_host_with_a_long_name_meet(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTK_HOST", "node." * 30)

    assert [start(name).observes for name in "ab"] == [True, False]


def test_a_worker_that_meets_nobody_does_not_sleep(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may have taken the name, and a worker calls this for each result."""
    monkeypatch.setattr(starting, "is_own", lambda _: False)
    first, second = start("a"), start("b")
    assert first.observes
    assert second.observes
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)

    second.tick()

    assert slept == []


def test_a_run_on_a_disk_of_this_machine_needs_no_observer(start: Start) -> None:
    nodes = [start(name, local=True) for name in "ab"]

    assert [node.observes for node in nodes] == [True, True]


BEAT_S = 10.0


class Beating:
    """A worker that makes progress, and the heartbeats that it sent."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        toy = ToyRun(root / "r", 1)
        self.clock = ManualClock()
        self.worker = Worker(toy.paths, read_manifest(toy.root), WorkerOptions(), self.clock)
        self.path = toy.paths.worker(self.worker.name)
        self.sent_at: list[float] = []
        self._real = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, fd: int) -> None:
        assert os.path.samestat(os.fstat(fd), self.path.stat())
        self.sent_at.append(self.clock.monotonic())
        self._real(fd)

    def work(self, seconds: float) -> None:
        """Finish two items a second."""
        for _ in range(int(2 * seconds)):
            self.clock.advance(0.5)
            self.worker._runner._tally.done += 1
            self.worker._tick()


@pytest.fixture
def beating(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beating]:
    monkeypatch.setenv("HPCTK_FILESYSTEM", "shared")
    one = Beating(fast_dir, monkeypatch)
    yield one
    one.worker.drop()


def test_heartbeats_of_a_busy_worker_are_sent_every_10_s_and_no_more_often(
    beating: Beating,
) -> None:
    began = beating.clock.monotonic()
    beating.work(60.0)

    assert beating.sent_at[0] - began < 1.0  # that it beats for its node
    gaps = [late - early for early, late in itertools.pairwise(beating.sent_at)]
    assert gaps == [BEAT_S] * 5
    found = read_presence(beating.path)
    assert found is not None
    assert found.heartbeat > 50  # progress in between is written without a sync


def test_a_heartbeat_that_cannot_be_sent_ends_the_worker(
    beating: Beating, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fails)

    with pytest.raises(OSError, match="Input/output error"):
        beating.work(BEAT_S)
