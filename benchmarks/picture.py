"""A bar chart as SVG, written by hand: equal numbers give equal bytes."""

from __future__ import annotations

import math
from html import escape

_ROW = 26
_LEFT = 190
_WIDTH = 460
_RIGHT = 120


def bars(title: str, values: dict[str, float], unit: str) -> str:
    """Horizontal bars on a logarithmic axis of whole decades, in the order given.

    Args:
        title: what is shown.
        values: a positive number by name; the first bar stands out.
        unit: what the numbers count.
    """
    low = math.floor(math.log10(min(values.values())))
    high = max(low + 1, math.ceil(math.log10(max(values.values()))))
    bottom = 50 + _ROW * len(values)

    def x(value: float) -> float:
        return _LEFT + _WIDTH * (math.log10(value) - low) / (high - low)

    width, height = _LEFT + _WIDTH + _RIGHT, bottom + 34
    name_space, font = "http://www.w3.org/2000/svg", 'font-family="sans-serif" font-size="13"'
    lines = [
        f'<svg xmlns="{name_space}" viewBox="0 0 {width} {height}" {font}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="24" font-size="15">{escape(title)}</text>',
    ]
    for power in range(low, high + 1):
        at = x(10.0**power)
        lines += [
            f'<path d="M{at:.1f} 40V{bottom}" stroke="#ddd"/>',
            f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{10.0**power:,g}</text>',
        ]
    for index, (name, value) in enumerate(values.items()):
        y = 46 + _ROW * index
        colour = "#999" if index else "#2a6f97"
        long = max(x(value) - _LEFT, 1)
        lines += [
            f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{long:.1f}" height="18" fill="{colour}"/>',
            f'<text x="{x(value) + 6:.1f}" y="{y + 14}">{value:,.0f} {escape(unit)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"
