"""The Pythia models as data: their sizes, their 154 checkpoints, and items for them.

Source: README of github.com/EleutherAI/pythia at a19eecb (2025-11-15). Biderman et al. 2023,
arXiv 2304.01373. Imports nothing heavy.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from typing import Any

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.system.quantities import parse_range

HUB = "EleutherAI/pythia-{size}@step{step}"
"""Name of a checkpoint on the hub."""

LAST_STEP = 143_000
"""The end of training; the hub's ``main`` is this checkpoint."""

REVISIONS: tuple[int, ...] = (
    0,
    *(2**power for power in range(10)),
    *range(1000, LAST_STEP + 1, 1000),
)
"""The 154 steps that have a revision ``step<N>``, the same for every size."""


SIZES = {
    "14m": 6,
    "31m": 6,
    "70m": 6,
    "160m": 12,
    "410m": 24,
    "1b": 16,
    "1.4b": 24,
    "2.8b": 32,
    "6.9b": 32,
    "12b": 36,
}
"""Number of blocks L of each size by the name that the hub uses; hidden states are numbered from 0
(embeddings) to L."""

WIDTHS = {
    "14m": 128,
    "31m": 256,
    "70m": 512,
    "160m": 768,
    "410m": 1024,
    "1b": 2048,
    "1.4b": 2048,
    "2.8b": 2560,
    "6.9b": 4096,
    "12b": 5120,
}
"""Numbers in a hidden state of each size."""


def pythia_items(
    sizes: Sequence[str],
    steps: Sequence[int],
    layers: str = "blocks",
    *,
    checkpoint: str = HUB,
) -> Iterator[dict[str, Any]]:
    """Return items ``{"checkpoint", "layer"}``, size by size, step by step, layer by layer.

    Args:
        sizes: names in `SIZES`.
        steps: steps in `REVISIONS`, such as from `parse_steps`.
        layers: text for `parse_layers`, read for each size with its own number of layers.
        checkpoint: the name of a checkpoint; ``{size}`` and ``{step}`` are replaced.

    Raises ConfigError: a size or a layer does not exist, or ``checkpoint`` lacks a field; raised by
    the call itself, before the first item.
    """
    chosen = {size: parse_layers(layers, size) for size in sizes}
    names = {size: checkpoint_of(size, checkpoint) for size in sizes}
    return (
        {"checkpoint": names[size].replace("{step}", str(step)), "layer": layer}
        for size in sizes
        for step in steps
        for layer in chosen[size]
    )


def checkpoint_of(size: str, checkpoint: str = HUB) -> str:
    """The name of a size's checkpoints, in which ``{step}`` is left.

    Raises ConfigError: ``checkpoint`` lacks a field.
    """
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(checkpoint)}
    except ValueError as error:
        raise ConfigError(f"checkpoint {checkpoint!r}: {error}", hint=f"such as {HUB!r}") from None
    if not {"size", "step"} <= fields:
        missing = " and ".join(f"{{{one}}}" for one in sorted({"size", "step"} - fields))
        msg = f"checkpoint {checkpoint!r} has no {missing}: all checkpoints would be one"
        raise ConfigError(msg, hint=f"such as {HUB!r}")
    return checkpoint.replace("{size}", size)


def parse_sizes(text: str) -> list[str]:
    """Parse names of sizes, ``14m,70m`` or ``all``; return each once, in the given order.

    Raises ConfigError: there is no such size.
    """
    if text == "all":
        return list(SIZES)
    names = dict.fromkeys(part.strip().lower() for part in text.split(","))
    for name in names:
        _require_size(name)
    return list(names)


def parse_steps(text: str) -> list[int]:
    """Parse training steps such as ``0,1000:143000:1000``, or ``all`` of `REVISIONS`.

    A part is one step; ``FIRST:LAST:STRIDE``, including the end; or ``FIRST:LAST``, every revision
    from the first to the last. The result is ascending, with each step once. Raises ConfigError: a
    part is none of these, or a step has no revision.
    """
    if text == "all":
        return list(REVISIONS)
    found: set[int] = set()
    for part in text.split(","):
        for step in _range(part, "steps", among=REVISIONS):
            if step not in REVISIONS:
                _, nearest = min((abs(one - step), one) for one in REVISIONS)
                msg = f"steps {part.strip()!r}: there is no checkpoint at step {step}"
                raise ConfigError(msg, hint=f"the nearest is at step {nearest}")
            found.add(step)
    return sorted(found)


def parse_layers(text: str, size: str) -> list[int]:
    """Parse layers of a size; return them ascending, each once.

    ``blocks`` means 1 to L, the outputs of its L blocks; ``all`` 0 (embeddings) to L; ``last`` L.
    Otherwise the text has numbers and ranges that include their end, such as ``0,4:12:4``; a range
    without an end, such as ``1:``, goes to L. Raises ConfigError: the size does not exist, or has
    no such layer.
    """
    last = _require_size(size)
    named = {"blocks": range(1, last + 1), "all": range(last + 1), "last": range(last, last + 1)}
    if text in named:
        return list(named[text])
    found: set[int] = set()
    for part in text.split(","):
        if part.strip().isalpha():
            msg = f"layers {part.strip()!r}: not a number, a range, blocks, all or last"
            raise ConfigError(msg, hint=near_miss(part.strip(), list(named)))
        layers = _range(f"{part}{last}" if part.endswith(":") else part, "layers")
        if layers[-1] > last:
            msg = f"layers {part.strip()!r}: pythia-{size} has the layers 0 to {last}"
            raise ConfigError(msg, hint="give each size its own list, or say blocks")
        found.update(layers)
    return sorted(found)


def _require_size(name: str) -> int:
    """Return the number of blocks of a size. Raises ConfigError."""
    if name not in SIZES:
        msg = f"there is no Pythia model of size {name!r}"
        raise ConfigError(msg, hint=near_miss(name, list(SIZES)))
    return SIZES[name]


def _range(text: str, what: str, *, among: Sequence[int] | None = None) -> Sequence[int]:
    """Return the numbers of one part of a list, at least one.

    Without a stride, a range has the numbers in ``among`` from its first to its last, if both are
    in it, and otherwise all integers.
    """
    numbers = parse_range(text, where=what)
    if numbers[0] < 0:
        raise ConfigError(f"{what} {text.strip()!r}: {numbers[0]} is negative", hint="count from 0")
    _, *ends = text.split(":")
    if among is not None and len(ends) == 1 and {numbers[0], numbers[-1]} <= set(among):
        return [one for one in among if numbers[0] <= one <= numbers[-1]]
    return numbers
