"""Write a comparison of policies as a text table or as CSV."""

from __future__ import annotations

from typing import Any

from hpc_toolkit.bandit.bench.outcome import goal_key
from hpc_toolkit.system.quantities import format_duration

GOAL = 0.99
"""The share of the best mean that the text table shows."""


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
