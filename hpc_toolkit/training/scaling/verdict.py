"""The advice that follows from a comparison, and its reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.training.scaling.comparison import Comparison, Row

GOOD = 0.9
"""Efficiency from which on more ranks cost hardly more."""

FAIR = 0.85
"""Lowest efficiency that is advised unless the user gives another one."""

POSSIBLE = 1.01
"""Highest efficiency that rounding can explain; more ranks cannot explain a higher one."""

OPEN = 0.5
"""Width of the serial share's interval above which the fitted law says nothing."""

NOTABLE = 0.1
"""Smallest share of a step that is mentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One series judged by the lowest wanted efficiency."""

    word: str
    """``good``, ``fair`` or ``poor`` for the largest world size; ``unknown`` if it is alone."""
    world_size: int
    """The advised size: the largest up to which every efficiency is at least ``minimum``."""
    minimum: float
    """The wanted efficiency."""
    below: tuple[int, ...]
    """World sizes whose efficiency is below ``minimum``."""
    certain: bool
    """Whether every pair of repeats gives the same advice; True without repeats."""
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
        certain=not any(_unsure(row, minimum) for row in rows[1:]),
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
    yield from _ways(rows[-1])
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
            if _may_be_noise(row, name):
                cure = "it may be noise: more --max-steps or --repeats tell"
            low, high = (row.details.get(f"{name}_{end}") for end in ("low", "high"))
            spread = "" if low is None else f" ({max(low, 0.0):.0%} to {max(high or 0.0, 0.0):.0%})"
            yield f"on {row.world_size} {words} takes {share:.0%}{spread} of a step; {cure}"


def _may_be_noise(row: Row, name: str) -> bool:
    """Return whether the spread of a share includes 0."""
    low = row.details.get(f"{name}_low")
    return low is not None and low <= 0


def _ways(row: Row) -> Iterator[str]:
    """Yield notes if the exchange within a step and the all-reduces alone differ much."""
    exposed, apart = row.details.get("exposed_s"), row.details.get("all_reduce_s")
    if exposed is None or apart is None or apart <= 0:
        return
    notable = row.shares.get("communication", 0.0) >= NOTABLE
    if notable and exposed > 2 * apart and not _may_be_noise(row, "communication"):
        yield (
            f"on {row.world_size} that is {exposed / apart:.1f} times what the same all-reduces "
            "take apart: ranks wait for each other, or for CPUs, more than for the network"
        )
    step = row.details.get("step_median_s") or 0.0
    if apart >= NOTABLE * step and exposed < apart / 2:
        yield (
            f"on {row.world_size} more than half of the exchange hides behind the backward pass: "
            f"apart it takes {1000 * apart:.3g} ms of a step of {1000 * step:.3g} ms"
        )


def _unsure(row: Row, minimum: float) -> bool:
    return row.repeats > 1 and row.low < minimum <= row.high


def _doubts(rows: tuple[Row, ...], minimum: float) -> Iterator[str]:
    for row in rows[1:]:
        if _unsure(row, minimum):
            yield (
                f"on {row.world_size} repeats differ too much to tell: "
                f"{row.low:.1%} to {row.high:.1%}"
            )
        if row.efficiency > POSSIBLE:
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
    interval = f"95 % interval: {serial.low:.1%} to {serial.high:.1%}"
    if (serial.high or 1.0) - serial.low > OPEN:
        yield f"{serial.name}'s law leaves the serial share open ({interval})"
        return
    yield (
        f"{serial.name}'s law: {serial.share:.1%} of the work is serial ({interval}); "
        f"no point is more than {serial.worst:.1%} from it"
    )
    end = serial.largest(minimum, base)
    if math.isfinite(end) and end > last:
        least, most = serial.largest_between(minimum, base)
        # The efficiency was measured up to the largest world size.
        least = max(least, last)
        ends = f"{least:.0f} to {most:.0f}" if math.isfinite(most) else f"{least:.0f} or more"
        yield f"by that law the efficiency falls to {minimum:.0%} at about {end:.0f} ranks ({ends})"
