"""States of a rank's random number generators, in a form that a checkpoint can hold."""

from __future__ import annotations

import random
from typing import Any


def generator_states() -> dict[str, Any]:
    """Return the states of torch on the CPU and this rank's GPU, and of Python's ``random``.

    NumPy's are not included: code that uses NumPy should create its own generators.
    """
    import torch

    version, words, gauss = random.getstate()
    cuda = torch.cuda.is_available()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if cuda else None,
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
    }


def set_generator_states(states: dict[str, Any]) -> None:
    """Restore the result of `generator_states`; without a GPU its GPU state is ignored."""
    import torch

    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
