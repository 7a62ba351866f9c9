"""The best arm so far of a search, by what it had spent, and what a random order would give."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from hpc_toolkit.bandit.registry import TASK_RULES
from hpc_toolkit.campaign.search import observe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpc_toolkit.bandit import Pull
    from hpc_toolkit.bandit.rewards import Reward
    from hpc_toolkit.campaign.evaluations import Searched


class Step(NamedTuple):
    """The best arm after some evaluations."""

    evaluations: int
    seconds: float
    """Seconds that these evaluations took, added up."""
    arm: str
    reward: float
    """Of the arm over all tasks; of an arm of a race that lacks some, over its tasks."""


class Spent(NamedTuple):
    """What the first pulls of a search took."""

    evaluations: int
    seconds: float


def progress_of(searched: Searched, rewards: Mapping[str, Reward]) -> list[Step]:
    """The best arm so far after each finished pull, in the order of the asks.

    ``rewards`` are those of all arms that have a result of every task. The best arm of a policy
    that requests tasks in parts is the one that it would name after each decision.
    """
    if searched.campaign.search.policy in TASK_RULES:
        return list(_race(searched, rewards))
    return list(_by_arm(searched, rewards))


def _by_arm(searched: Searched, rewards: Mapping[str, Reward]) -> Iterator[Step]:
    known = [one.arm for one in searched.found.known if one.arm in rewards]
    best = max(known, key=lambda arm: rewards[arm].mean, default=None)
    if best is not None:
        yield Step(0, 0.0, best, rewards[best].mean)
    for pull, spent in _spent(searched):
        found = rewards.get(pull.arm)
        if found is not None and (best is None or found.mean > rewards[best].mean):
            best = pull.arm
        if best is not None:
            yield Step(*spent, best, rewards[best].mean)


def _race(searched: Searched, rewards: Mapping[str, Reward]) -> Iterator[Step]:
    judge, spent = searched.found.policy(), dict(_spent(searched))
    for decision in searched.rounds:
        last = None
        for pull in decision.pulls:
            if pull in spent:
                judge.tell(observe(pull.arm, searched.rows[pull]))
                last = spent[pull]
        best = judge.best() if last is not None else None
        if last is not None and best is not None:
            reward = rewards[best.arm].mean if best.arm in rewards else best.mean
            yield Step(*last, best.arm, reward)


def _spent(searched: Searched) -> Iterator[tuple[Pull, Spent]]:
    """Each finished pull, with what it and the finished pulls before it took."""
    evaluations, seconds = 0, 0.0
    for pull in searched.pulls:
        rows = searched.rows.get(pull)
        if rows is not None:
            evaluations += len(rows)
            seconds += math.fsum(row["seconds"] for row in rows)
            yield pull, Spent(evaluations, seconds)


def expected_best(rewards: Sequence[float], counts: Sequence[int]) -> list[float]:
    """The expected best reward of n different arms drawn at random, for each n of ``counts``.

    Of N arms, the k-th best is the best of the draw with a probability of C(N-k, n-1) / C(N, n).
    """
    ranked = sorted(rewards, reverse=True)
    return [math.fsum(_weighted(ranked, drawn)) for drawn in counts]


def _weighted(ranked: Sequence[float], drawn: int) -> Iterator[float]:
    chance, left = drawn / len(ranked), len(ranked)
    for reward in ranked:
        yield chance * reward
        # The chance that the next arm is drawn, and none before it.
        left -= 1
        if left < drawn:
            return
        chance *= (left - drawn + 1) / left


def some_counts(most: int, points: int = 120) -> list[int]:
    """At most about ``points`` whole numbers from 1 to ``most``, close together at the begin."""
    spread = (round(most ** (number / points)) for number in range(points + 1))
    even = (1 + round((most - 1) * number / points) for number in range(points + 1))
    return sorted({*spread, *even}) if most >= 1 else []
