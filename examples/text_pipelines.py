"""Text classification with bags of words or characters, on news and tweets from Python packages.

`score` is the workload of examples/text-pipelines.toml: one item is a pipeline and a task.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC

from hpc_toolkit.science.workloads.text_tasks import evaluation_articles, evaluation_tweets


@cache
def texts(task: str) -> tuple[list[str], list[str]]:
    """The texts of a task and their labels."""
    if task == "tweet-sentiment":
        tweets = evaluation_tweets()
        return [text for _, text in tweets], [sentiment for sentiment, _ in tweets]
    articles = evaluation_articles()
    found = [one.headline if task == "headline-topic" else one.lead for one in articles]
    return found, [one.topic for one in articles]


def score(item: dict[str, Any]) -> dict[str, float]:
    """Mean accuracy over five folds, and its standard error."""
    vectors = TfidfVectorizer(
        analyzer=item["features"],
        ngram_range=(item["shortest"], item["longest"]),
        min_df=item["min_df"],
        sublinear_tf=item["sublinear"],
        stop_words="english" if item.get("stop_words") else None,
    )
    strength = item["strength"]
    classifiers = {
        "logistic": lambda: LogisticRegression(C=strength, max_iter=1000),
        "svm": lambda: LinearSVC(C=strength),
        "bayes": lambda: MultinomialNB(alpha=1 / strength),
    }
    pipeline = make_pipeline(vectors, classifiers[item["classifier"]]())
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    scores = cross_val_score(pipeline, *texts(item["task"]), cv=folds)
    return {"score": float(scores.mean()), "stderr": float(scores.std(ddof=1) / 5**0.5)}
