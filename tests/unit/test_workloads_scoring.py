"""Scores of tasks, of ours and of mteb; degenerate embeddings give numbers, never NaN."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.science.workloads import text_tasks
from hpc_toolkit.science.workloads.mteb_tasks import main_error, model_of

pytest.importorskip("sklearn")

RNG = np.random.default_rng(0)
LABELS = ["a", "b", "c"] * 40
CENTRES = {"a": [9, 0, 0, 0], "b": [0, 9, 0, 0], "c": [0, 0, 9, 0]}


def separated() -> Any:
    return np.array([CENTRES[label] for label in LABELS]) + RNG.normal(size=(120, 4))


def test_classification_of_separated_labels_is_right_and_of_noise_near_chance() -> None:
    right = text_tasks.classification(separated(), LABELS)
    noise = text_tasks.classification(RNG.normal(size=(120, 4)), LABELS)

    assert (right.score, right.stderr, right.n) == (1.0, 0.0, 120)
    assert abs(noise.score - 1 / 3) < 4 * noise.stderr
    assert noise.stderr == pytest.approx(math.sqrt(noise.score * (1 - noise.score) / 120))


def test_clustering_of_separated_labels_is_right_and_of_noise_near_zero() -> None:
    assert text_tasks.clustering(separated(), LABELS).score > 0.95
    assert text_tasks.clustering(RNG.normal(size=(120, 4)), LABELS).score < 0.1


def test_similarity_follows_the_order_of_centred_cosines() -> None:
    angles = np.array([0.0, 0.4, 1.0, 2.0, 3.0])
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    centred = rows - rows.mean(0)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    pairs = [(0, i, float(unit[0] @ unit[i]) ** 3) for i in range(1, 5)]

    score = text_tasks.similarity(rows + 100, pairs)
    opposite = text_tasks.similarity(rows, [(i, j, -gold) for i, j, gold in pairs])

    assert score.n == 4
    assert score.score == pytest.approx(1)
    assert opposite.score == pytest.approx(-1)


@pytest.mark.parametrize(("better", "expected"), [(0, 1.0), (1, 1 / math.log2(3)), (10, 0.0)])
def test_retrieval_discounts_by_the_rank_of_the_one_relevant_document(
    better: int, expected: float
) -> None:
    # Query 0 is nearest to `better` documents before its own; the other queries find theirs.
    documents = np.eye(40)
    queries = np.eye(40)
    queries[0, 1 : 1 + better] = 2

    score = text_tasks.retrieval(queries, documents)

    assert score.n == 40
    assert score.score == pytest.approx((39 + expected) / 40, abs=1e-9)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_equal_embeddings_score_as_knowing_nothing(value: float) -> None:
    rows = np.full((120, 4), value, dtype=np.float32)

    scores = [
        text_tasks.classification(rows, LABELS),
        text_tasks.clustering(rows, LABELS),
        text_tasks.similarity(rows, [(0, 1, 0.5), (1, 2, 0.7), (3, 4, 0.1), (5, 6, 0.3)]),
        text_tasks.retrieval(rows, rows),
    ]

    assert [round(s.score, 2) for s in scores] == [0.33, 0.0, 0.0, 0.0]
    assert all(math.isfinite(s.stderr) for s in scores)


def result(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"scores": {"test": list(entries)}}


def test_error_is_that_of_the_mean_of_repetitions() -> None:
    scores = [0.5, 0.7, 0.6, 0.9]
    of_experiments = result({"scores_per_experiment": [{"accuracy": x, "f1": 0} for x in scores]})
    of_levels = result({"v_measures": {"Level 0": scores[:2], "Level 1": scores[2:]}})
    of_clusterings = result({"v_measures": scores})

    expected = statistics.stdev(scores) / 2
    assert main_error(of_experiments, "accuracy") == pytest.approx(expected)
    assert main_error(of_levels, "v_measure") == pytest.approx(expected)
    assert main_error(of_clusterings, "v_measure") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("checkpoint", "model"),
    [
        ("EleutherAI/pythia-14m@step8", ("EleutherAI/pythia-14m", "step8-layer3")),
        ("org/name@refs/pr/1", ("org/name", "refs_pr_1-layer3")),
        ("mini-s/step0", ("local/mini-s_step0", "layer3")),
        ("/data/model/", ("local/data_model", "layer3")),
    ],
)
def test_layer_of_a_checkpoint_is_a_model_of_its_own(
    checkpoint: str, model: tuple[str, str]
) -> None:
    assert model_of(checkpoint, 3) == model
