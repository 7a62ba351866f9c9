"""Work that items of one loaded group share: its first item does it, and repeats need not.

The first evaluation of a task on a checkpoint makes the forward passes over the task's texts, and
the same task on other layers of this checkpoint reuses them. Items are of one kind if they have the
same value under one text key, such as ``task``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_toolkit.planning.work import context

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpc_toolkit.planning.work import StageWork

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]

Kind = tuple[str, int]
"""A context, as from :func:`hpc_toolkit.planning.work.context`, and the kind of an item in it."""

_MOST_KINDS = 100
_FEWEST = 3
"""Fewest firsts and fewest repeats that must have been seen."""
_FAR = float(np.log(1.5))
"""Least difference of the medians of firsts and repeats, in logarithms."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """Which items are the first of their kind since their worker loaded their group."""

    first: Ints
    """For each item, the seen ones first: 1 if it is known to be the first of its kind."""
    unknown: bool = False
    """Whether repeats are to come, but how long they take is not known: few were seen."""
    firsts: tuple[tuple[tuple[Kind, int], ...], ...] = ()
    """For each batch, the kinds in it, each with the index of its first item in the stage's
    :attr:`~hpc_toolkit.planning.work.StageWork.left`."""
    done: Mapping[str, frozenset[Kind]] = field(default_factory=dict)
    """The kinds that each worker has done since its last load."""


def repeats(stage: StageWork, z: Floats, word: Ints) -> Repeats:
    """Find out whether repeats of a kind of item take far less time than its firsts.

    ``z`` is the logarithm of the seconds of each seen item, and ``word`` tells seen items apart
    whose lengths differ for another reason.
    """
    best = 0.0
    chosen: Ints | None = None
    hidden: Ints | None = None
    for key in _keys(stage):
        kinds = _numbered([str(one.get(key)) for one in _items(stage)])
        first = _flags(stage, kinds)
        gain, settled = _gain(z, first, kinds[: len(z)])
        if gain > best:
            best, chosen = gain, kinds
        elif hidden is None and not settled and _some_repeat(stage, kinds):
            hidden = kinds
    if chosen is None:
        kinds = np.zeros(len(z) + len(stage.left), dtype=np.int64)
        if _gain(z, _flags(stage, kinds), word)[0]:
            chosen = kinds
    if chosen is not None:
        return _repeats(stage, chosen, unknown=False)
    if hidden is not None:
        return _repeats(stage, hidden, unknown=True)
    return Repeats(np.zeros(len(z) + len(stage.left), dtype=np.int64))


def _items(stage: StageWork) -> list[dict[str, object]]:
    return [*(one.item for one in stage.seen), *stage.left]


def _numbered(values: Sequence[object]) -> Ints:
    number = {value: n for n, value in enumerate(dict.fromkeys(values))}
    return np.array([number[value] for value in values], dtype=np.int64)


def _keys(stage: StageWork) -> list[str]:
    """Return the text keys, but not that of the group, with few values among many items."""
    items = _items(stage)
    keys = {key for key, value in items[0].items() if isinstance(value, str)} - {stage.group_by}
    most = min(_MOST_KINDS, len(items) // 3)
    return sorted(key for key in keys if 1 < _distinct(items, key, most + 1) <= most)


def _distinct(items: Sequence[dict[str, object]], key: str, most: int) -> int:
    """Return how many values a key has, at most ``most``."""
    values: set[str] = set()
    for one in items:
        values.add(str(one.get(key)))
        if len(values) >= most:
            break
    return len(values)


def _flags(stage: StageWork, kinds: Ints) -> Ints:
    """Return 1 for each seen item that is the first of its kind since its worker's load."""
    had, first = set(), np.zeros(len(stage.seen), dtype=np.int64)
    for number, (one, kind) in enumerate(zip(stage.seen, kinds.tolist(), strict=False)):
        mark = (one.worker, one.load, one.group, kind)
        first[number] = mark not in had
        had.add(mark)
    return first


def _gain(z: Floats, first: Ints, kinds: Ints) -> tuple[float, bool]:
    """Return how much variance the firsts of these kinds explain, 0 if they do not take far longer;
    and whether enough repeats were seen to know.
    """
    repeated = int(len(first) - first.sum())
    known = len(np.unique(kinds[first == 0]))
    settled = repeated >= _FEWEST and 2 * known >= len(np.unique(kinds))
    if min(int(first.sum()), repeated) < _FEWEST:
        return 0.0, settled
    flat = z - (np.bincount(kinds, z) / np.maximum(np.bincount(kinds), 1))[kinds]
    if np.median(flat[first == 1]) - np.median(flat[first == 0]) <= _FAR:
        return 0.0, settled
    explained = sum(float(np.sum(flat[first == one])) ** 2 / np.sum(first == one) for one in (0, 1))
    return float(explained), settled


def _some_repeat(stage: StageWork, kinds: Ints) -> bool:
    """Return whether one of several groups has two items left of one kind."""
    groups = [stage.group_of(one) for one in stage.left]
    of = kinds[len(stage.seen) :].tolist()
    return len(set(groups)) > 1 and len(set(zip(groups, of, strict=True))) < len(of)


def _repeats(stage: StageWork, kinds: Ints, *, unknown: bool) -> Repeats:
    seen, of = len(stage.seen), kinds.tolist()
    last = {one.worker: one.load for one in stage.seen}
    done: dict[str, set[Kind]] = {}
    for one, kind in zip(stage.seen, of, strict=False):
        if one.load == last[one.worker]:
            done.setdefault(one.worker, set()).add((context(stage.name, one.group), kind))
    first = np.zeros(len(of), dtype=np.int64)
    first[:seen] = 1 if unknown else _flags(stage, kinds)
    firsts = []
    for batch in stage.batches:
        places: dict[Kind, int] = {}
        for item in range(batch.first, batch.first + batch.count):
            group = stage.group_of(stage.left[item])
            places.setdefault((context(stage.name, group), of[seen + item]), item)
        firsts.append(tuple(places.items()))
        if batch.is_running:
            kind = firsts[-1][0][0]
            first[seen + batch.first] = kind not in done.get(batch.holder, ())
            done.setdefault(batch.holder, set()).add(kind)
    return Repeats(
        first,
        unknown=unknown,
        firsts=tuple(firsts),
        done={worker: frozenset(those) for worker, those in done.items()},
    )
