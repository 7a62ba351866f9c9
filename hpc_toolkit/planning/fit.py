"""A model of how long items take, fitted to a random weighting of those that ended.

The logarithm of an item's seconds is a mean, plus the effects of a word and a number of the item,
plus the effects of its sibling groups and its group, or of its place in a list without groups, plus
a residual. The first item of a kind on a loaded group may take longer
(:mod:`hpc_toolkit.planning.repeats`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.planning.traits import tamed

if TYPE_CHECKING:
    from hpc_toolkit.planning.repeats import Floats, Ints
    from hpc_toolkit.planning.traits import Traits

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
_PART_SDS = ((0.6, 0.0), (0.1, 0.2), (0.1, 0.4), (0.1, 0.8), (0.1, 1.6))
"""How much the parts of a list differ: a mixture of (probability, standard deviation of a log)."""
_LEAST_SD = 0.01
"""Items of one part differ by at least this much, as a standard deviation of a log."""
_BEYOND = 0.5
"""How much longer than its age an item takes that runs longer than all seen ones: the mean of an
exponential logarithm, so twice as long in the mean."""
_BEYOND_WEIGHT = 0.5
"""Mean weight of such lengths, in units of one seen item. Most draws give them almost none and some
much more."""
_KIND_WEIGHT = 0.5
"""Mean weight of kinds of which no item has ended, likewise: it widens the interval but hardly
moves the median."""
_KIND_SD = 1.5
"""How much longer items of these kinds take: the absolute value of a normal logarithm has this
standard deviation before its sign is dropped."""
_SAME_SCALE = 4.0
"""How many items of a word it takes until their own spread counts as much as that of all items."""


class Fit:
    def __init__(self, found: Traits, of: Ints, z: Floats, chance: np.random.Generator) -> None:
        self._traits, self._of, self._chance = found, of, chance
        self._weight = chance.exponential(size=len(of))
        self.first = self._fit_first(z)
        z = z - np.where(found.repeats.first[of] == 1, self.first[found.word[of]], 0.0)
        self.plain = z
        """The logarithms of the seconds as those of repeats."""
        self._mean = float(np.average(z, weights=self._weight))
        self._slope = 0.0
        self._curved = float(np.sqrt(chance.random()))
        self._words = np.zeros(found.words)
        self._group = np.zeros(len(found.groups))
        rest = z - self._mean
        self._number = self._best_number(rest)
        for last in (False, True) if found.keys else (True,):
            rest = rest - self._fit_words(rest)
            rest = rest - self._fit_slope(rest, last=last)
            middle = float(np.average(rest, weights=self._weight))
            self._mean += middle
            rest = rest - middle
        rest = rest - self._fit_groups(rest)
        rest = rest - self._fit_parts(rest)
        self._scale = self._scales(rest)
        self._rest = rest / self._scale[self._cells(of)]
        self._kind = abs(float(chance.normal(0.0, _KIND_SD)))

    def _fit_first(self, z: Floats) -> Floats:
        """Return, for each word, how much longer the first item of a kind takes than a repeat."""
        words, first = self._traits.words, self._traits.repeats.first[self._of]
        if self._traits.repeats.unknown:
            return np.full(words, -np.log(1.0 - self._chance.random()))
        if not first.any():
            return np.zeros(words)
        cell = 2 * self._traits.word[self._of] + first
        mass = np.bincount(cell, self._weight, 2 * words)
        count = np.bincount(cell, minlength=2 * words).reshape(-1, 2)
        means = np.bincount(cell, self._weight * z, 2 * words) / np.maximum(mass, 1e-12)
        within = float(np.average((z - means[cell]) ** 2, weights=self._weight))
        known = (count > 0).all(axis=1)
        if not known.any():
            middle = np.average(z[first == 1], weights=self._weight[first == 1])
            rest = np.average(z[first == 0], weights=self._weight[first == 0])
            return np.full(words, max(0.0, float(middle - rest)))
        step = (means[1::2] - means[::2])[known]
        noise = within * (1.0 / count[known]).sum(axis=1)
        middle = float(np.average(step, weights=1.0 / (noise + _SIBLINGS_SD**2)))
        between = max(float(np.sum((step - middle) ** 2 - noise)), 0.0)
        variance = (between + _SIBLINGS_SD**2) / len(step)
        shift = self._chance.normal(0.0, np.sqrt(variance / len(step)))
        found = middle + shift + self._chance.normal(0.0, np.sqrt(variance), words)
        found[known] = middle + (step - middle) * variance / (variance + noise)
        return np.maximum(found, 0.0)

    def _cells(self, items: Ints, first: int | None = None) -> Ints:
        """Return an index for each pair of a word and whether it is a first item."""
        firsts = self._traits.repeats.first[items] if first is None else first
        cells: Ints = 2 * self._traits.word[items] + firsts
        return cells

    def _scales(self, rest: Floats) -> Floats:
        """Return how much the residuals of each cell vary, in units of those of all items."""
        cells, count = self._cells(self._of), 2 * self._traits.words
        whole = float(np.average(rest**2, weights=self._weight))
        if whole < 1e-12:
            return np.ones(count)
        mass = np.bincount(cells, self._weight, count)
        own = np.bincount(cells, self._weight * rest**2, count)
        return np.sqrt((own / whole + _SAME_SCALE) / (mass + _SAME_SCALE))

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

    def _fit_parts(self, rest: Floats) -> Floats:
        """Draw how much longer items take in each part of a list without groups, as a Gaussian
        process along the list. Return its mean at the items of the fit.

        Parts between seen ones are like these, and a part far from all of them may differ. Only
        ended items count: how long a running one takes was drawn without the effect of its part.
        """
        found = self._traits
        parts = len(found.middles)
        self._part = np.zeros(parts)
        if found.part is None:
            return np.zeros(len(rest))
        parts_of = found.part[self._of]
        ended = self._of < found.seen
        of, rest = parts_of[ended], rest[ended]
        count = np.bincount(of, minlength=parts)
        seen = np.flatnonzero(count)
        means = np.bincount(of, rest, parts) / np.maximum(count, 1)
        within = float(np.sum((rest - means[of]) ** 2)) / max(len(of) - len(seen), 1)
        noise = np.diag(np.maximum(within, _LEAST_SD**2) / count[seen])
        # The correlation of parts falls with their distance.
        all_alike = np.exp(-np.abs(np.subtract.outer(found.middles, found.middles)) / 2)
        alike, means = all_alike[:, seen], means[seen]
        fits = []
        for share, sd in _PART_SDS:
            # Only differences between parts count: the mean of the seen items is in none of them.
            variance = sd**2 * alike[seen] + noise + 1.0
            log = np.linalg.slogdet(variance)[1] + means @ np.linalg.solve(variance, means)
            fits.append(np.log(share) - log / 2)
        likely = np.exp(np.array(fits) - max(fits))
        sd = _PART_SDS[self._chance.choice(len(fits), p=likely / likely.sum())][1]
        gain = sd**2 * np.linalg.solve(sd**2 * alike[seen] + noise, alike.T).T
        drawn = sd * np.linalg.cholesky(all_alike) @ self._chance.standard_normal(parts)
        off = np.sqrt(np.diag(noise)) * self._chance.standard_normal(len(seen))
        self._part = drawn + gain @ (means - drawn[seen] - off)
        return (gain @ means)[parts_of]

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
        fixed = np.log1p(-slope) - np.log(slope)
        edge = np.clip(x, known.min(), known.max())
        # Added as logarithms, since the numbers themselves may be too large.
        bent = np.logaddexp(fixed, x) - np.logaddexp(fixed, edge) - slope * (x - edge)
        bend: Floats = self._curved * bent
        return bend

    def _middle(self, items: Ints) -> Floats:
        """Return the middles of the logarithms of these items' seconds, as repeats."""
        found = self._traits
        of_kind = self._words[found.word[items]] + self._group[found.group[items]]
        if found.part is not None:
            of_kind += self._part[found.part[items]]
        x = self._number[items]
        return self._mean + of_kind + self._slope * x + self._bend(x)

    def sample(self, items: Ints) -> tuple[Floats, Floats]:
        """Draw the logarithms of the seconds of items that have not begun: as repeats of their
        kinds, and as firsts.
        """
        seen = len(self._rest)
        share = np.cumsum(np.append(self._weight, self._chance.gamma(_KIND_WEIGHT)))
        drawn = np.searchsorted(share / share[-1], self._chance.random(len(items)), side="right")
        rest = np.append(self._rest, 0.0)[np.minimum(drawn, seen)]
        other = drawn == seen
        rest[other] = self._kind + self._chance.choice(self._rest, int(other.sum()))
        middle = self._middle(items)
        firsts = middle + self.first[self._traits.word[items]]
        return (
            middle + rest * self._scale[self._cells(items, 0)],
            firsts + rest * self._scale[self._cells(items, 1)],
        )

    def beyond(self, items: Ints, ages: Floats) -> Floats:
        """Draw the logarithms of the seconds of items that have run for ``ages``, logarithms too:
        as firsts where they are known to be, else as repeats.
        """
        found = self._traits
        firsts = np.where(found.repeats.first[items] == 1, self.first[found.word[items]], 0.0)
        middle = self._middle(items) + firsts
        logs = np.empty(len(items))
        scale = self._scale[self._cells(items)]
        for number, age in enumerate((ages - middle) / scale):
            longer = np.flatnonzero(self._rest > age)
            weight = self._weight[longer]
            beyond = self._chance.gamma(_BEYOND_WEIGHT)
            if len(longer) and self._chance.random() < weight.sum() / (weight.sum() + beyond):
                drawn = self._chance.choice(longer, p=weight / weight.sum())
                logs[number] = middle[number] + scale[number] * self._rest[drawn]
            else:
                start = max(float(age), float(self._rest.max()))
                more = start + self._chance.exponential(_BEYOND)
                logs[number] = middle[number] + scale[number] * more
        return logs


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
