"""Orders in which two or three coordinators can make their log entries (rules R2 and R14).

Each coordinator is a process that stops before it creates an entry; one at a time goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.faults import tally
from tests.faults.campaignrun import CAMPAIGN, asked, make_campaign, play, table_of
from tests.faults.cut import ENTRIES, Commands, Going, copy_of
from tests.model.values import Choices, every

BEFORE_ASKS = 3
"""Entries of the stage before: its items, its seal and its table."""
SMALL = {**CAMPAIGN, "search": {"policy": "gp-ucb", "budget": 2, "pending": 1}}


class Chance(Choices):
    """Choices by chance, the same every time."""

    def __init__(self, seed: int) -> None:
        super().__init__([])
        self._random = random.Random(seed)

    def of(self, count: int) -> int:
        self.made.append((self._random.randrange(count), count))
        return self.made[-1][0]


Orders = Callable[[Callable[[Choices], None]], Iterator[None]]
"""Calls a function once for each order that is tried."""


def some(number: int) -> Orders:
    def tried(run: Callable[[Choices], None]) -> Iterator[None]:
        for seed in range(number):
            run(Chance(seed))
            yield

    return tried


def begin(call: Commands, run: Path, entries: int) -> None:
    """Let one coordinator make so many entries, and die before the next."""
    one = call.start("campaign", "coordinate", "run", root=run, at=1, way=ENTRIES)
    for _ in range(entries):
        assert one.frozen()
        one.wake()
    assert one.frozen()
    one.kill()


SOAK = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("coordinators", "kills", "orders", "begun"),
    [
        (3, 1, some(3), 0),
        pytest.param(2, 0, some(200), 0, marks=SOAK),
        *(pytest.param(2, kills, every, BEFORE_ASKS, marks=SOAK) for kills in (0, 1)),
        *(pytest.param(3, kills, some(100), 0, marks=SOAK) for kills in (1, 2)),
    ],
)
def test_r14_in_any_order_of_entries_each_ask_is_made_once(
    fast_dir: Path, coordinators: int, kills: int, orders: Orders, begun: int
) -> None:
    """Whoever is killed on the way; from the first ask on, every order is tried."""
    home = fast_dir
    make_campaign(home / "template", SMALL)
    call = Commands(home, partial(play, root=home / "run"))
    copy_of(home / "template", home / "run")
    assert call("campaign", "coordinate", "run", root=home / "run").code == 0
    sequence, rows = asked(home / "run"), table_of(home / "run")
    copy_of(home / "template", home / "run")
    begin(call, home / "run", begun)
    copy_of(home / "run", home / "begun")

    def check(order: Choices) -> None:
        copy_of(home / "begun", home / "run")
        codes = take_turns(call, home / "run", order, coordinators, kills)
        said = f"order {order.made}: {codes}"
        assert asked(home / "run") == sequence[: len(asked(home / "run"))], said
        assert 0 in codes or -9 in codes, said
        assert set(codes) <= {0, 75, -9}, said
        assert call("campaign", "coordinate", "run", root=home / "run").code == 0, said
        assert (asked(home / "run"), table_of(home / "run")) == (sequence, rows), said

    count = sum(1 for _ in orders(check))
    assert count > 2
    kind = f"{coordinators} coordinators, {kills} killed"
    tally.count(kind, changes=0, cuts=count)


def take_turns(
    call: Commands, run: Path, order: Choices, coordinators: int, kills: int
) -> list[int]:
    """Let one after the other make its next entry, or die before it; their exit codes."""
    going: list[Going] = []
    codes: list[int] = []
    left = coordinators
    while going or left:
        # Those who wait before an entry may go on or be killed; another one may be started.
        may_die = len(going) if kills else 0
        chosen = order.of(len(going) + may_die + (left > 0))
        if chosen < len(going):
            one = going.pop(chosen)
            one.wake()
        elif chosen < len(going) + may_die:
            going.pop(chosen - len(going)).kill()
            codes.append(-9)
            kills -= 1
            continue
        else:
            left -= 1
            one = call.start("campaign", "coordinate", "run", root=run, at=1, way=ENTRIES)
        if one.frozen():
            going.append(one)
        else:
            ended = one.end()
            assert "Traceback" not in ended.err, f"order {order.made}: {ended}"
            codes.append(ended.code)
    return codes


def test_orders_are_all_there_once() -> None:
    def order(choices: Choices) -> tuple[int, int]:
        first = choices.of(2)
        return first, choices.of(3 if first else 1)

    assert [*every(order)] == [(0, 0), (1, 0), (1, 1), (1, 2)]
