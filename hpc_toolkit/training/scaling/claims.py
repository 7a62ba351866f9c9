"""Check claims about a series against its numbers, and against each other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from hpc_toolkit.training.scaling.series import THOUSAND, money

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpc_toolkit.training.scaling.comparison import Comparison, Row
    from hpc_toolkit.training.scaling.series import Claim

TOLERANCE = 0.01
"""Relative deviation from a claim that is allowed in addition to rounding of its last digit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number of a row that a claim can be about."""

    read: Callable[[Row], float | None]
    words: str
    """Format string, with one place for the number."""
    digits: str = ""
    """Number format of an amount of money within that place; "" for other quantities."""

    def say(self, number: float, currency: str) -> str:
        """Return the number as text for people."""
        if not self.digits:
            return self.words.format(number)
        return self.words.format(money(format(number, self.digits), currency))


QUANTITIES: dict[str, Quantity] = {
    "speedup": Quantity(read=lambda row: row.speedup, words="{:.2f}x"),
    "efficiency": Quantity(read=lambda row: row.efficiency, words="{:.1%}"),
    "rate": Quantity(read=lambda row: row.rate, words="{:.4g} a second"),
    "hours": Quantity(read=lambda row: row.hours, words="{:.4g} h"),
    "gpu_hours": Quantity(read=lambda row: row.gpu_hours, words="{:.4g} GPU-hours"),
    "premium": Quantity(read=lambda row: row.premium, words="{:+.1%}"),
    "cost": Quantity(read=lambda row: row.cost, words="{}", digits=".4g"),
    "cost_per_samples": Quantity(
        read=lambda row: row.cost_per_1000, words="{} per 1,000 samples", digits=".3f"
    ),
}
"""Quantities by their names in the input; a cost per samples is compared per 1,000 samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result for one claim, or for two claims that cannot both hold."""

    text: str
    """The claim, or both claims."""
    verdict: str
    """``reproduced``, ``contradicted``, ``contradictory`` (two claims) or ``unknown``."""
    computed: str
    """The computed numbers, in words."""


def check_claims(comparison: Comparison) -> tuple[Finding, ...]:
    """Return a finding for every claim, then one for every pair of contradictory claims."""
    claims = comparison.series.claims
    found = [_check(claim, comparison) for claim in claims]
    found += [
        finding
        for one, other in combinations(claims, 2)
        for finding in _contradictions(one, other, comparison)
    ]
    return tuple(found)


def _check(claim: Claim, comparison: Comparison) -> Finding:
    currency = comparison.series.currency
    quantity = QUANTITIES[claim.quantity]
    value, half = _normal(claim)
    known = [
        (row.world_size, number)
        for row in comparison.rows
        if claim.world_size in (None, row.world_size) and (number := quantity.read(row)) is not None
    ]
    if not known:
        return Finding(
            text=claim.text, verdict="unknown", computed="nothing is known to hold it to"
        )
    fitting = [(size, number) for size, number in known if _agree(value, half, number)]
    told = fitting or known
    computed = ", ".join(f"{quantity.say(number, currency)} on {size}" for size, number in told)
    return Finding(
        text=claim.text,
        verdict="reproduced" if fitting else "contradicted",
        computed=computed,
    )


def _contradictions(one: Claim, other: Claim, comparison: Comparison) -> Iterator[Finding]:
    if one.world_size != other.world_size:
        return
    base = comparison.series.base.world_size
    first, second = _as_efficiency(one, base), _as_efficiency(other, base)
    if first[0] != second[0]:
        return
    kind, value, half = first
    _, other_value, other_half = second
    if _agree(value, half + other_half, other_value):
        return
    say, currency = QUANTITIES[kind].say, comparison.series.currency
    yield Finding(
        text=f"{one.text!r} and {other.text!r}",
        verdict="contradictory",
        computed=f"{say(value, currency)} against {say(other_value, currency)}",
    )


def _as_efficiency(claim: Claim, base: int) -> tuple[str, float, float]:
    """Return quantity, value and half digit; a speed-up at a world size becomes an efficiency."""
    value, half = _normal(claim)
    if claim.quantity == "speedup" and claim.world_size is not None:
        ideal = claim.world_size / base
        return "efficiency", value / ideal, half / ideal
    return claim.quantity, value, half


def _normal(claim: Claim) -> tuple[float, float]:
    if claim.quantity == "cost_per_samples":
        return claim.value * THOUSAND / claim.samples, claim.half * THOUSAND / claim.samples
    return claim.value, claim.half


def _agree(value: float, half: float, number: float) -> bool:
    return abs(number - value) <= half + TOLERANCE * abs(value)
