"""How many pulls a search needs, on a synthetic surface and on a recorded table of scores."""

from __future__ import annotations

import csv
import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from hpc_toolkit.bandit import Arm, ArmTable, Observation, make_policy
from hpc_toolkit.bandit.geometry import GEOMETRY_NAMES, geometry_features
from hpc_toolkit.bandit.synthetic import Surface, surface
from hpc_toolkit.errors import ConfigError

SIZES, LAYERS = (70e6, 160e6, 410e6), (6, 12, 24)
STEPS = (1, 16, 128, 512, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000)
SEEDS = range(20)


def pulls_to_goal(
    name: str, table: ArmTable, scores: np.ndarray, seed: int, *, goal: float = 0.99, batch: int = 1
) -> int:
    """Arms told until one reaches ``goal`` times the best score of the table."""
    policy = make_policy(name, table, seed)
    for pulls in range(1, len(scores) + 1, batch):
        chosen = [table.index(proposal.arm) for proposal in policy.ask(batch)]
        for index in chosen:
            policy.tell(Observation(table.ids[index], {"mean": float(scores[index])}))
        reached = scores[chosen] >= goal * scores.max()
        if reached.any():
            return pulls + int(np.argmax(reached))
    return len(scores) + 1


def median_pulls(name: str, table: ArmTable, scores: np.ndarray, *, batch: int = 1) -> float:
    pulls = [pulls_to_goal(name, table, scores, seed, batch=batch) for seed in SEEDS]
    return float(np.median(pulls))


@pytest.fixture(scope="module", params=range(3))
def made(request: pytest.FixtureRequest) -> Surface:
    return surface(request.param, SIZES, STEPS, LAYERS)


def test_surface_is_a_function_of_its_seed(made: Surface) -> None:
    first, again, other = (surface(seed, SIZES, STEPS, LAYERS) for seed in (5, 5, 6))

    np.testing.assert_array_equal(first.scores, again.scores)
    assert first.table.digest == again.table.digest == other.table.digest
    assert (first.scores != other.scores).all()


def test_surface_best_layer_is_deep_late_in_training_and_the_embeddings_early(
    made: Surface,
) -> None:
    depths = {}
    for step in (16, 128000):
        group = list(made.table.members[f"{410e6:g}/step{step}"])
        depths[step] = int(np.argmax(made.truth[group])) / (len(group) - 1)
        if step == 128000:
            over_last = made.truth[group].max() - made.truth[group[-1]]
            assert 0.01 < over_last < 0.08

    assert depths[16] == 0.0
    assert 0.6 < depths[128000] < 0.9


def test_surface_noise_has_the_stated_standard_error(made: Surface) -> None:
    assert made.table.feature_names == GEOMETRY_NAMES
    assert len(made.scores) == len(made.table.arms) == 12 * (7 + 13 + 25)
    assert np.std(made.scores - made.truth) == pytest.approx(made.stderr, rel=0.15)


def test_surface_with_unequal_lists_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 sizes, 2 numbers of layers, 1 steps"):
        surface(0, [1e6], [0], [6, 12])


def test_gp_ucb_needs_far_fewer_pulls_than_random_on_a_synthetic_surface(made: Surface) -> None:
    search = median_pulls("gp-ucb", made.table, made.scores)
    chance = median_pulls("random", made.table, made.scores)

    assert search < 0.65 * chance


def test_gp_ucb_in_batches_of_four_still_beats_random_on_a_synthetic_surface(
    made: Surface,
) -> None:
    search = median_pulls("gp-ucb", made.table, made.scores, batch=4)
    chance = median_pulls("random", made.table, made.scores)

    assert search < 0.8 * chance


def test_last_layer_never_reaches_the_best_of_a_synthetic_surface(made: Surface) -> None:
    policy = make_policy("last-layer", made.table, 0)

    last = [made.scores[made.table.index(proposal.arm)] for proposal in policy.ask(999)]

    assert max(last) < 0.99 * made.scores.max()


def recorded_table(path: Path) -> tuple[ArmTable, np.ndarray]:
    """Arms and mean scores from a CSV with columns size, revision, layer and ``s_<task>``."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    rows = list(csv.DictReader(text.splitlines()))
    blocks = {row["size"]: 0 for row in rows}
    for row in rows:
        blocks[row["size"]] = max(blocks[row["size"]], int(row["layer"]))
    arms, scores = [], []
    for row in rows:
        size = float(row["size"][:-1]) * {"m": 1e6, "b": 1e9}[row["size"][-1]]
        # Pythia's main revision is its last step.
        step = int(row["revision"].removeprefix("step").replace("main", "143000"))
        layer, layers = int(row["layer"]), blocks[row["size"]]
        features = geometry_features(size=size, step=step, layer=layer, layers=layers)
        group = f"{row['size']}/{row['revision']}"
        arms.append(Arm(f"{group}/layer{layer}", group, features))
        scores.append(np.mean([float(row[key]) for key in row if key.startswith("s_")]))
    return ArmTable(tuple(arms), GEOMETRY_NAMES), np.array(scores)


@pytest.mark.recorded
def test_gp_ucb_needs_far_fewer_pulls_than_random_on_a_recorded_table() -> None:
    table, scores = recorded_table(Path(os.environ["HPCTK_SCORES_CSV"]))

    search = median_pulls("gp-ucb", table, scores)
    chance = median_pulls("random", table, scores)

    assert search < 0.65 * chance
