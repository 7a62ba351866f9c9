"""What a comparison advises, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.scaling.comparison import Comparison, Row

GOOD = 0.9
"""From this efficiency on more ranks cost hardly more."""

FAIR = 0.85
"""The least efficiency that is advised where the user names none."""

NOTABLE = 0.1
"""A share of a step that is worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One series judged by the least efficiency that is wanted."""

    word: str
    """``good``, ``fair`` or ``poor``, of the largest world size; ``unknown`` of one alone."""
    world_size: int
    """The advised one: the largest up to which every efficiency is at least the wanted one."""
    minimum: float
    """The wanted efficiency."""
    below: tuple[int, ...]
    """World sizes whose efficiency is less."""
    reasons: tuple[str, ...]
    """Sentences with the numbers that decided."""


def judge(comparison: Comparison, minimum: float = FAIR) -> Verdict:
    """Judge a comparison; ``minimum`` is an efficiency, 0 to 1."""
    rows = comparison.rows
    below = tuple(row.world_size for row in rows if row.efficiency < minimum)
    chosen = rows[0]
    for row in rows:
        if row.efficiency < minimum:
            break
        chosen = row
    last = rows[-1].efficiency
    word = "good" if last >= max(GOOD, minimum) else "fair" if last >= minimum else "poor"
    return Verdict(
        word="unknown" if len(rows) == 1 else word,
        world_size=chosen.world_size,
        minimum=minimum,
        below=below,
        reasons=tuple(_reasons(comparison, chosen, minimum)),
    )


def _reasons(comparison: Comparison, chosen: Row, minimum: float) -> Iterator[str]:
    rows = comparison.rows
    if len(rows) == 1:
        yield "one world size says nothing about scaling"
        return
    if chosen is not rows[0]:
        yield (
            f"on {chosen.world_size} it is {chosen.speedup:.2f} times as fast as on "
            f"{rows[0].world_size}, at {chosen.efficiency:.1%} of the ideal and "
            f"{chosen.premium:+.1%} cost"
        )
    after = [row for row in rows if row.world_size > chosen.world_size]
    if after:
        worse = after[0]
        yield (
            f"on {worse.world_size} the efficiency is {worse.efficiency:.1%}, below {minimum:.0%}: "
            f"the same work costs {worse.premium:+.1%}"
        )
    yield from _causes(rows[-1])
    yield from _doubts(rows, minimum)
    yield from _law(comparison, minimum)


def _causes(row: Row) -> Iterator[str]:
    for name, words in (
        ("communication", "exchanging gradients"),
        ("loading", "waiting for data"),
    ):
        share = row.shares.get(name, 0.0)
        if share >= NOTABLE:
            cure = (
                "a larger batch, or --vary accumulate=1,2,4, exchanges less often"
                if name == "communication"
                else "--vary loader-workers=1,4,8 tells whether more loaders help"
            )
            yield f"on {row.world_size} {words} takes {share:.0%} of a step; {cure}"


def _doubts(rows: tuple[Row, ...], minimum: float) -> Iterator[str]:
    for row in rows[1:]:
        if row.repeats > 1 and row.low < minimum <= row.high:
            yield (
                f"on {row.world_size} repeats differ too much to tell: "
                f"{row.low:.1%} to {row.high:.1%}"
            )
        # What is this little above 1 may be rounding.
        if row.efficiency > 1.01:
            yield (
                f"on {row.world_size} the efficiency is {row.efficiency:.1%}, more than the ranks "
                "explain: caches, rounded numbers, or a smallest world size that was disturbed"
            )


def _law(comparison: Comparison, minimum: float) -> Iterator[str]:
    serial = comparison.serial
    assert serial is not None  # there are several world sizes
    if serial.low is None:
        yield f"{serial.name}'s law goes through any two points: it predicts nothing here"
        return
    base, last = comparison.rows[0].world_size, comparison.rows[-1].world_size
    if serial.raw <= 0:
        yield f"{serial.name}'s law finds no serial share"
        return
    if serial.raw >= 1:
        yield f"more ranks are slower, which {serial.name}'s law does not know"
        return
    yield (
        f"{serial.name}'s law: {serial.share:.1%} serial (95 %: {serial.low:.1%} to "
        f"{serial.high:.1%}), off by up to {serial.worst:.1%}"
    )
    end = serial.largest(minimum, base)
    if math.isfinite(end) and end > last:
        yield f"by that law the efficiency falls to {minimum:.0%} at about {end:.0f} ranks"
