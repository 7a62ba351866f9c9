"""Scores of embeddings: classification, clustering, similarity, retrieval; deterministic.

Arrays in, numbers out. The standard errors speak of other texts of the same kind, except for
clustering, where they speak of the repetitions only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

FOLDS = 5
"""Cross-validation folds of a classification."""

CLUSTERINGS = 10
"""Repetitions of a clustering, each on another random four fifths of the texts."""

CUTOFF = 10
"""Ranks that retrieval looks at."""


@dataclass(frozen=True, slots=True)
class Score:
    """One score, higher is better."""

    score: float
    """In the unit of the task's metric; 0 to 1, or -1 to 1 for a correlation."""

    stderr: float
    """Standard error of ``score``."""

    n: int
    """Texts, pairs or queries that were scored."""


def classification(embeddings: np.ndarray, labels: Sequence[str]) -> Score:
    """Accuracy of a logistic regression on standardised features, 5 stratified folds.

    ``embeddings`` is ``(n, d)``. Chance is the share of the most frequent label.
    """
    import numpy as np
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    targets = np.asarray(labels)
    correct = np.zeros(len(targets), dtype=bool)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    for train, test in folds.split(embeddings, targets):
        mean, scale = _standardisation(embeddings[train])
        model = LogisticRegression(C=0.1, max_iter=200, tol=1e-3)
        _fit(model, (embeddings[train] - mean) / scale, targets[train])
        correct[test] = model.predict((embeddings[test] - mean) / scale) == targets[test]
    accuracy = float(correct.mean())
    return Score(accuracy, math.sqrt(accuracy * (1 - accuracy) / len(correct)), len(correct))


def clustering(embeddings: np.ndarray, labels: Sequence[str]) -> Score:
    """Mean V-measure of k-means with as many clusters as labels, over 10 seeded subsets."""
    import numpy as np
    from sklearn.cluster import KMeans
    from sklearn.metrics import v_measure_score

    targets = np.asarray(labels)
    mean, scale = _standardisation(embeddings)
    features = (embeddings - mean) / scale
    size, count = len(targets) * 4 // 5, len(set(labels))
    scores = []
    for seed in range(CLUSTERINGS):
        rows = np.random.default_rng(seed).permutation(len(targets))[:size]
        model = KMeans(count, n_init=1, random_state=seed)
        _fit(model, features[rows], None)
        scores.append(v_measure_score(targets[rows], model.labels_))
    stderr = float(np.std(scores, ddof=1)) / math.sqrt(CLUSTERINGS)
    return Score(float(np.mean(scores)), stderr, len(targets))


def similarity(embeddings: np.ndarray, pairs: Sequence[tuple[int, int, float]]) -> Score:
    """Spearman correlation of centred cosines with the similarities that people gave to ``pairs``.

    The standard error is Bonett & Wright's (2000, Psychometrika 65), with as many independent
    observations as there are pairs or texts, whichever is fewer: pairs that share a text are not
    independent. Equal embeddings everywhere give 0: they order nothing.
    """
    import numpy as np
    from scipy.stats import rankdata

    first, second = np.array([p[:2] for p in pairs]).T
    unit = _directions(embeddings)
    cosines = np.round((unit[first] * unit[second]).sum(1), 12)
    ranks = [rankdata(cosines), rankdata([p[2] for p in pairs])]
    spread = min(float(np.ptp(r)) for r in ranks)
    rho = float(np.corrcoef(*ranks)[0, 1]) if spread > 0 else 0.0
    independent = min(len(pairs), len(np.unique([first, second])))
    stderr = (1 - rho**2) * math.sqrt((1 + rho**2 / 2) / max(1, independent - 3))
    return Score(rho, stderr, len(pairs))


def retrieval(queries: np.ndarray, documents: np.ndarray) -> Score:
    """nDCG@10 by centred cosine; document ``i`` is the only relevant one for query ``i``.

    A document that ties with the relevant one ranks before it, so equal embeddings score 0.
    """
    import numpy as np

    cosines = np.round(_directions(queries) @ _directions(documents).T, 12)
    ranks = (cosines >= np.diag(cosines)[:, None]).sum(1)
    gains = np.where(ranks <= CUTOFF, 1 / np.log2(1 + ranks), 0.0)
    stderr = float(gains.std(ddof=1)) / math.sqrt(len(gains))
    return Score(float(gains.mean()), stderr, len(gains))


def _standardisation(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, scale = features.mean(0), features.std(0)
    # A constant feature, as in an untrained model, carries no information: leave it at zero.
    scale[scale < 1e-9] = 1.0
    return mean, scale


def _directions(embeddings: np.ndarray) -> np.ndarray:
    import numpy as np

    # Mean-pooled states share one large direction, which would hide what tells texts apart.
    rows = embeddings - embeddings.mean(0, dtype=np.float64)
    unit: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    return unit


def _fit(model: Any, features: np.ndarray, targets: np.ndarray | None) -> None:
    import warnings

    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # Embeddings of untrained layers may coincide or not converge: that is a low score, no news.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(features, targets)
