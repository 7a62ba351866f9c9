"""How many pulls a search needs on a synthetic surface, and what synthetic scores are like."""

from __future__ import annotations

import numpy as np
import pytest

from hpc_toolkit.bandit import ArmTable, Observation, make_policy
from hpc_toolkit.bandit.bench.synthetic import score_table, surface
from hpc_toolkit.errors import ConfigError

SIZES, LAYERS = (70e6, 160e6, 410e6), (6, 12, 24)
STEPS = (1, 16, 128, 512, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000)
SEEDS = range(10)


def pulls_to_goal(name: str, table: ArmTable, scores: np.ndarray, seed: int) -> int:
    """Arms told until one reaches 99 % of the best score of the table."""
    policy = make_policy(name, table, seed)
    for pulls in range(1, len(scores) + 1):
        arm = policy.ask(1)[0].arm
        score = float(scores[table.index(arm)])
        policy.tell(Observation(arm, {"task": score}))
        if score >= 0.99 * scores.max():
            return pulls
    return len(scores) + 1


def median_pulls(name: str, table: ArmTable, scores: np.ndarray) -> float:
    pulls = [pulls_to_goal(name, table, scores, seed) for seed in SEEDS]
    return float(np.median(pulls))


@pytest.fixture(scope="module", params=range(2))
def made(request: pytest.FixtureRequest) -> tuple[ArmTable, np.ndarray]:
    return surface(request.param, SIZES, STEPS, LAYERS)


def test_gp_ucb_needs_far_fewer_pulls_than_random_on_a_synthetic_surface(
    made: tuple[ArmTable, np.ndarray],
) -> None:
    search = median_pulls("gp-ucb", *made)
    chance = median_pulls("random", *made)

    assert search < 0.65 * chance


@pytest.mark.parametrize("seed", range(2))
def test_a_score_table_has_the_shape_of_recorded_ones(seed: int) -> None:
    table = score_table(seed)

    assert table.scores.shape == (7 * (7 + 13 + 25), 32)
    centred = table.scores - table.scores.mean(axis=0)
    parts = np.linalg.svd(centred, compute_uv=False) ** 2
    assert 0.90 < parts[0] / parts.sum() < 0.96
    assert 0.03 < parts[1] / parts.sum() < 0.06
    good = table.means >= 0.99 * table.means.max()
    assert 1 <= good.sum() <= 10
    assert table.seconds is not None
    typical = np.sort(np.median(table.seconds, axis=0))
    assert 0.30 < typical[-1] / typical.sum() < 0.40
    assert 0.005 < typical[:5].sum() / typical.sum() < 0.012
    assert table.stderrs is not None
    assert np.allclose(table.stderrs / np.sqrt(32), 0.002)


def test_means_of_a_score_table_are_its_surface_and_little_noise() -> None:
    table = score_table(2)
    arms, means = surface(
        2, (70e6, 160e6, 410e6), (1, 128, 512, 2000, 8000, 32000, 143000), (6, 12, 24)
    )

    assert table.arms.arms == arms.arms
    assert np.std(table.means - means) < 0.002


def test_a_score_table_is_a_function_of_its_seed() -> None:
    first, again, other = (score_table(seed, 6) for seed in (5, 5, 6))

    np.testing.assert_array_equal(first.scores, again.scores)
    np.testing.assert_array_equal(first.seconds, again.seconds)
    assert (first.scores != other.scores).all()
    with pytest.raises(ConfigError, match="1 tasks"):
        score_table(0, 1)
