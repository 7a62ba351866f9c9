"""Durations of the items left: many draws, each from a model fitted to another resampling.

The logarithm of an item's seconds is a mean, plus the effects of a word and a number of the item,
plus the effects of its sibling groups and its group, plus a residual. Each draw gives the seen
items new weights (Bayesian bootstrap), fits the model, and gives every item left the residual of a
seen item.
Decision 0030 explains the reasons, and what the intervals promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.planning.traits import tamed, traits

if TYPE_CHECKING:
    from hpc_toolkit.planning.traits import Floats, Ints, Traits
    from hpc_toolkit.planning.work import StageWork


_SIBLINGS_SD = 0.7
"""How much sets of sibling groups, and words, differ if only one of them is known, as a standard
deviation of logarithms: another model size may take twice or half as long."""
_SLOPES = ((0.5, 0.0, 0.3), (0.5, 1.0, 0.3))
"""Prior of a slope, a mixture of (probability, mean, standard deviation): either the number matters
little, or twice the number takes about twice as long."""
_LEVEL_SD = 0.07
"""How far the mean of all items with one number is off the slope: standard deviation of a log."""
_GROUP_SD = 0.15
"""How far sibling groups differ, likewise."""
_TAIL = (0.05, 0.7)
"""Bounds of the tail index: how much longer than all seen items the next one may be."""
_TAIL_WEIGHT = 0.5
"""Mean weight of the tail, in units of one seen item. Most draws give it almost none and some much
more, so that it widens the interval but does not move the median."""
_KIND_WEIGHT = 0.5
"""Mean weight of kinds of which no item has ended, in units of one seen item; as above."""
_KIND_SD = 1.5
"""How much longer items of these kinds take: the absolute value of a normal logarithm has this
standard deviation before its sign is dropped."""

_LEAST_S = 1e-4
_FARTHEST = 20.0
"""No item is drawn longer than this many times the longest seen item."""


class Fit:
    def __init__(self, found: Traits, of: Ints, z: Floats, chance: np.random.Generator) -> None:
        self._traits, self._of, self._chance = found, of, chance
        self._weight = chance.exponential(size=len(of))
        self._mean = float(np.average(z, weights=self._weight))
        self.first = 0.0
        self._slope = 0.0
        self._curved = float(np.sqrt(chance.random()))
        self._words = np.zeros(found.words)
        self._group = np.zeros(len(found.groups))
        rest = z - self._mean
        self._number = self._best_number(rest)
        for last in (False, True) if found.keys else (True,):
            rest = rest - self._fit_first(rest)
            rest = rest - self._fit_words(rest)
            rest = rest - self._fit_slope(rest, last=last)
            middle = float(np.average(rest, weights=self._weight))
            self._mean += middle
            rest = rest - middle
        rest = rest - self._fit_groups(rest)
        self._rest = rest
        # Hill's estimate of the tail index from the longest residuals.
        top = np.sort(rest)[::-1][: max(3, int(np.sqrt(len(rest)))) + 1]
        self._index = (
            float(np.clip(np.mean(top[:-1] - top[-1]), *_TAIL)) if len(top) > 2 else _TAIL[1]
        )
        self._kind = abs(float(chance.normal(0.0, _KIND_SD)))

    def _fit_first(self, rest: Floats) -> Floats:
        at = self._traits.first[self._of] == 1
        if not at.any():
            return np.zeros(len(rest))
        step = float(np.average(rest[at], weights=self._weight[at]))
        step -= float(np.average(rest[~at], weights=self._weight[~at])) if (~at).any() else 0.0
        self.first += step
        return np.where(at, step, 0.0)

    def _fit_words(self, rest: Floats) -> Floats:
        if self._traits.words == 1:
            return np.zeros(len(rest))
        of = self._traits.word[self._of]
        effect, _ = _effects(rest, of, self._weight, self._traits.words, _SIBLINGS_SD)
        unseen = np.bincount(of, minlength=self._traits.words) == 0
        width = float(np.std(effect[~unseen])) if (~unseen).any() else _SIBLINGS_SD
        effect[unseen] = self._chance.normal(0.0, width, int(unseen.sum()))
        self._words += effect
        return effect[of]

    def _best_number(self, rest: Floats) -> Floats:
        """Return the candidate number that fits best with these weights."""
        numbers = self._traits.numbers
        if len(numbers) < 2:
            return numbers[0] if numbers else np.zeros(len(self._traits))
        near = tamed(rest - np.average(rest, weights=self._weight))
        fitted = [self._slope_of(one[self._of], near)[1] for one in numbers]
        left = [float(np.sum(self._weight * (near - one) ** 2)) for one in fitted]
        return numbers[int(np.argmin(left))]

    def _slope_of(self, x: Floats, rest: Floats) -> tuple[float, Floats]:
        centred = x - np.average(x, weights=self._weight)
        spread = float(np.sum(self._weight * centred**2))
        slope = float(np.sum(self._weight * centred * rest)) / max(spread, 1e-12)
        return slope, slope * centred

    def _fit_slope(self, rest: Floats, *, last: bool) -> Floats:
        """Update the slope and return its change; in the last round draw it from its posterior."""
        if not self._traits.numbers:
            return np.zeros(len(rest))
        x = self._number[self._of]
        near = tamed(rest)
        more, fitted = self._slope_of(x, near)
        if last:
            more = self._believed(self._slope + more, x, near - fitted) - self._slope
        middle = float(np.average(x, weights=self._weight))
        self._slope += more
        self._mean -= more * middle
        return more * (x - middle)

    def _fit_groups(self, rest: Floats) -> Floats:
        found = self._traits
        groups = len(found.groups)
        if groups == 1:
            return np.zeros(len(rest))
        of = found.group[self._of]
        if found.kins in (1, groups):
            self._group = self._effects(rest, of, np.zeros(groups, dtype=np.int64), _SIBLINGS_SD)
        else:
            one = np.zeros(found.kins, dtype=np.int64)
            families = self._effects(rest, found.siblings[of], one, _SIBLINGS_SD)[found.siblings]
            own = self._effects(rest - families[of], of, found.siblings, _GROUP_SD)
            self._group = families + own
        return self._group[of]

    def _effects(self, rest: Floats, of: Ints, above: Ints, prior_sd: float) -> Floats:
        """Return the effect of each kind; effects of unseen kinds are drawn with the seen spread.

        ``rest`` and ``of`` are the residual and the kind of each item, ``above`` has for each kind
        the larger kind to which it belongs, and ``prior_sd`` is how much kinds of one larger kind
        differ if few are known.
        """
        kinds = len(above)
        effect, width = _effects(rest, of, self._weight, kinds, prior_sd)
        unseen = np.bincount(of, minlength=kinds) == 0
        known = np.bincount(above[~unseen], minlength=int(above.max()) + 1)
        # The seen kinds may happen to be short, and then all others are longer together.
        shift = self._chance.normal(0.0, width / np.sqrt(np.maximum(known, 1)))
        drawn = self._chance.normal(0.0, width, kinds) + shift[above]
        return np.where(unseen, drawn, effect)

    def _believed(self, slope: float, x: Floats, rest: Floats) -> float:
        """Draw a slope from its posterior, which is close to the prior if the seen items have
        nearly the same number.
        """
        spread = float(np.sum((x - x.mean()) ** 2))
        chance = float(np.var(rest)) / max(spread, 1e-12)
        # Many items with few distinct numbers tell no more about the slope than these numbers can.
        _, of = np.unique(x, return_inverse=True)
        levels = float(np.sum(np.bincount(of, x - x.mean()) ** 2)) / max(spread, 1e-12) ** 2
        noise = chance + _LEVEL_SD**2 * levels
        fits = []
        for share, mean, sd in _SLOPES:
            variance = noise + sd**2
            fits.append(share / np.sqrt(variance) * np.exp(-((slope - mean) ** 2) / 2 / variance))
        total = sum(fits)
        which = int(self._chance.random() * total > fits[0]) if total > 0 else 1
        _, mean, sd = _SLOPES[which]
        belief = sd**2 / (sd**2 + noise)
        # The random weights have already spread the slope by part of this variance.
        open_sd = float(np.sqrt(max(belief * noise - belief**2 * chance, 0.0)))
        return mean + belief * (slope - mean) + float(self._chance.normal(0.0, open_sd))

    def _bend(self, x: Floats) -> Floats:
        """Return the correction to the slope outside the seen numbers, where a fixed part of each
        length has another share than among the seen numbers.
        """
        slope, known = self._slope, self._number[self._of]
        if not 0.0 < slope < 1.0:
            return np.zeros(len(x))
        fixed = 1.0 / slope - 1.0
        edge = np.clip(x, known.min(), known.max())
        bent = np.log((fixed + np.exp(x)) / (fixed + np.exp(edge))) - slope * (x - edge)
        return self._curved * bent

    def _middle(self, items: Ints) -> Floats:
        found = self._traits
        of_kind = self._words[found.word[items]] + self._group[found.group[items]]
        x = self._number[items]
        return self._mean + of_kind + self._slope * x + self._bend(x)

    def sample(self, items: Ints) -> Floats:
        """Draw the logarithms of the seconds of items that have not begun."""
        seen = len(self._rest)
        more = self._chance.gamma([_TAIL_WEIGHT, _KIND_WEIGHT])
        share = np.cumsum(np.concatenate([self._weight, more]))
        drawn = np.searchsorted(share / share[-1], self._chance.random(len(items)), side="right")
        rest = np.append(self._rest, [0.0, 0.0])[np.minimum(drawn, seen)]
        tail = drawn == seen
        rest[tail] = float(self._rest.max()) + self._beyond_all(int(tail.sum()))
        other = drawn > seen
        rest[other] = self._kind + self._chance.choice(self._rest, int(other.sum()))
        found: Floats = self._middle(items) + rest
        return found

    def beyond(self, items: Ints, ages: Floats) -> Floats:
        """Draw the same for items that have run for ``ages``, logarithms of seconds."""
        middle = self._middle(items)
        found = np.empty(len(items))
        for number, age in enumerate(ages - middle):
            longer = np.flatnonzero(self._rest > age)
            weight = self._weight[longer]
            tail = self._chance.gamma(_TAIL_WEIGHT)
            if len(longer) and self._chance.random() < weight.sum() / (weight.sum() + tail):
                drawn = self._chance.choice(longer, p=weight / weight.sum())
                found[number] = middle[number] + self._rest[drawn]
            else:
                start = max(float(age), float(self._rest.max()))
                found[number] = middle[number] + start + self._beyond_all(1)[0]
        return found

    def _beyond_all(self, count: int) -> Floats:
        return self._index * self._chance.exponential(size=count)


def _effects(
    rest: Floats, of: Ints, weight: Floats, kinds: int, prior_sd: float
) -> tuple[Floats, float]:
    """Return the mean of each kind, shrunk towards 0 as far as chance may explain it, and how much
    kinds differ, as a standard deviation.
    """
    mass = np.bincount(of, weight, kinds)
    count = np.bincount(of, minlength=kinds)
    means = np.bincount(of, weight * rest, kinds) / np.maximum(mass, 1e-12)
    seen = count > 0
    within = float(np.sum(weight * (rest - means[of]) ** 2) / mass.sum())
    within *= len(of) / max(len(of) - int(seen.sum()), 1)
    noise = within / np.maximum(count, 1)
    between = float(np.sum(means[seen] ** 2 - noise[seen])) if seen.sum() > 1 else 0.0
    # The prior counts as one more kind, so that a few kinds alone do not determine the spread.
    variance = (max(between, 0.0) + prior_sd**2) / max(int(seen.sum()), 1)
    effect = means * variance / np.maximum(variance + noise, 1e-12)
    effect[~seen] = 0.0
    return effect, float(np.sqrt(variance))


@dataclass(frozen=True, slots=True)
class Lengths:
    seconds: Floats
    load_s: dict[str, float]
    """Seconds to load each group, by its key."""
    first: float
    """Factor on the duration of the first item after a load."""

    def times(self, factor: float) -> Lengths:
        load_s = {key: seconds * factor for key, seconds in self.load_s.items()}
        return Lengths(self.seconds * factor, load_s, self.first)


@dataclass(frozen=True, slots=True)
class Guess:
    """The user's guess where nothing is known."""

    seconds_per_item: float
    load_s: float = 0.0
    factor: float = 1.5
    """In 9 of 10 cases the true means are within this factor, up or down; at least 1."""
    spread: float = 0.5
    """How much items differ: standard deviation of the logarithms of their seconds."""


class GuessedLengths:
    keys: tuple[str, ...] = ()

    def __init__(self, stage: StageWork, guess: Guess) -> None:
        self._stage, self._guess = stage, guess
        self._groups = {batch.group for batch in stage.batches}
        self._groups |= {stage.group_of(item) for item in stage.left}

    def draw(self, chance: np.random.Generator) -> Lengths:
        guess = self._guess
        off = np.exp(chance.normal(0.0, np.log(guess.factor) / 1.645, 2))
        middle = np.log(guess.seconds_per_item * off[0]) - guess.spread**2 / 2
        seconds = np.exp(middle + guess.spread * chance.standard_normal(len(self._stage.left)))
        load_s = float(guess.load_s * off[1])
        return Lengths(seconds, dict.fromkeys(self._groups, load_s), 1.0)


class LearnedLengths:
    """Draws durations from a model of the seen items, of which there must be at least one."""

    def __init__(self, stage: StageWork) -> None:
        self._stage = stage
        self._z = np.log(np.maximum([one.seconds for one in stage.seen], _LEAST_S))
        self._traits = traits(stage, self._z)
        self._left = np.arange(len(self._z), len(self._traits))
        self.keys = self._traits.keys
        running = [one for one in stage.batches if one.holder and not one.loading and one.age_s > 0]
        self._running = np.array([len(self._z) + one.first for one in running], dtype=np.int64)
        self._ages = np.log([max(one.age_s, _LEAST_S) for one in running])

    def draw(self, chance: np.random.Generator) -> Lengths:
        seen, running, ages = np.arange(len(self._z)), self._running, self._ages
        fit = Fit(self._traits, seen, self._z, chance)
        if len(running):
            # Running items are known to take longer; a fit to ended items alone is too short.
            z = np.concatenate([self._z, fit.beyond(running, ages)])
            fit = Fit(self._traits, np.concatenate([seen, running]), z, chance)
        logs = fit.sample(self._left)
        if len(running):
            logs[running - len(self._z)] = fit.beyond(running, ages)
        longest = np.log(_FARTHEST) + max(self._z.max(), ages.max(initial=-np.inf))
        seconds = np.exp(np.minimum(logs, longest))
        return Lengths(seconds, self._loads(chance), float(np.exp(fit.first)))

    def _loads(self, chance: np.random.Generator) -> dict[str, float]:
        """Return mean seconds to load each group: of its sibling groups, else of all groups."""
        traits_ = self._traits
        place = {key: number for number, key in enumerate(traits_.groups)}
        loads = [load for load in self._stage.loads if load.group in place]
        if not loads:
            return dict.fromkeys(traits_.groups, 0.0)
        weight = chance.exponential(size=len(loads))
        seconds = np.array([load.seconds for load in loads])
        family = traits_.siblings[[place[load.group] for load in loads]]
        total = np.bincount(family, weight * seconds, traits_.kins)
        count = np.bincount(family, weight, traits_.kins)
        mean = float(np.average(seconds, weights=weight))
        means = np.full(traits_.kins, mean)
        means[count > 0] = total[count > 0] / count[count > 0]
        return {key: float(means[traits_.siblings[number]]) for key, number in place.items()}
