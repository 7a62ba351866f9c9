"""Print a comparison of policies as a text table, as CSV or as SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit.bench.outcome import goal_key
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Point = tuple[float, float]

GOAL = 0.99
"""The share of the best mean that the text table shows."""

COLOURS = (
    *("#2a6f97", "#c1440e", "#3a7d44", "#7b4b94", "#b8860b", "#d1495b"),
    *("#1b998b", "#6c757d", "#5f0f40", "#0b6e4f", "#8d6a9f", "#495057"),
)
"""Colours of the policies, in order; used again from the first if there are more policies."""

FLOOR = 1e-4
"""Lowest regret on the logarithmic axis; lower values are drawn at this height."""

_WIDTH, _HEIGHT = 380, 230
_GAP_X, _GAP_Y = 90, 90
_LEFT, _TOP = 60, 50


def as_csv(report: dict[str, Any]) -> str:
    """Return one line per policy, goal and cost; a cell is empty if searches missed the goal."""
    columns = ("median", "p90", "low", "high", "reached")
    lines = [",".join(("policy", "goal", "cost", *columns))]
    for one in report["policies"]:
        for goal, costs in one["to_goal"].items():
            for cost, found in costs.items():
                numbers = ("" if found[name] is None else repr(found[name]) for name in columns)
                lines.append(",".join((one["policy"], goal, cost, *numbers)))
    return "\n".join(lines) + "\n"


def as_lines(report: dict[str, Any], duration: Callable[[float], str]) -> list[str]:
    """Return a text table of what each policy spends to know an arm with 99 % of the best mean.

    If the searches ended at a lower share, the table is about that share. Each cell is the median
    and, after a slash, what nine of ten searches need. ``duration`` formats seconds.
    """
    key = goal_key(GOAL if report["until"] is None else min(GOAL, report["until"]))
    costs = dict.fromkeys(cost for one in report["policies"] for cost in one["to_goal"][key])
    # Wall-clock time on one GPU is the GPU time.
    costs.pop("wall_s_1", None)
    head = [
        f"to {100 * float(key):g}% of the best",
        *(_title(cost) for cost in costs),
        "best at end",
    ]
    rows = [head]
    for one in report["policies"]:
        found = one["to_goal"][key]
        cells = [_cell(cost, found.get(cost), duration) for cost in costs]
        rows.append([one["policy"], *cells, f"{one['ended']['exact']:.0%}"])
    rows.append(["(everything)", *(_everything(cost, report, duration) for cost in costs), "100%"])
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    return [
        "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _title(cost: str) -> str:
    if cost.startswith("wall_s_"):
        count = cost.removeprefix("wall_s_")
        return f"time on {count} GPU{'' if count == '1' else 's'}"
    return {"gpu_s": "GPU time"}.get(cost, cost)


def _is_time(cost: str) -> bool:
    return cost == "gpu_s" or cost.startswith("wall_s_")


def _cell(
    cost: str, found: dict[str, float | None] | None, duration: Callable[[float], str]
) -> str:
    if found is None:
        return "-"
    return " / ".join(_number(cost, found[name], duration) for name in ("median", "p90"))


def _number(cost: str, number: float | None, duration: Callable[[float], str]) -> str:
    if number is None:
        return "never"
    return duration(number) if _is_time(cost) else f"{number:g}"


def _everything(cost: str, report: dict[str, Any], duration: Callable[[float], str]) -> str:
    exhaustive = report["exhaustive"]
    if cost.startswith("wall_s_"):
        return _number(cost, exhaustive["wall_s"][cost.removeprefix("wall_s_")], duration)
    found = report["arms"] if cost == "pulls" else exhaustive[cost]
    return _number(cost, float(found), duration)


@dataclass(frozen=True, slots=True)
class _Panel:
    """One pair of axes: its position in the picture, and the ranges of the axes."""

    name: str
    """The cost over which its curves are drawn."""
    left: float
    top: float
    x: tuple[float, float]
    y: tuple[float, float]
    x_log: bool

    def at(self, x: float, y: float) -> Point:
        """Return where to draw a point; a point outside the axes is drawn on their edge."""
        across = self._share(x, self.x, log=self.x_log)
        up = self._share(y, self.y, log=True)
        return self.left + _WIDTH * across, self.top + _HEIGHT * (1.0 - up)

    @staticmethod
    def _share(value: float, span: tuple[float, float], *, log: bool) -> float:
        low, high = span
        value = min(max(value, low), high)
        if log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


def regret_svg(report: dict[str, Any]) -> str:
    """Draw the mean simple regret of each policy against each cost, with its bootstrap band.

    ``report`` is the result of ``run_bench``. Raises ConfigError for a report without curves.
    """
    policies = [one for one in report["policies"] if "curves" in one]
    if not policies:
        message = "a comparison that ends at a goal has no curves to draw"
        raise ConfigError(message, hint="leave out --until, or write .json or .csv")
    costs = list(dict.fromkeys(cost for one in policies for cost in one["curves"]))
    # Of several numbers of GPUs, draw only the last.
    walls = [cost for cost in costs if cost.startswith("wall_s_")]
    costs = [cost for cost in costs if cost not in walls[:-1]]
    panels = [_panel(cost, place, policies) for place, cost in enumerate(costs)]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    legend = _LEFT + columns * (_WIDTH + _GAP_X) - _GAP_X + 20
    width = legend + 40 + 7 * max(len(one["policy"]) for one in policies)
    height = _TOP + max(rows * (_HEIGHT + _GAP_Y), 22 * len(policies) + 20)
    font = 'font-family="sans-serif" font-size="12"'
    title = f"Mean simple regret, {report['arms']} arms, {report['tasks']} tasks"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
    ]
    for panel in panels:
        lines += _axes(panel)
        for number, one in enumerate(policies):
            if panel.name in one["curves"]:
                lines += _curve(panel, one["curves"][panel.name], _colour(number))
    for number, one in enumerate(policies):
        y = _TOP + 8 + 22 * number
        lines += [
            f'<path d="M{legend} {y}h22" stroke="{_colour(number)}" stroke-width="2.5"/>',
            f'<text x="{legend + 28}" y="{y + 4}">{escape(one["policy"])}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _panel(cost: str, place: int, policies: Sequence[dict[str, Any]]) -> _Panel:
    curves = [one["curves"][cost] for one in policies if cost in one["curves"]]
    ends = [x for curve in curves for x in (curve["x"][0], curve["x"][-1])]
    most = max(value for curve in curves for value in curve["high"])
    low = min(ends)
    return _Panel(
        name=cost,
        left=_LEFT + (place % 2) * (_WIDTH + _GAP_X),
        top=_TOP + (place // 2) * (_HEIGHT + _GAP_Y),
        x=(low, max(ends) if max(ends) > low else low + 1.0),
        y=(FLOOR, max(most, 10 * FLOOR)),
        x_log=cost != "pulls",
    )


def _axes(panel: _Panel) -> Iterator[str]:
    left, top, bottom = panel.left, panel.top, panel.top + _HEIGHT
    for power in range(round(math.log10(FLOOR)), 1):
        if 10.0**power <= panel.y[1]:
            _, y = panel.at(panel.x[0], 10.0**power)
            yield f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#ddd"/>'
            yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
    for value in _ticks(panel):
        x, _ = panel.at(value, FLOOR)
        yield f'<path d="M{x:.1f} {top}V{bottom}" stroke="#eee"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>'
    middle = left + _WIDTH / 2
    words = escape(axis_words(panel.name))
    yield f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">{words}</text>'


def axis_words(cost: str) -> str:
    """Return the label of the axis of a cost."""
    if cost.startswith("wall_s_"):
        return f"seconds on {cost.removeprefix('wall_s_')} GPUs"
    return {"evaluations": "task evaluations", "gpu_s": "GPU seconds"}.get(cost, cost)


def _ticks(panel: _Panel) -> list[float]:
    low, high = panel.x
    if panel.x_log:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        return [10.0**power for power in powers]
    step = 10.0 ** math.floor(math.log10(max(high, 1.0)))
    step = step if high / step > 3 else step / 5
    return [step * number for number in range(1, int(high / step) + 1)]


def _curve(panel: _Panel, curve: dict[str, list[float]], colour: str) -> Iterator[str]:
    upper = [panel.at(x, y) for x, y in zip(curve["x"], curve["high"], strict=True)]
    lower = [panel.at(x, y) for x, y in zip(curve["x"], curve["low"], strict=True)]
    mean = [panel.at(x, y) for x, y in zip(curve["x"], curve["simple"], strict=True)]
    yield f'<path d="{_line([*upper, *lower[::-1]])}Z" fill="{colour}" fill-opacity="0.15"/>'
    yield f'<path d="{_line(mean)}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _line(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
