"""Draw speed-up and efficiency over world sizes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpc_toolkit.report import figures
from hpc_toolkit.report.figures import DASHED, DOTTED, LEFT, STEP_X, Axis, Panel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpc_toolkit.training.scaling.comparison import Comparison

_CURVE_POINTS = 40
_BELOW = figures.TOP + figures.HEIGHT


def scaling_svg(comparisons: Sequence[Comparison], minimum: float) -> str:
    """Draw two panels: speed-up with the ideal line, and efficiency with the target.

    Bars are the range over pairs of repeats. A dashed curve is the fitted law, if there are at
    least three world sizes.
    """
    rows = [row for one in comparisons for row in one.rows]
    most = max(2.0, *(row.ideal for row in rows))
    # Cut the bars of repeats that differ wildly, or the other points could not be told apart.
    top = max(most, *(max(row.speedup, min(row.high * row.ideal, 2 * most)) for row in rows))
    least = 0.7 * min(1.0, *(max(row.speedup, 0.01) for row in rows))
    highest = max(1.1, *(max(row.efficiency, min(row.high, 2.0)) for row in rows))
    across = Axis(1.0, most, log=True)
    speedup = Panel(across, Axis(least, top, log=True))
    share = Panel(across, Axis(0.0, math.ceil(10 * highest) / 10), left=LEFT + STEP_X)
    parts = [
        *_frame(speedup, comparisons, "speed-up"),
        *_frame(share, comparisons, "efficiency"),
        speedup.line([(1.0, 1.0), (most, most)], "#999", DOTTED),
        share.line([(1.0, minimum), (most, minimum)], "#999", DOTTED),
    ]
    for number, one in enumerate(comparisons):
        colour = figures.COLOURS[number % len(figures.COLOURS)]
        parts += _series(speedup, one, colour, speedup=True)
        parts += _series(share, one, colour, speedup=False)
    words = f"dotted: ideal, and the target of {minimum:.0%}; dashed: the fitted law"
    parts.append(figures.text(LEFT, _BELOW + 66, words, colour="#666"))
    parts += figures.legend(LEFT, _BELOW + 92, map(_legend, comparisons))
    height = _BELOW + 92 + 20 * len(comparisons)
    return figures.figure("Speed-up and efficiency", LEFT + 2 * STEP_X - 60, height, parts)


def _legend(one: Comparison) -> str:
    serial = one.serial
    if serial is None or serial.low is None:
        return one.series.name
    interval = f"{serial.low:.1%} to {serial.high:.1%}"
    return f"{one.series.name}; {serial.name}: {serial.share:.1%} serial ({interval})"


def _frame(panel: Panel, comparisons: Sequence[Comparison], title: str) -> Iterator[str]:
    rows = [(value, f"{value:g}" if panel.y.log else f"{value:.0%}") for value in _ticks(panel.y)]
    bases = {one.rows[0].world_size for one in comparisons}
    unit = bases.pop() if len(bases) == 1 else None
    ideals = sorted({row.ideal for one in comparisons for row in one.rows})
    columns = [(ideal, f"{ideal * (unit or 1):g}") for ideal in ideals]
    words = "ranks" if unit else "ranks, as a multiple of each smallest world size"
    return panel.frame(columns, rows, words, title)


def _ticks(axis: Axis) -> list[float]:
    if axis.log:
        low, high = math.ceil(math.log2(axis.low)), math.floor(math.log2(axis.high))
        return [2.0**power for power in range(low, high + 1)]
    step = 0.2 * math.ceil(axis.high / 2.2)
    return [step * number for number in range(int(axis.high / step + 1e-9) + 1)]


def _series(panel: Panel, one: Comparison, colour: str, *, speedup: bool) -> Iterator[str]:
    points = [(row.ideal, row.speedup if speedup else row.efficiency) for row in one.rows]
    yield panel.line(points, colour)
    for row in one.rows:
        if row.repeats > 1:
            scale = row.ideal if speedup else 1.0
            ends = [(row.ideal, row.high * scale), (row.ideal, row.low * scale)]
            yield panel.line(ends, colour, 'stroke-width="1"')
    yield from panel.dots(points, colour)
    serial = one.serial
    if serial is not None and serial.low is not None:
        base, last = one.rows[0].world_size, one.rows[-1].ideal
        law = serial.speedup if speedup else serial.efficiency
        steps = [last ** (step / _CURVE_POINTS) for step in range(_CURVE_POINTS + 1)]
        yield panel.line([(ideal, law(base * ideal, base)) for ideal in steps], colour, DASHED)
