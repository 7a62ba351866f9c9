"""Seeded variants of a text, for metrics that compare representations of the same content.

The method is specific to hpctk: it changes one word in ten, by splitting it, by swapping two
neighbouring letters, or by replacing a letter by a neighbouring key. Published figures use other,
unseeded changes, so compare values of these metrics with each other, not with published ones.
"""

from __future__ import annotations

import hashlib
import random
import re

SHARE = 0.1
"""Share of the words that are changed; at least one word, if any word has two letters."""

_WORDS = re.compile(r"\S+")
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


def augment(text: str, view: int, seed: int = 0) -> str:
    """Return view ``view`` of ``text``: the same for the same text, number and seed, anywhere.

    Words keep their order and their number of letters, but may be split. A text without a word of
    two letters is unchanged.
    """
    digest = hashlib.sha256(f"{seed}:{view}:{text}".encode("utf-8", "surrogatepass")).digest()
    draw = random.Random(digest)
    words = [match for match in _WORDS.finditer(text) if len(match.group()) > 1]
    count = min(len(words), max(1, round(SHARE * len(words))))
    parts, at = [], 0
    for match in sorted(draw.sample(words, count), key=lambda match: match.start()):
        change = draw.choice((_split, _swapped, _mistyped))
        parts += [text[at : match.start()], change(match.group(), draw)]
        at = match.end()
    return "".join([*parts, text[at:]])


def _split(word: str, draw: random.Random) -> str:
    at = draw.randrange(1, len(word))
    return f"{word[:at]} {word[at:]}"


def _swapped(word: str, draw: random.Random) -> str:
    pairs = [at for at in range(len(word) - 1) if word[at] != word[at + 1]]
    if not pairs:
        return _split(word, draw)
    at = draw.choice(pairs)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def _mistyped(word: str, draw: random.Random) -> str:
    letters = [at for at, letter in enumerate(word) if any(letter in row for row in _ROWS)]
    if not letters:
        return _swapped(word, draw)
    at = draw.choice(letters)
    row = next(row for row in _ROWS if word[at] in row)
    key = row.index(word[at])
    beside = [row[near] for near in (key - 1, key + 1) if 0 <= near < len(row)]
    return word[:at] + draw.choice(beside) + word[at + 1 :]
