"""Scores of embeddings against known answers; degenerate embeddings give numbers, never NaN."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.science.workloads import text_tasks

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


def pairs_of(scores: Any, truth: Any) -> tuple[Any, list[tuple[int, int, bool]]]:
    """Embeddings in the plane, and pairs of them whose cosines are ``scores``, about."""
    rows = []
    for score in scores:
        rows += [[1.0, 0.0], [score, math.sqrt(1 - score**2)]]
    # Their opposites keep the mean at zero, so that centring changes nothing.
    both = np.array(rows + [[-x, -y] for x, y in rows])
    return both, [(2 * i, 2 * i + 1, bool(same)) for i, same in enumerate(truth)]


def test_pair_classification_agrees_with_scikit_learn_also_where_pairs_tie() -> None:
    from sklearn.metrics import average_precision_score

    for size in (8, 60, 300):
        scores = np.round(RNG.uniform(-0.9, 0.9, size), 1)
        truth = RNG.random(size) < 0.3
        truth[:2] = True, False
        rows, pairs = pairs_of(scores, truth)

        found = text_tasks.pair_classification(rows, pairs).score

        assert found == pytest.approx(average_precision_score(truth, scores), abs=1e-12)


def test_error_of_pairs_is_that_of_drawing_pairs_again() -> None:
    from sklearn.metrics import average_precision_score

    truth = RNG.random(400) < 0.3
    scores = np.clip(RNG.normal(0.3 * truth, 0.3), -0.95, 0.95)
    drawn = RNG.integers(400, size=(400, 400))

    again = [average_precision_score(truth[rows], scores[rows]) for rows in drawn]

    assert text_tasks.pair_classification(*pairs_of(scores, truth)).stderr == pytest.approx(
        np.std(again), rel=0.15
    )


@pytest.mark.parametrize("same", [True, False])
def test_pairs_of_one_sort_tell_nothing_and_are_refused(same: bool) -> None:
    with pytest.raises(ValueError, match=f"all 2 pairs are {same}"):
        text_tasks.pair_classification(np.eye(3), [(0, 1, same), (1, 2, same)])


def test_reranking_is_the_mean_average_precision_of_each_querys_candidates() -> None:
    documents = np.eye(6)
    queries = np.array([[9, 3, 2, 1, 0, 0], [0, 0, 1, 2, 3, 9]], dtype=float)
    queries = np.concatenate([queries, -queries])  # of mean zero
    candidates: list[tuple[int, ...]] = [(0, 1, 2, 3), (2, 3, 4), (0, 1), (4, 5)]
    relevant: list[tuple[int, ...]] = [(0, 1, 0, 1), (0, 0, 1), (1, 0), (1, 0)]

    score = text_tasks.reranking(queries, documents, candidates, relevant)

    expected = [(1 / 2 + 2 / 4) / 2, 1.0, 1 / 2, 1.0]
    assert score.n == 4
    assert score.score == pytest.approx(np.mean(expected))
    assert score.stderr == pytest.approx(np.std(expected, ddof=1) / 2)


def test_reranking_of_a_query_without_a_relevant_candidate_is_refused() -> None:
    with pytest.raises(ValueError, match="query 1 has no relevant candidate"):
        text_tasks.reranking(np.eye(2), np.eye(2), [(0, 1), (0, 1)], [(1, 0), (0, 0)])


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_equal_embeddings_score_as_knowing_nothing(value: float) -> None:
    rows = np.full((120, 4), value, dtype=np.float32)

    scores = [
        text_tasks.classification(rows, LABELS),
        text_tasks.clustering(rows, LABELS),
        text_tasks.similarity(rows, [(0, 1, 0.5), (1, 2, 0.7), (3, 4, 0.1), (5, 6, 0.3)]),
        text_tasks.retrieval(rows, rows),
        text_tasks.pair_classification(rows, [(0, 1, True), (1, 2, False), (2, 3, False)]),
        text_tasks.reranking(rows[:2], rows, [(0, 1, 2), (4, 5)], [(0, 1, 0), (1, 0)]),
    ]

    assert [round(s.score, 2) for s in scores] == [0.33, 0.0, 0.0, 0.0, 0.33, 0.42]
    assert all(math.isfinite(s.stderr) for s in scores)
