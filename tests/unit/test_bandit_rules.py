"""What single rules choose, and the random numbers that they draw."""

from __future__ import annotations

import ast
import math
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import hpc_toolkit.bandit
from hpc_toolkit.bandit import Arm, ArmTable, Observation, make_policy
from hpc_toolkit.bandit.rule import Stream, first_best
from hpc_toolkit.bandit.rules.guided import space_filling_order
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


PACKAGE = Path(hpc_toolkit.bandit.__file__).parent
LINE = ArmTable(tuple(Arm(f"a{k}", f"g{k % 3}", (float(k),)) for k in range(12)), ("layer",))


def table_of(rows: Mapping[str, tuple[float, ...]], *names: str) -> ArmTable:
    """A table from ``{"group/arm": features}``."""
    arms = [Arm(arm, arm.partition("/")[0], row) for arm, row in rows.items()]
    return ArmTable(tuple(arms), names)


def score(value: float) -> dict[str, float]:
    return {"task": value}


def test_first_best_takes_the_first_of_values_that_differ_by_rounding() -> None:
    assert first_best([0.1, 0.3, 0.1 + 0.2, 0.3 - 1e-9]) == 1
    assert first_best([0.3, 0.3 + 1e-11]) == 1


def test_space_filling_order_takes_the_farthest_point_and_the_lowest_of_equals() -> None:
    points = np.array([[0.0], [1.0], [2.0], [3.0], [4.0]])
    seed = next(s for s in range(99) if space_filling_order(points, s, 1) == [2])

    assert space_filling_order(points, seed, 5) == [2, 0, 4, 1, 3]


def test_space_filling_order_of_fewer_points_is_the_beginning_of_the_longer() -> None:
    points = np.random.default_rng(0).normal(size=(30, 3))

    whole = space_filling_order(points, 7, 99)

    assert sorted(whole) == list(range(30))
    for n in range(30):
        assert space_filling_order(points, 7, n) == whole[:n]


def test_space_filling_order_of_equal_points_is_each_once() -> None:
    assert sorted(space_filling_order(np.zeros((6, 2)), 1, 6)) == list(range(6))


def test_space_filling_order_covers_better_than_chance() -> None:
    points = np.random.default_rng(1).uniform(size=(200, 2))

    def gap(chosen: list[int]) -> float:
        distances = np.linalg.norm(points[:, None] - points[chosen][None], axis=2)
        return float(distances.min(axis=1).max())

    filled = [gap(space_filling_order(points, seed, 8)) for seed in range(20)]
    drawn = [gap(list(np.random.default_rng(s).choice(200, 8))) for s in range(20)]

    assert np.median(filled) < 0.8 * np.median(drawn)


def test_random_is_a_uniform_order_that_scores_do_not_change() -> None:
    table = table_of({f"g/{i}": () for i in range(5)})
    firsts = [make_policy("random", table, seed).ask(1)[0].arm for seed in range(400)]

    counts = [firsts.count(arm) for arm in table.ids]

    # Four standard deviations of a binomial with n = 400 and p = 1/5.
    assert all(abs(count - 80) < 32 for count in counts)
    policy = make_policy("random", table, 0)
    order = [proposal.arm for proposal in policy.ask(5)]
    policy.tell(Observation(order[0], score(1.0)))
    assert [proposal.arm for proposal in policy.ask(5)] == order[1:]


def test_last_layer_asks_the_deepest_arm_of_each_group_most_trained_first() -> None:
    rows = {
        "early/a": (1.0, 0.5), "early/b": (1.0, 1.0),
        "small/a": (9.0, 1.0), "small/b": (9.0, 0.2),
        "late/a": (9.0, math.nan), "late/b": (9.0, 0.7), "late/c": (9.0, 0.9),
    }  # fmt: skip
    table = table_of(rows, "log1p_step", "relative_depth")

    asked = [proposal.arm for proposal in make_policy("last-layer", table, 0).ask(9)]

    assert asked == ["small/a", "late/c", "early/b"]


def test_last_layer_without_a_step_keeps_the_order_of_the_groups() -> None:
    table = table_of({"p/a": (1.0,), "p/b": (2.0,), "q/a": (3.0,), "q/b": (1.0,)}, "layer")

    asked = [proposal.arm for proposal in make_policy("last-layer", table, 0).ask(9)]

    assert asked == ["p/b", "q/a"]


def test_last_layer_without_a_depth_is_refused() -> None:
    table = table_of({"p/a": (1.0,)}, "width")

    with pytest.raises(ConfigError, match="last-layer needs a feature named 'relative_depth' or"):
        make_policy("last-layer", table, 0)


def lever_table(levers: int, arms: int) -> ArmTable:
    rows = {f"{lever}/{i}": (float(lever),) for lever in range(levers) for i in range(arms)}
    return table_of(rows, "x")


def lever_of(arm: str) -> int:
    return int(arm.partition("/")[0])


@pytest.mark.parametrize("name", ["ucb1", "epsilon-greedy"])
def test_every_group_is_pulled_before_any_twice(name: str) -> None:
    policy = make_policy(name, lever_table(5, 3), 4)

    levers = [lever_of(proposal.arm) for proposal in policy.ask(5)]

    assert sorted(levers) == [0, 1, 2, 3, 4]
    assert levers == space_filling_order(np.arange(5.0)[:, None], 4, 5)


def test_ucb1_maximises_the_published_bound() -> None:
    table = lever_table(3, 9)
    policy = make_policy("ucb1", table, 0)
    # Means 0.2, 0.6 and 1.0, after rescaling 0, 0.5 and 1; pulls 1, 2 and 4.
    for lever, pulls, value in [(0, 1, 0.2), (1, 2, 0.6), (2, 4, 1.0)]:
        for i in range(pulls):
            policy.tell(Observation(f"{lever}/{i}", score(value)))

    chosen = policy.ask(1)[0]

    bounds = [m + math.sqrt(2 * math.log(7) / n) for m, n in [(0, 1), (0.5, 2), (1, 4)]]
    assert lever_of(chosen.arm) == int(np.argmax(bounds)) == 2
    assert chosen.acquisition == pytest.approx(max(bounds))


def test_ucb1_counts_pending_and_failed_arms_as_pulls() -> None:
    table = lever_table(2, 9)
    policy = make_policy("ucb1", table, 0)
    policy.tell(Observation("0/0", score(0.5)))
    policy.tell(Observation("1/0", score(0.6)))

    assert lever_of(policy.ask(1)[0].arm) == 1
    assert lever_of(policy.ask(1, ["1/1", "1/2", "1/3", "1/4"])[0].arm) == 0
    for i in range(1, 5):
        policy.tell(Observation(f"1/{i}", failed=("task",)))
    assert lever_of(policy.ask(1)[0].arm) == 0


def test_ucb1_finds_the_best_group_and_stays_with_it() -> None:
    table = lever_table(4, 200)
    rng = np.random.default_rng(5)
    policy = make_policy("ucb1", table, 5)
    pulls = []

    for _ in range(200):
        arm = policy.ask(1)[0].arm
        pulls.append(lever_of(arm))
        value = 0.9 if lever_of(arm) == 2 else 0.1
        policy.tell(Observation(arm, score(value + 0.05 * rng.uniform())))

    assert pulls.count(2) > 120
    assert set(pulls) == {0, 1, 2, 3}


def test_gp_ucb_takes_the_initial_arms_from_the_features_alone() -> None:
    table = lever_table(6, 4)
    order = space_filling_order(table.standardised.values, 3, 4)
    policy = make_policy("gp-ucb", table, 3, initial=4)
    asked = []

    for i in range(4):
        proposal = policy.ask(1)[0]
        asked.append(table.index(proposal.arm))
        policy.tell(Observation(proposal.arm, score(float(i % 3))))

    assert asked == order
    assert policy.ask(1)[0].acquisition is not None


def test_gp_ucb_counts_pending_arms_as_initial() -> None:
    table = lever_table(6, 4)
    policy = make_policy("gp-ucb", table, 3, initial=5)
    policy.tell(Observation("0/0", score(0.5)))

    decided = [p.acquisition is not None for p in policy.ask(4, ["1/0", "2/0"])]

    assert decided == [False, False, True, True]


def test_gp_ucb_keeps_to_space_filling_while_no_arm_has_a_reward() -> None:
    table = lever_table(6, 4)
    order = space_filling_order(table.standardised.values, 3, 9)
    policy = make_policy("gp-ucb", table, 3, initial=2)
    for index in order[:6]:
        policy.tell(Observation(table.ids[index], failed=("task",)))

    assert [table.index(proposal.arm) for proposal in policy.ask(3)] == order[6:]


def line(count: int) -> ArmTable:
    return table_of({f"g/{i}": (float(i),) for i in range(count)}, "x")


def test_gp_ucb_climbs_a_smooth_hill() -> None:
    table = line(101)
    policy = make_policy("gp-ucb", table, 0)
    asked = []

    for _ in range(14):
        arm = policy.ask(1)[0].arm
        asked.append(table.index(arm))
        policy.tell(Observation(arm, score(math.exp(-(((table.index(arm) - 73) / 25) ** 2)))))

    best = policy.best()
    assert best is not None
    assert table.index(best.arm) in {72, 73, 74}


def test_gp_ucb_goes_elsewhere_while_the_best_guess_is_pending() -> None:
    table = line(101)
    policy = make_policy("gp-ucb", table, 0)
    for index in (0, 25, 50, 75, 100):
        policy.tell(Observation(table.ids[index], score(float(index == 50))))
    guess = table.index(policy.ask(1)[0].arm)

    other = table.index(policy.ask(1, [table.ids[guess]])[0].arm)

    assert abs(other - guess) > 5


@pytest.mark.parametrize("value", [0.0, 0.1, -3.0])
def test_gp_ucb_with_equal_rewards_explores(value: float) -> None:
    table = line(101)
    policy = make_policy("gp-ucb", table, 0)
    for index in (0, 10, 20, 30, 40):
        policy.tell(Observation(table.ids[index], score(value)))

    assert table.index(policy.ask(1)[0].arm) == 100


@pytest.mark.parametrize(("beta", "places"), [(0, range(6, 11)), (2, range(91, 101))])
def test_gp_ucb_explores_as_far_as_beta_says(beta: float, places: range) -> None:
    table = line(101)
    policy = make_policy("gp-ucb", table, 0, beta=beta)
    for index in (0, 4, 8, 12, 16, 20):
        policy.tell(Observation(table.ids[index], score(-abs(index - 8) / 10)))

    assert table.index(policy.ask(1)[0].arm) in places


@pytest.mark.parametrize(("epsilon", "others"), [(0.0, 0), (0.4, 160)])
def test_epsilon_greedy_leaves_the_best_group_as_often_as_epsilon_says(
    epsilon: float, others: int
) -> None:
    table = lever_table(4, 700)
    policy = make_policy("epsilon-greedy", table, 0, epsilon=epsilon)
    for lever in range(4):
        policy.tell(Observation(f"{lever}/0", score(0.9 if lever == 2 else -0.1 * lever)))

    counts = Counter(lever_of(proposal.arm) for proposal in policy.ask(533))

    # A draw takes each of four groups, the best one too: 533 * 0.4 * 3 / 4 = 160, sd 10.6.
    assert abs(533 - counts[2] - others) < 4 * 10.6
    if not epsilon:
        assert counts[2] == 533


def test_epsilon_greedy_goes_to_other_groups_when_the_best_one_is_used_up() -> None:
    policy = make_policy("epsilon-greedy", lever_table(3, 2), 0, epsilon=0)
    for arm, value in {"0/0": 0.2, "1/0": 0.9, "2/0": 0.5, "1/1": 0.8}.items():
        policy.tell(Observation(arm, score(value)))

    assert [proposal.arm for proposal in policy.ask(9)] == ["2/1", "0/1"]


def test_epsilon_greedy_counts_a_group_without_a_reward_as_the_worst() -> None:
    policy = make_policy("epsilon-greedy", lever_table(3, 2), 0, epsilon=0)
    policy.tell(Observation("0/0", score(-5.0)))
    policy.tell(Observation("1/0", failed=("task",)))
    policy.tell(Observation("2/0", score(-4.0)))

    assert [proposal.arm for proposal in policy.ask(3)] == ["2/1", "0/1", "1/1"]


def test_gaussian_ts_draws_from_the_published_posterior() -> None:
    """How often each of three groups is asked for, against draws of its posterior made here."""
    table = lever_table(3, 2000)
    policy = make_policy("gaussian-ts", table, 7)
    told = {"0/0": 0.1, "1/0": 0.5, "1/1": 0.6, "2/0": 0.4}
    for arm, value in told.items():
        policy.tell(Observation(arm, score(value)))
    values = np.array(list(told.values()))
    y = (values - values.mean()) / values.std()
    centres = np.array([y[0] / 2, (y[1] + y[2]) / 3, y[3] / 2])
    widths = np.sqrt([1 / 2, 1 / 3, 1 / 2])
    draws = centres + widths * np.random.default_rng(0).standard_normal((20000, 3))
    expected = np.bincount(draws.argmax(axis=1), minlength=3) / 20000

    asked = policy.ask(1500)

    shares = np.bincount([lever_of(proposal.arm) for proposal in asked], minlength=3) / 1500
    # Four standard errors of 1,500 draws.
    assert np.abs(shares - expected).max() < 4 * 0.5 / math.sqrt(1500)
    assert shares.max() < 0.9


def test_gaussian_ts_finds_the_best_group_and_stays_with_it() -> None:
    table = lever_table(4, 100)
    policy = make_policy("gaussian-ts", table, 5)
    rng = np.random.default_rng(5)
    pulls = []

    for _ in range(80):
        arm = policy.ask(1)[0].arm
        pulls.append(lever_of(arm))
        value = 0.9 if lever_of(arm) == 2 else 0.1
        policy.tell(Observation(arm, score(value + 0.05 * rng.uniform())))

    assert pulls[40:].count(2) > 35


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
