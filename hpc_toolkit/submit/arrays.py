"""Job arrays in sbatch's notation, and their split where Slurm takes no index so high."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_toolkit.errors import RenderError

_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
_MOST_CHUNKS = 1000


@dataclass(frozen=True, slots=True)
class Chunk:
    """One array of those that an array is split into."""

    array: str
    """Its indices in sbatch's notation, each less by ``offset``."""
    offset: int
    """What must be added to get the index that was asked for."""


def split_array(array: str, limit: int) -> list[Chunk]:
    """The arrays to submit so that no index reaches ``limit``; one, as it is, if none does.

    Args:
        array: sbatch's notation: ``0-99``, ``1,5,9-20:2``, with ``%N`` at the end for at most N at
            once; this holds for each of the arrays.
        limit: Slurm's MaxArraySize.

    Raises:
        RenderError: not this notation, far too many arrays, or a ``limit`` of none.
    """
    if limit < 1:
        message = f"--array: this Slurm takes no arrays (MaxArraySize is {limit})"
        raise RenderError(message, hint="--jobs N sends one script N times; or ask the site")
    listed, percent, throttle = array.partition("%")
    ranges = [_range(part, array) for part in listed.split(",")]
    highest = max(found[-1] for found in ranges)
    if highest < limit:
        return [Chunk(array, 0)]
    if highest // limit >= _MOST_CHUNKS:
        message = f"--array: {array!r} makes more than {_MOST_CHUNKS} arrays of {limit} elements"
        raise RenderError(message, hint="put the work into a run: a few jobs drain any number")
    chunks = []
    for offset in range(0, highest + 1, limit):
        parts = [_clip(one, offset, offset + limit) for one in ranges]
        text = ",".join(_text(part, offset) for part in parts if part)
        if text:
            chunks.append(Chunk(f"{text}{percent}{throttle}", offset))
    return chunks


def _range(part: str, array: str) -> range:
    match = _PART.fullmatch(part)
    first = int(match[1]) if match else 0
    last = int(match[2] or first) if match else -1
    step = int(match[3] or 1) if match else 0
    if last < first or step < 1:
        message = f"--array: {array!r} is no list of indices"
        raise RenderError(message, hint="such as 0-99, 1,5,9-20:2 or 0-999%50")
    return range(first, last + 1, step)


def _clip(one: range, low: int, high: int) -> range:
    """The members of ``one`` from ``low`` to below ``high``."""
    skipped = max(0, -(-(low - one.start) // one.step))
    return range(one.start + skipped * one.step, min(one.stop, high), one.step)


def _text(part: range, offset: int) -> str:
    first, last = part[0] - offset, part[-1] - offset
    if first == last:
        return str(first)
    return f"{first}-{last}" + (f":{part.step}" if part.step > 1 else "")
