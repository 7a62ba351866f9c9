"""Split job arrays, in sbatch's notation, whose indices are too high for Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.errors import RenderError

if TYPE_CHECKING:
    from hpc_toolkit.slurm.render.grammar import Array

_MOST_CHUNKS = 1000


@dataclass(frozen=True, slots=True)
class Chunk:
    """One of the arrays that an array is split into."""

    array: str
    """Its indices in sbatch's notation, each reduced by ``offset``."""
    offset: int
    """Number to add to an index to get the one that was requested."""


def split_array(array: Array, limit: int) -> list[Chunk]:
    """Split an array so that no index reaches ``limit``; it stays as it is if none does.

    Args:
        array: the indices; its limit of elements that run at once holds for each of the arrays.
        limit: Slurm's MaxArraySize.

    Raises:
        RenderError: it would take too many arrays, or ``limit`` is below 1.
    """
    if limit < 1:
        message = f"--array: this Slurm takes no arrays (MaxArraySize is {limit})"
        raise RenderError(message, hint="--jobs N sends one script N times; or ask the site")
    if array.highest < limit:
        return [Chunk(array.text, 0)]
    if array.highest // limit >= _MOST_CHUNKS:
        message = (
            f"--array: {array.text!r} makes more than {_MOST_CHUNKS} arrays of {limit} elements"
        )
        raise RenderError(message, hint="put the work into a run: a few jobs drain any number")
    chunks = []
    throttle = f"%{array.at_once}" if array.at_once else ""
    for offset in range(0, array.highest + 1, limit):
        parts = [_clip(one, offset, offset + limit) for one in array.ranges]
        text = ",".join(_text(part, offset) for part in parts if part)
        if text:
            chunks.append(Chunk(f"{text}{throttle}", offset))
    return chunks


def _clip(one: range, low: int, high: int) -> range:
    """The members of ``one`` from ``low`` to below ``high``."""
    skipped = max(0, -(-(low - one.start) // one.step))
    return range(one.start + skipped * one.step, min(one.stop, high), one.step)


def _text(part: range, offset: int) -> str:
    first, last = part[0] - offset, part[-1] - offset
    if first == last:
        return str(first)
    return f"{first}-{last}" + (f":{part.step}" if part.step > 1 else "")
