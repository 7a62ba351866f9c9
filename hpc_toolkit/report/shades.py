"""The colours of a scale, from low to high."""

from __future__ import annotations

_VIRIDIS = (
    *("#440154", "#482878", "#3e4989", "#31688e", "#26828e"),
    *("#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"),
)
"""Dark to bright: colour-blind readers and a print in grey can tell the order."""
_SHADES = 28
"""Colours of a scale; tiles of one colour are one path, so that a page stays small."""


def shades() -> list[str]:
    """The colours of a scale from low to high."""
    anchors = [[int(one[at : at + 2], 16) for at in (1, 3, 5)] for one in _VIRIDIS]
    found = []
    for number in range(_SHADES):
        place = number / (_SHADES - 1) * (len(anchors) - 1)
        low = min(int(place), len(anchors) - 2)
        mixed = (
            round(a + (b - a) * (place - low))
            for a, b in zip(anchors[low], anchors[low + 1], strict=True)
        )
        found.append("#" + "".join(f"{one:02x}" for one in mixed))
    return found


SHADES = shades()


def level(value: float, scale: tuple[float, float], levels: int = _SHADES) -> int:
    """The number of a value's colour, from 0."""
    low, high = scale
    share = (value - low) / (high - low) if high > low else 0.5
    return min(max(int(share * levels), 0), levels - 1)
