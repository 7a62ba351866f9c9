"""Draw the times of a plan against the number of nodes as SVG; equal numbers give equal bytes."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.quantities import DAY_S, HOUR_S, MINUTE_S, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpc_toolkit.planning.page import Plan

    Point = tuple[float, float]

_WIDTH, _HEIGHT, _LEFT, _TOP = 480, 280, 90, 50
_COLOUR, _OTHER = "#2a6f97", "#c1440e"
_TICKS = (
    *(1, 5, 10, 30, MINUTE_S, 5 * MINUTE_S, 10 * MINUTE_S, 30 * MINUTE_S),
    *(HOUR_S, 3 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S, DAY_S, 3 * DAY_S, 7 * DAY_S, 30 * DAY_S),
    *(100 * DAY_S, 1000 * DAY_S),
)


def plan_svg(plan: Plan) -> str:
    """Draw time against nodes, with a band for 9 of 10 draws, and node-hours in figures below.

    Raises ConfigError for a plan without numbers of nodes.
    """
    if not plan.choices:
        message = "a plan without numbers of nodes has nothing to draw"
        raise ConfigError(message, hint="give some, such as --nodes 1,2,4,8")
    axes = _Axes(plan)
    title = f"{plan.items:,} items: time on n nodes, 9 of 10 within the band"
    box = f"0 0 {_LEFT + _WIDTH + 40} {_TOP + _HEIGHT + 90}"
    font = 'font-family="sans-serif" font-size="12"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" {font}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
        *axes.lines(),
    ]
    times = [(one.nodes, one.forecast.time_s) for one in plan.choices]
    high = [axes.at(nodes, time.high) for nodes, time in times]
    low = [axes.at(nodes, time.low) for nodes, time in times]
    middle = [axes.at(nodes, time.median) for nodes, time in times]
    lines += [
        f'<path d="{_path([*high, *low[::-1]])}Z" fill="{_COLOUR}" fill-opacity="0.15"/>',
        f'<path d="{_path(middle)}" fill="none" stroke="{_COLOUR}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOUR}"/>' for x, y in middle),
    ]
    if plan.within_s:
        _, y = axes.at(plan.choices[0].nodes, plan.within_s)
        lines.append(
            f'<path d="M{_LEFT} {y:.1f}h{_WIDTH}" stroke="{_OTHER}" stroke-dasharray="5"/>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


class _Axes:
    """Two logarithmic axes."""

    def __init__(self, plan: Plan) -> None:
        self._choices = plan.choices
        nodes = [one.nodes for one in plan.choices]
        times = [
            t for one in plan.choices for t in (one.forecast.time_s.low, one.forecast.time_s.high)
        ]
        times += [plan.within_s] if plan.within_s else []
        self._x = math.log(min(nodes)), math.log(max(*nodes, min(nodes) + 1))
        low, high = max(min(times), 1e-3) / 1.2, max(*times, 2e-3) * 1.2
        self._y = math.log(low), math.log(high)

    def at(self, nodes: float, seconds: float) -> Point:
        """Return where to draw a point."""
        across = (math.log(nodes) - self._x[0]) / (self._x[1] - self._x[0])
        up = (math.log(max(seconds, 1e-3)) - self._y[0]) / (self._y[1] - self._y[0])
        return _LEFT + _WIDTH * across, _TOP + _HEIGHT * (1.0 - min(max(up, 0.0), 1.0))

    def lines(self) -> Iterator[str]:
        bottom = _TOP + _HEIGHT
        for seconds in _TICKS:
            if self._y[0] <= math.log(seconds) <= self._y[1]:
                _, y = self.at(1.0, seconds)
                yield f'<path d="M{_LEFT} {y:.1f}h{_WIDTH}" stroke="#ddd"/>'
                text = format_duration(seconds)
                yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        for one in self._choices:
            x, _ = self.at(one.nodes, 1.0)
            yield f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#eee"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{one.nodes}</text>'
            below = f'x="{x:.1f}" y="{bottom + 32}" text-anchor="middle" fill="#555"'
            yield f"<text {below}>{one.node_hours.median:,.3g} h</text>"
        middle = _LEFT + _WIDTH / 2
        words = "nodes, and node-hours"
        yield f'<text x="{middle}" y="{bottom + 54}" text-anchor="middle">{words}</text>'


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
