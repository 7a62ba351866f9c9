"""Print a comparison of policies as a text table, as CSV or as SVG."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit.bench.outcome import goal_key
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.report.axes import Axis, number_label, number_ticks
from hpc_toolkit.report.figures import LEFT, STEP_X, STEP_Y, TOP, Panel, figure, legend, series
from hpc_toolkit.system.quantities import counted, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

GOAL = 0.99
"""The share of the best mean that the text table shows."""

FLOOR = 1e-4
"""Lowest regret on the logarithmic axis; lower values are drawn at this height."""


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


def as_lines(report: dict[str, Any]) -> list[str]:
    """Return a text table of what each policy spends to know an arm with 99 % of the best mean.

    If the searches ended at a lower share, the table is about that share. Each cell is the median
    and, after a slash, what nine of ten searches need.
    """
    key = goal_key(GOAL if report["until"] is None else min(GOAL, report["until"]))
    costs = dict.fromkeys(cost for one in report["policies"] for cost in one["to_goal"][key])
    # Wall-clock time on one GPU is the GPU time.
    costs.pop("wall_s_1", None)
    rows = [[f"to {100 * float(key):g}% of the best", *map(_title, costs), "best at end"]]
    for one in report["policies"]:
        cells = [_cell(cost, one["to_goal"][key].get(cost)) for cost in costs]
        rows.append([one["policy"], *cells, f"{one['ended']['exact']:.0%}"])
    rows.append(["(everything)", *(_everything(cost, report) for cost in costs), "100%"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _title(cost: str) -> str:
    if cost.startswith("wall_s_"):
        count = cost.removeprefix("wall_s_")
        return f"time on {count} GPU{'' if count == '1' else 's'}"
    return {"gpu_s": "GPU time"}.get(cost, cost)


def _cell(cost: str, found: dict[str, float | None] | None) -> str:
    if found is None:
        return "-"
    return " / ".join(_number(cost, found[name]) for name in ("median", "p90"))


def _number(cost: str, number: float | None) -> str:
    if number is None:
        return "never"
    return format_duration(number) if cost.startswith(("gpu_s", "wall_s_")) else f"{number:g}"


def _everything(cost: str, report: dict[str, Any]) -> str:
    exhaustive = {"pulls": report["arms"], **report["exhaustive"]}
    if cost.startswith("wall_s_"):
        return _number(cost, exhaustive["wall_s"][cost.removeprefix("wall_s_")])
    return _number(cost, exhaustive[cost])


def regret_svg(report: dict[str, Any]) -> str:
    """Draw the mean simple regret of each policy against each cost, with its bootstrap band.

    ``report`` is the result of ``run_bench``. Raises ConfigError for a report without curves.
    """
    policies = [one for one in report["policies"] if "curves" in one]
    if not policies:
        message = "with --until there are no curves to draw"
        raise ConfigError(message, hint="leave out --until, or write .json or .csv")
    costs = list(dict.fromkeys(cost for one in policies for cost in one["curves"]))
    # Of several numbers of GPUs, draw only the last.
    walls = [cost for cost in costs if cost.startswith("wall_s_")]
    costs = [cost for cost in costs if cost not in walls[:-1]]
    parts: list[str] = []
    for place, cost in enumerate(costs):
        curves = [(one["curves"].get(cost), number) for number, one in enumerate(policies)]
        parts += _panel(cost, place, [(one, number) for one, number in curves if one])
    columns = min(2, len(costs))
    rows = -(-len(costs) // columns)
    right = LEFT + columns * STEP_X - 70
    names = [one["policy"] for one in policies]
    height = TOP + max(rows * STEP_Y, 20 * len(names) + 20) - 30
    title = (
        f"Mean simple regret, {counted(report['arms'], 'arm')}, {counted(report['tasks'], 'task')}"
    )
    parts += legend(right, TOP + 12, names)
    width = right + 50 + 7 * max(map(len, names))
    return figure(title, width, height, parts, alternative=_alternative(policies, costs))


def _alternative(policies: list[dict[str, Any]], costs: list[str]) -> str:
    ends = (
        f"{one['policy']} ends at {one['curves'][costs[0]]['simple'][-1]:.2g}"
        for one in policies
        if one["curves"].get(costs[0])
    )
    return f"Regret against {_words(costs[0])}: {', '.join(ends)}."


def _panel(
    cost: str, place: int, curves: list[tuple[dict[str, list[float]], int]]
) -> Iterator[str]:
    ends = [x for curve, _ in curves for x in (curve["x"][0], curve["x"][-1])]
    most = max(value for curve, _ in curves for value in curve["high"])
    low, high = min(ends), max(ends)
    panel = Panel(
        x=Axis(low, high if high > low else low + 1.0, log=cost != "pulls"),
        y=Axis(FLOOR, max(most, 10 * FLOOR), log=True),
        left=LEFT + (place % 2) * STEP_X,
        top=TOP + (place // 2) * STEP_Y,
    )
    powers = [10.0**power for power in range(round(math.log10(FLOOR)), 1)]
    rows = [(value, f"{value:g}") for value in powers if value <= panel.y.high]
    columns = [(value, number_label(value)) for value in _ticks(panel.x)]
    yield from panel.frame(columns, rows, _words(cost), "simple regret")
    for curve, number in curves:
        colour, style = series(number)
        low_edge, high_edge, mean = (
            list(zip(curve["x"], curve[name], strict=True)) for name in ("low", "high", "simple")
        )
        yield panel.band(low_edge, high_edge, colour)
        yield panel.line(mean, colour, style)


def _words(cost: str) -> str:
    if cost.startswith("wall_s_"):
        return f"seconds on {cost.removeprefix('wall_s_')} GPUs"
    return {"evaluations": "task evaluations", "gpu_s": "GPU seconds"}.get(cost, cost)


def _ticks(axis: Axis) -> list[float]:
    if axis.log:
        powers = range(math.ceil(math.log10(axis.low)), math.floor(math.log10(axis.high)) + 1)
        return [10.0**power for power in powers]
    return [value for value, _ in number_ticks(axis.high, 8) if value >= axis.low]
