"""Random numbers that a later ask draws again: a function of the seed and of what is known."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hpc_toolkit.bandit.history import History


class Stream(IntEnum):
    """The streams of random numbers of one seed; each purpose has its own."""

    FIRST_ARM = 0
    WITHIN_GROUPS = 1
    GP_SAMPLE = 2
    TOP_TWO = 3
    EPSILON = 4
    GROUP_SAMPLE = 5
    WEIGHT_SAMPLE = 6
    OPTUNA = 7
    PILOT = 32


def drawn(history: History, stream: Stream, chosen: int) -> np.random.Generator:
    """The generator for the choice that follows ``chosen`` others in this ask.

    It depends on how many arms are told, pending or chosen, so that an ask for several arms draws
    what asks for one would, with the others pending; and so that a lost ask is drawn again.
    """
    return np.random.default_rng([history.seed, stream, len(history.taken) + chosen])
