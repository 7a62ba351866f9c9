"""What single rules choose, and the random numbers that they draw."""

from __future__ import annotations

import ast
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import hpc_toolkit.bandit
from hpc_toolkit.bandit import Arm, ArmTable, Observation, make_policy
from hpc_toolkit.bandit.gp import space_filling_order
from hpc_toolkit.bandit.rule import Stream, first_best

PACKAGE = Path(hpc_toolkit.bandit.__file__).parent
LINE = ArmTable(tuple(Arm(f"a{k}", f"g{k % 3}", (float(k),)) for k in range(12)), ("layer",))


def test_first_best_takes_the_first_of_values_that_differ_by_rounding() -> None:
    assert first_best([0.1, 0.3, 0.1 + 0.2, 0.3 - 1e-9]) == 1
    assert first_best([0.3, 0.3 + 1e-11]) == 1


def test_space_filling_order_takes_the_farthest_point_and_the_lowest_of_equals() -> None:
    points = np.array([[0.0], [1.0], [2.0], [3.0], [4.0]])
    seed = next(s for s in range(99) if space_filling_order(points, s, 1) == [2])

    assert space_filling_order(points, seed, 5) == [2, 0, 4, 1, 3]


@pytest.mark.parametrize(("beta", "places"), [(0, range(6, 11)), (2, range(91, 101))])
def test_gp_ucb_explores_as_far_as_beta_says(beta: float, places: range) -> None:
    line = [Arm(f"g/{index}", "g", (float(index),)) for index in range(101)]
    table = ArmTable(tuple(line), ("x",))
    policy = make_policy("gp-ucb", table, 0, beta=beta)
    for index in (0, 4, 8, 12, 16, 20):
        policy.tell(Observation(table.ids[index], {"task": -abs(index - 8) / 10}))

    assert table.index(policy.ask(1)[0].arm) in places


def test_streams_of_a_seed_share_no_numbers_whatever_follows_theirs() -> None:
    first = {stream: np.random.default_rng([5, stream]).random() for stream in Stream}
    later = {stream: np.random.default_rng([5, stream, 3]).random() for stream in Stream}

    for one, other in combinations([*first.values(), *later.values()], 2):
        assert one != other


def test_generators_of_the_package_name_their_stream() -> None:
    """All but the order of ``random``, whose searches are recorded."""
    unnamed = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("default_rng"):
                words = ast.unparse(node.args[0])
                if "Stream." not in words and "stream" not in words:
                    unnamed.append((path.name, words))

    assert unnamed == [("rule.py", "[history.seed]")]


@pytest.mark.parametrize(
    ("name", "asked"),
    [("random", [4, 6, 10, 0, 1, 3, 8, 7, 2]), ("gp-ucb", [11, 0, 5, 8, 2, 7, 3, 9, 1])],
)
def test_searches_that_may_be_recorded_ask_as_they_always_did(name: str, asked: list[int]) -> None:
    policy = make_policy(name, LINE, 7)
    found = []
    for _ in asked:
        arm = policy.ask(1)[0].arm
        found.append(LINE.index(arm))
        policy.tell(Observation(arm, {"task": math.sin(LINE.index(arm))}))

    assert found == asked
