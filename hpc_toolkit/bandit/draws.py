"""Reproducible random numbers, which depend only on the seed, the purpose and the history."""

from __future__ import annotations

from enum import IntEnum, unique
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hpc_toolkit.bandit.history import History


@unique
class Stream(IntEnum):
    """The streams of random numbers of one seed; each purpose has its own.

    numpy pads a list of seeds with zeros, so ``[seed]``, ``[seed, 0]`` and ``[seed, 0, 0]`` are
    the same stream. Give a new stream a number above 0, and define it only in this class. Never
    change the number of a stream that recorded searches have drawn from.
    """

    FIRST_ARM = 0
    """The same stream as the bare seed, with which the policy ``random`` orders the arms."""

    WITHIN_GROUPS = 1
    GP_SAMPLE = 2
    TOP_TWO = 3
    EPSILON = 4
    GROUP_SAMPLE = 5
    WEIGHT_SAMPLE = 6
    PARTS = 7
    """Random parts of a recorded score table."""

    MADE_TASKS = 8
    """Tasks of a synthetic score table."""

    OPTUNA = 9
    SURFACE = 10
    """The mean rewards of a synthetic score table."""

    BOOTSTRAP = 11
    PILOT = 32


def drawn(history: History, stream: Stream, chosen: int) -> np.random.Generator:
    """Return the generator for the choice that follows ``chosen`` others in this ask.

    It depends on how many arms are told, pending or chosen. So one ask for several arms draws the
    same numbers as several asks for one arm, and a lost ask is repeated with the same draws.
    """
    return np.random.default_rng([history.seed, stream, len(history.taken) + chosen])
