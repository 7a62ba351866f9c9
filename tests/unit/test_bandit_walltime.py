"""How long a search takes on several GPUs, against exact answers and a clock that ticks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.bandit.bench.replay import finish_times
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.planning.simulation.cluster import simulate
from hpc_toolkit.planning.simulation.scenario import Group, Scenario

if TYPE_CHECKING:
    from hpc_toolkit.bandit.bench.replay import Order


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Durations of some pulls, and after how many results each was asked."""
    pulls = draw(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), max_size=6))
    told = sorted(draw(st.integers(0, pull)) for pull in range(len(pulls)))
    return pulls, [min(number, pull) for pull, number in enumerate(told)]


def ticking(pulls: list[list[int]], told_before: list[int], gpus: int, order: Order) -> list[int]:
    """The same by a clock that ticks, and lists instead of heaps."""
    left = [sorted(seconds, reverse=True) for seconds in pulls]
    running: list[tuple[int, int]] = []
    ends = [0] * len(pulls)
    for now in range(200):
        running = [(end, pull) for end, pull in running if end > now]
        busy = {pull for _, pull in running}
        finished = [not left[pull] and pull not in busy for pull in range(len(pulls))]
        told = finished.index(False) if False in finished else len(finished)
        while len(running) < gpus:
            # Asked in order, so an earlier pull that waits holds those after it back.
            asked = 0
            while asked < len(pulls) and told_before[asked] <= told:
                asked += 1
            some = [pull for pull in range(asked) if left[pull]]
            if not some:
                break
            first = some[0] if order == "pull" else max(some, key=lambda p: (left[p][0], -p))
            ends[first] = max(ends[first], now + left[first][0])
            running.append((now + left[first].pop(0), first))
    return ends


@given(searches(), st.integers(1, 5), st.sampled_from(["pull", "longest"]))
def test_finish_times_are_those_of_a_clock_that_ticks(
    search: tuple[list[list[int]], list[int]], gpus: int, order: Order
) -> None:
    pulls, told_before = search

    found = finish_times(pulls, told_before, gpus, order=order)

    assert found.tolist() == ticking(pulls, told_before, gpus, order)


@given(searches())
def test_one_gpu_takes_the_sum_and_many_take_the_longest_of_each_wait(
    search: tuple[list[list[int]], list[int]],
) -> None:
    pulls, told_before = search
    total = sum(map(sum, pulls))

    assert finish_times(pulls, told_before, 1).max(initial=0.0) == total
    at_once = finish_times(pulls, [0] * len(pulls), total + 1)
    assert at_once.tolist() == [max(seconds) for seconds in pulls]
    one_by_one = finish_times(pulls, range(len(pulls)), total + 1)
    assert one_by_one.tolist() == np.cumsum([max(seconds) for seconds in pulls]).tolist()


def test_a_pull_of_nothing_ends_when_it_may_begin() -> None:
    assert finish_times([[3.0], [], [2.0]], [0, 1, 2], 1).tolist() == [3.0, 3.0, 5.0]


def test_longest_first_beats_the_order_of_pulls_where_one_evaluation_dominates() -> None:
    pulls = [[1.0] * 8, [8.0]]

    assert finish_times(pulls, [0, 0], 2).max() == 12.0
    assert finish_times(pulls, [0, 0], 2, order="longest").max() == 8.0


def test_finish_times_are_close_to_those_of_the_queues_own_code() -> None:
    """The queue does not begin with the longest, so no single evaluation may dominate here."""
    seconds = np.sort(np.random.default_rng(3).lognormal(4.0, 0.8, 120))[::-1].tolist()
    groups = tuple(Group(1, 0.0, 0.0, one) for one in seconds)

    queue = simulate(Scenario(groups=groups, workers=4))
    found = finish_times([seconds], [0], 4)

    assert queue.makespan_s == pytest.approx(found.max(), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0]], [0], 0), "0 GPUs"),
        (([[1.0]], [], 1), "1 pulls, but what was told before 0"),
        (([[1.0], [1.0]], [0, 2], 1), "pull 1 waits for 2 results"),
        (([[1.0, -1.0]], [0], 1), "pull 0: durations"),
        (([[math.nan]], [0], 1), "pull 0: durations"),
        (([[math.inf]], [0], 1), "pull 0: durations"),
    ],
)
def test_times_of_what_cannot_be_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        finish_times(*arguments)
