"""That no two purposes draw the same random numbers."""

from __future__ import annotations

import ast
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import hpc_toolkit.bandit
from hpc_toolkit.bandit import Arm, ArmTable, Observation, make_policy
from hpc_toolkit.bandit.rule import Stream

PACKAGE = Path(hpc_toolkit.bandit.__file__).parent
LINE = ArmTable(tuple(Arm(f"a{k}", f"g{k % 3}", (float(k),)) for k in range(12)), ("layer",))


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

    assert unnamed == [("baselines.py", "[history.seed]")]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("random", [4, 6, 10, 0, 1, 3, 8, 7, 2]),
        ("ucb1", [11, 6, 7, 10, 0, 1, 8, 2, 9]),
        ("gp-ucb", [11, 0, 5, 8, 2, 7, 3, 9, 1]),
    ],
)
def test_searches_that_may_be_recorded_ask_as_they_always_did(name: str, asked: list[int]) -> None:
    policy = make_policy(name, LINE, 7)
    found = []
    for _ in asked:
        arm = policy.ask(1)[0].arm
        found.append(LINE.index(arm))
        policy.tell(Observation(arm, {"x": math.sin(LINE.index(arm))}))

    assert found == asked
