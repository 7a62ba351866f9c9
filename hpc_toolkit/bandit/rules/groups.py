"""Classic bandits whose levers are groups of arms: pulling a lever proposes its next arm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.policy import Proposal
from hpc_toolkit.bandit.rule import Rule, Stream, drawn, first_best, number_option
from hpc_toolkit.bandit.rules.guided import Scale, first_best_of, space_filling_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from hpc_toolkit.bandit.rule import History


@dataclass(slots=True)
class Lever:
    """One group of arms."""

    free: list[int]
    """Arms that may still be proposed, in the seed's order."""
    pulls: int
    """Arms told, failed or pending."""
    total: float
    """Sum of the rescaled rewards."""
    rewards: int

    @property
    def mean(self) -> float:
        """Mean reward, rescaled; 0 while there is none."""
        return self.total / self.rewards if self.rewards else 0.0


def levers_of(
    history: History, rescale: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> list[Lever]:
    """Return one lever per group, in table order; ``rescale`` is applied to all rewards at once."""
    stream = [history.seed, Stream.WITHIN_GROUPS]
    order = np.random.default_rng(stream).permutation(len(history.table.arms))
    place = np.argsort(order)
    rescaled = rescale(history.rewards).tolist() if history.scored else []
    reward_of = dict(zip(history.scored, rescaled, strict=True))
    levers = []
    for members in history.table.members.values():
        rewards = [reward_of[i] for i in members if i in reward_of]
        free = [i for i in members if i not in history.taken]
        levers.append(
            Lever(
                free=sorted(free, key=lambda i: int(place[i])),
                pulls=len(members) - len(free),
                total=math.fsum(rewards),
                rewards=len(rewards),
            )
        )
    return levers


def unpulled(history: History, levers: list[Lever]) -> list[int]:
    """Return the levers without a pull, in space-filling order of their groups' mean features."""
    points = history.table.standardised.values
    centres = np.array(
        [points[list(group)].mean(axis=0) for group in history.table.members.values()]
    )
    order = space_filling_order(centres, history.seed, len(centres))
    return [lever for lever in order if not levers[lever].pulls]


def pulled(
    history: History,
    levers: list[Lever],
    n: int,
    pick: Callable[[int], tuple[int, float | None, str]],
) -> list[Proposal]:
    """Pull at most ``n`` levers, and propose the next arm of each.

    ``pick`` gets the number of arms proposed before, and returns a lever with free arms, the value
    that it maximised, and the reason.
    """
    found: list[Proposal] = []
    while len(found) < n and any(lever.free for lever in levers):
        chosen, value, reason = pick(len(found))
        found.append(Proposal(history.table.ids[levers[chosen].free.pop(0)], value, reason))
        levers[chosen].pulls += 1
    return found


def to_unit_interval(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rescale the lowest reward to 0 and the highest to 1; all to 0 if they are equal."""
    low, high = rewards.min(), rewards.max()
    return np.asarray((rewards - low) / (high - low) if high > low else np.zeros(len(rewards)))


@dataclass(frozen=True, slots=True)
class Ucb1(Rule):
    """Classic UCB1 (Auer, Cesa-Bianchi and Fischer 2002) whose levers are the groups of the table.

    Pulling a group proposes its next arm, in an order drawn from the seed. Groups without a pull
    come first, in space-filling order of their mean features; pending arms count as pulled.
    Rewards are rescaled by the lowest and highest seen, since UCB1 assumes [0, 1].

    Groups share no information: with more groups than budget, or with one arm per group, the rule
    is only a space-filling order.
    """

    name: ClassVar[str] = "ucb1"

    def choose(self, history: History, n: int) -> list[Proposal]:
        levers = levers_of(history, to_unit_interval)
        names = list(history.table.members)
        first = unpulled(history, levers)

        def pick(_: int) -> tuple[int, float | None, str]:
            if first:
                return first[0], None, f"first arm of {names[first.pop(0)]}"
            chosen, bound = _highest_bound(levers)
            return chosen, bound, f"upper confidence bound of {names[chosen]} is {bound:.4g}"

        return pulled(history, levers, n, pick)


def _highest_bound(levers: list[Lever]) -> tuple[int, float]:
    """Return the lever to pull next and its bound, of levers some of which have free arms.

    A lever without a reward yet counts as the lowest reward so far.
    """
    pulls = sum(lever.pulls for lever in levers)
    bounds = [
        lever.mean + math.sqrt(2.0 * math.log(pulls) / lever.pulls) if lever.free else -math.inf
        for lever in levers
    ]
    chosen = first_best(bounds)
    return chosen, bounds[chosen]


@dataclass(frozen=True, slots=True)
class EpsilonGreedy(Rule):
    """Pull the group with the highest mean reward, or with probability ``epsilon`` a random group.

    Pulling a group proposes its next arm, in an order drawn from the seed. Groups without a pull
    come first, in space-filling order of their mean features. Groups share no information: with
    more groups than budget, the rule is only a space-filling order.
    """

    name: ClassVar[str] = "epsilon-greedy"
    epsilon: float = number_option(0.1, high=1)
    """Probability of pulling a random group among the groups with free arms."""

    def choose(self, history: History, n: int) -> list[Proposal]:
        levers = levers_of(history, lambda rewards: rewards)
        lowest = min(history.rewards, default=0.0)
        names = list(history.table.members)
        first = unpulled(history, levers)

        def pick(chosen_before: int) -> tuple[int, float | None, str]:
            generator = drawn(history, Stream.EPSILON, chosen_before)
            if first:
                return first[0], None, f"first arm of {names[first.pop(0)]}"
            candidates = [i for i, lever in enumerate(levers) if lever.free]
            if generator.random() < self.epsilon:
                chosen = candidates[int(generator.integers(len(candidates)))]
                return chosen, None, f"{names[chosen]} at random"
            # A group without a reward yet counts as the lowest reward so far.
            means = [levers[i].mean if levers[i].rewards else lowest for i in candidates]
            best = first_best(means)
            chosen, mean = candidates[best], float(means[best])
            return chosen, mean, f"mean of {names[chosen]} is {mean:.4g}"

        return pulled(history, levers, n, pick)


@dataclass(frozen=True, slots=True)
class GaussianTs(Rule):
    """Pull the group with the highest mean reward, by a draw from the posterior of every mean.

    For a group with ``k`` rewards of sum ``t``, standardised over all rewards, the draw is from
    N(t / (k + 1), 1 / (k + 1)) (Agrawal and Goyal 2013, normal priors). Pulling a group proposes
    its next arm, in an order drawn from the seed. Groups share no information.
    """

    name: ClassVar[str] = "gaussian-ts"

    def choose(self, history: History, n: int) -> list[Proposal]:
        scale = Scale.of(history.rewards) if history.scored else Scale(0.0, 1.0)
        levers = levers_of(history, scale.to_model)
        names = list(history.table.members)
        centres = np.array([lever.total / (lever.rewards + 1) for lever in levers])
        deviations = np.array([1.0 / math.sqrt(lever.rewards + 1) for lever in levers])

        def pick(chosen_before: int) -> tuple[int, float | None, str]:
            free = np.array([bool(lever.free) for lever in levers])
            generator = drawn(history, Stream.GROUP_SAMPLE, chosen_before)
            draws = centres + deviations * generator.standard_normal(len(levers))
            chosen = first_best_of(draws, free)
            value = scale.to_reward(draws[chosen])
            return chosen, value, f"a draw of the mean of {names[chosen]} is {value:.4g}"

        return pulled(history, levers, n, pick)
