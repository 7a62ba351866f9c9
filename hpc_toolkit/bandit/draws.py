"""Random numbers that a later ask draws again: a function of the seed and of what is known."""

from __future__ import annotations

from enum import IntEnum, unique
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hpc_toolkit.bandit.history import History


@unique
class Stream(IntEnum):
    """The streams of random numbers of one seed; each purpose has its own.

    numpy fills a list of seeds up with zeros, so ``[seed]``, ``[seed, 0]`` and ``[seed, 0, 0]`` are
    one stream. New ones have numbers above 0, here and nowhere else. The numbers of those that
    recorded searches drew from must stay.
    """

    FIRST_ARM = 0
    """Also that of the seed alone, by which ``random`` orders the arms."""

    WITHIN_GROUPS = 1
    GP_SAMPLE = 2
    TOP_TWO = 3
    EPSILON = 4
    GROUP_SAMPLE = 5
    WEIGHT_SAMPLE = 6
    PARTS = 7
    """Random parts of a recorded table."""

    MADE_TASKS = 8
    """Tasks of a made-up table."""

    OPTUNA = 9
    SURFACE = 10
    """The mean rewards of a made-up table."""

    BOOTSTRAP = 11
    PILOT = 32


def drawn(history: History, stream: Stream, chosen: int) -> np.random.Generator:
    """The generator for the choice that follows ``chosen`` others in this ask.

    It depends on how many arms are told, pending or chosen, so that an ask for several arms draws
    what asks for one would, with the others pending; and so that a lost ask is drawn again.
    """
    return np.random.default_rng([history.seed, stream, len(history.taken) + chosen])
