"""A chart of horizontal bars, drawn with the parts of hpc_toolkit/report/figures.py."""

from __future__ import annotations

import math

from hpc_toolkit.report.figures import COLOURS, Axis, on_page, rule, text

_ROW = 26
_LEFT, _WIDTH = 190, 550


def bars(title: str, values: dict[str, float], unit: str) -> str:
    """Draw positive numbers by name on a logarithmic axis of whole decades; the first stands out.

    ``unit`` is written behind each number.
    """
    low = math.floor(math.log10(min(values.values())))
    high = max(low + 1, math.ceil(math.log10(max(values.values()))))
    axis, bottom = Axis(low, high), 50 + _ROW * len(values)
    parts = []
    for power in range(low, high + 1):
        at = _LEFT + _WIDTH * axis.share(power)
        parts.append(rule(f"M{at:.1f} 40V{bottom}"))
        parts.append(text(at, bottom + 18, f"{10.0**power:,.9g}", anchor="middle"))
    for number, (name, value) in enumerate(values.items()):
        y = 46 + _ROW * number
        long = max(_WIDTH * axis.share(math.log10(value)), 1)
        box = f'x="{_LEFT}" y="{y}" width="{long:.1f}" height="18"'
        parts += [
            text(_LEFT - 8, y + 14, name, anchor="end"),
            f'<rect class="{COLOURS[6] if number else COLOURS[0]}" {box}/>',
            text(_LEFT + long + 6, y + 14, f"{value:,.0f} {unit}"),
        ]
    said = ", ".join(f"{name} {value:,.0f} {unit}" for name, value in values.items())
    return on_page(title, said, bottom + 34, parts).svg
