"""Where nodes meet, and rounds of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpc_toolkit.errors import RunError
from hpc_toolkit.training.launch.meeting import Address, find, publish
from hpc_toolkit.training.launch.plan import Plan
from hpc_toolkit.training.launch.rendezvous import Place, Rounds
from tests.manualclock import ManualClock


class SharedStore:
    """Stands in for torch's store: a dictionary that fails once it is gone."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gone = False
        self.asked = 0

    def set(self, key: str, value: str) -> None:
        self._ask()
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._ask()
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._ask()
        return all(key in self.values for key in keys)

    def _ask(self) -> None:
        self.asked += 1
        if self.gone:
            message = "Connection was likely closed"
            raise RuntimeError(message)


class Ports:
    """Opens stores for ranks on ports that nobody had."""

    def __init__(self) -> None:
        self.opened = 0

    def __call__(self) -> tuple[Address, Callable[[], object]]:
        self.opened += 1
        return Address("n0", 40000 + self.opened), lambda: None


def rounds_of(
    store: SharedStore,
    node: int,
    nodes: int,
    clock: ManualClock,
    ports: Ports | None = None,
    *,
    passing: bool = False,
) -> Rounds:
    """One node's part; with ``passing`` time passes while it waits for others, who never come."""
    of: dict[str, Any] = {"form": "agent", "launch": "12.0.0", "meeting": "directory"}
    of |= {"nodes": nodes, "node_rank": node, "ranks": node + 1, "backend": "gloo"}
    plan = Plan(**of, start_timeout_s=60)
    return Rounds(
        plan=plan,
        store=store,
        open_store=ports or Ports(),
        host=f"n{node}",
        clock=clock.monotonic,
        sleep=clock.advance if passing else lambda _seconds: time.sleep(0.001),
    )


def together(*parts: Rounds) -> list[Place]:
    """What each node gets from joining the next round at once."""
    found: dict[int, Place] = {}

    def join(number: int, part: Rounds) -> None:
        found[number] = part.join()

    threads = [threading.Thread(target=join, args=pair) for pair in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(parts))]


class Pair(NamedTuple):
    """Two nodes in their first round."""

    store: SharedStore
    clock: ManualClock
    first: Rounds
    second: Rounds


@pytest.fixture
def pair() -> Pair:
    store, clock = SharedStore(), ManualClock()
    first, second = (rounds_of(store, node, 2, clock) for node in range(2))
    together(first, second)
    return Pair(store, clock, first, second)


def test_a_node_that_wants_a_new_round_is_seen_by_the_others(pair: Pair) -> None:
    store, clock, first, second = pair
    clock.advance(1)
    assert not first.wanted()

    waiting = threading.Thread(target=second.join)
    waiting.start()
    while "round/1/node/1" not in store.values:
        time.sleep(0.001)
    clock.advance(1)

    assert first.wanted()
    first.join()
    waiting.join()
    clock.advance(1)
    assert not first.wanted()


@pytest.mark.parametrize("waiting", [False, True])
def test_a_node_in_the_place_of_a_lost_one_is_in_the_next_round_with_the_others(
    waiting: bool,
) -> None:
    store, clock, ports = SharedStore(), ManualClock(), Ports()
    first, second = (rounds_of(store, node, 2, clock, ports) for node in range(2))
    together(first, second)
    together(first, second)
    waits = threading.Thread(target=first.join, daemon=True)
    if waiting:
        # Its ranks failed with those of the lost node.
        waits.start()
        while "round/2/node/0" not in store.values:
            time.sleep(0.001)

    place = rounds_of(store, 1, 2, clock, ports)
    comes = threading.Thread(target=place.join, daemon=True)
    comes.start()
    while "round/2/node/1" not in store.values:
        assert comes.is_alive(), place.number
        time.sleep(0.001)
    clock.advance(1)
    if not waiting:
        assert first.wanted()
        waits.start()
    waits.join()
    comes.join()

    assert first.number == place.number == 2


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    store, clock = SharedStore(), ManualClock()

    with pytest.raises(RunError, match="node 1, 2 of 3 did not come within 1 min 00 s"):
        rounds_of(store, 0, 3, clock, passing=True).join()
    with pytest.raises(RunError, match="node 0 of 2 did not come within"):
        rounds_of(SharedStore(), 1, 2, clock, passing=True).join()
    # The address of an earlier start is not taken for this one.
    place = tmp_path / "rendezvous"
    publish(place / "12.0.0", Address("n0", 1))
    with pytest.raises(RunError, match=r"did not publish its address as .*12\.1\.0"):
        find(place / "12.1.0", timeout_s=30, monotonic=clock.monotonic, sleep=clock.advance)


def test_node_0_holds_the_store_until_those_that_came_have_left(pair: Pair) -> None:
    _, clock, first, second = pair
    first.sleep = clock.advance
    started = clock.monotonic()

    first.leave(5)
    waited = clock.monotonic() - started
    second.leave(5)
    first.leave(5)

    assert waited >= 5
    assert clock.monotonic() - started == waited
    # Nobody waits for a node that never came.
    rounds_of(SharedStore(), 0, 2, clock, passing=True).leave(5)
    assert clock.monotonic() - started == waited
