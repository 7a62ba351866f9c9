"""The tasks stage: score one layer's embeddings of real texts on four kinds of labelled tasks.

The scores are deterministic: arrays in, numbers out. The standard errors estimate the variation
over other texts of the same kind; for clustering, only the variation over repetitions. Cosines are
of centred embeddings. mteb does not centre, so its scores for the same texts differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from hpc_toolkit.errors import PermanentError, near_miss
from hpc_toolkit.science.workloads import corpora
from hpc_toolkit.science.workloads.checkpoints import require_layer
from hpc_toolkit.science.workloads.embeddings import EmbeddedTexts, SharedEmbeddings

FOLDS = 5
"""Cross-validation folds of a classification."""

CLUSTERINGS = 10
"""Repetitions of a clustering, each on another random four fifths of the texts."""

CUTOFF = 10
"""Number of ranks that count in retrieval."""


@dataclass(frozen=True, slots=True)
class Score:
    """One score, higher is better."""

    score: float
    """In the unit of the task's metric; 0 to 1, or -1 to 1 for a correlation."""
    stderr: float
    """Standard error of ``score``."""
    n: int
    """Number of texts, pairs or queries that were scored."""


def classification(embeddings: np.ndarray, labels: Sequence[str]) -> Score:
    """Accuracy of a logistic regression on standardised features, 5 stratified folds.

    ``embeddings`` is ``(n, d)``. Chance is the share of the most frequent label.
    """
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
    return _mean(scores, len(targets))


def similarity(embeddings: np.ndarray, pairs: Sequence[tuple[int, int, float]]) -> Score:
    """Spearman correlation of centred cosines with the human ratings of ``pairs``.

    The standard error is Bonett & Wright's (2000, Psychometrika 65). The number of independent
    observations is the number of pairs or of texts, whichever is smaller, because pairs that share
    a text are not independent. If all embeddings are equal, the score is 0.
    """
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
    cosines = np.round(_directions(queries) @ _directions(documents).T, 12)
    ranks = (cosines >= np.diag(cosines)[:, None]).sum(1)
    gains = np.where(ranks <= CUTOFF, 1 / np.log2(1 + ranks), 0.0)
    return _mean(gains, len(gains))


def _mean(values: np.ndarray | list[float], n: int) -> Score:
    stderr = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Score(float(np.mean(values)), stderr, n)


def _standardisation(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, scale = features.mean(0), features.std(0)
    # A constant feature, as in an untrained model, carries no information: leave it at zero.
    scale[scale < 1e-9] = 1.0
    return mean, scale


def _directions(embeddings: np.ndarray) -> np.ndarray:
    # Mean-pooled states share one large direction, which would hide the differences between texts.
    rows = embeddings - embeddings.mean(0, dtype=np.float64)
    unit: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    return unit


def _fit(model: Any, features: np.ndarray, targets: np.ndarray | None) -> None:
    import warnings

    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # Embeddings of untrained layers may coincide or not converge: the low score shows that.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(features, targets)


@dataclass(frozen=True, slots=True)
class TextTask:
    kind: str
    """A name in `SCORERS`."""
    text_sets: tuple[str, ...]
    """Names in `TEXT_SETS`; tasks that name the same set share its embeddings."""
    gold: Callable[[], Any]
    """Returns the labels, or the rated pairs; None if document i answers query i."""


TEXT_SETS: dict[str, Callable[[], list[str]]] = {
    "bbc-headlines": lambda: [article.headline for article in corpora.evaluation_articles()],
    "bbc-leads": lambda: [article.lead for article in corpora.evaluation_articles()],
    "tweets": lambda: [text for _, text in corpora.evaluation_tweets()],
    "lee": lambda: list(corpora.lee_documents()),
    "words": lambda: list(corpora.rated_words()[0]),
}


def _topics() -> list[str]:
    return [article.topic for article in corpora.evaluation_articles()]


TASKS: dict[str, TextTask] = {
    "bbc-headline-topic": TextTask("classification", ("bbc-headlines",), _topics),
    "bbc-story-topic": TextTask("classification", ("bbc-leads",), _topics),
    "tweet-sentiment": TextTask(
        "classification",
        ("tweets",),
        lambda: [sentiment for sentiment, _ in corpora.evaluation_tweets()],
    ),
    "bbc-clusters": TextTask("clustering", ("bbc-leads",), _topics),
    "lee-similarity": TextTask("similarity", ("lee",), corpora.lee_pairs),
    "word-similarity": TextTask("similarity", ("words",), lambda: corpora.rated_words()[1]),
    "bbc-retrieval": TextTask("retrieval", ("bbc-headlines", "bbc-leads"), lambda: None),
}
"""The evaluation tasks by name, which docs/how-to/representations.md describes."""


class TextTasks(EmbeddedTexts):
    """Workload: item ``{"checkpoint", "layer", "task"}`` to a score with its standard error.

    The value is ``{"score", "stderr", "n", "metric", "kind"}``. Texts are embedded by the mean of
    one layer's hidden states. All layers of a text set come from one forward pass, which the other
    layers and tasks of the checkpoint share. The options are those of `EmbeddedTexts`.
    """

    def run(
        self, context: SharedEmbeddings, items: Iterable[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """Yield one score per item, in order.

        Raises PermanentError: the item's task or layer does not exist. Raises WorkloadError: the
        package that contains the texts is not installed.
        """
        for item in items:
            name = item.get("task")
            if not isinstance(name, str) or name not in TASKS:
                raise PermanentError(f"no task {name!r}", hint=near_miss(str(name), list(TASKS)))
            task = TASKS[name]
            layer = require_layer(item, context.layers, context.name)
            embedded = [context.of(texts(name), layer) for name in task.text_sets]
            metric, scorer = SCORERS[task.kind]
            score = scorer(embedded, task.gold())
            yield {**asdict(score), "metric": metric, "kind": task.kind}


SCORERS: dict[str, tuple[str, Callable[[list[np.ndarray], Any], Score]]] = {
    "classification": ("accuracy", lambda x, labels: classification(x[0], labels)),
    "clustering": ("v_measure", lambda x, labels: clustering(x[0], labels)),
    "similarity": ("spearman", lambda x, pairs: similarity(x[0], pairs)),
    "retrieval": ("ndcg@10", lambda x, _: retrieval(x[0], x[1])),
}
"""The metric of each kind, and the function that computes it from embeddings and gold."""


@cache
def texts(name: str) -> list[str]:
    """Return the texts of a set, read once per process."""
    return TEXT_SETS[name]()
