"""Workers of one run on one node: one of them watches other nodes, and sees when another ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_toolkit.worker.node import Node
from tests.manualclock import ManualClock

Start = Callable[..., Node]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


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


def test_the_first_worker_of_a_node_watches_for_all(start: Start) -> None:
    first, *others = nodes = [start(name) for name in "abc"]
    for node in nodes:
        node.tick()

    assert [node.observes for node in nodes] == [True, False, False]
    first.tick()
    assert first.mates == {"b", "c"}
    assert [node.mates for node in others] == [set(), set()]


def test_the_end_of_a_worker_is_seen_at_once_and_without_a_file(start: Start) -> None:
    first, second = start("a"), start("b")
    first.tick()
    first.tick()
    assert first.mates == {"b"}

    second.close()  # as the kernel does when a process ends

    assert first.tick()
    assert first.mates == set()


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
    clock.advance(21.0)
    assert second.tick()  # it looks at once
    alone = second.observes
    assert alone
    assert not second.tick()
    assert first.mates == set()  # it may be frozen as well

    first.tick()
    first.tick()
    second.tick()

    assert not second.observes
    assert first.mates == {"b"}


def test_a_run_on_a_disk_of_this_machine_needs_no_observer(start: Start) -> None:
    nodes = [start(name, local=True) for name in "ab"]

    assert [node.observes for node in nodes] == [True, True]
