"""The arms of a bandit: a fixed, finite list, each with a group and numeric features."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.policy import LARGEST_NUMBER, refuse_repeats
from hpc_toolkit.errors import ConfigError, near_miss

if TYPE_CHECKING:
    from numpy.typing import NDArray

METRIC_PREFIX = "metric:"
"""Prefix of the names of measured features (see ``features.with_metrics``)."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One thing that can be evaluated, for instance one layer of one checkpoint."""

    id: str
    """Unique within its table."""
    group: str
    """Name of the arm's group, for instance its checkpoint."""
    features: tuple[float, ...]
    """One number per feature of the table, in the table's order; NaN means not known."""

    def __post_init__(self) -> None:
        try:
            features = tuple(float(value) for value in self.features)
        except (TypeError, ValueError) as error:
            message = f"arm {self.id!r}: features {self.features!r} are not numbers"
            raise ConfigError(message) from error
        object.__setattr__(self, "features", features)


@dataclass(frozen=True, slots=True, eq=False)
class Standardised:
    """Features with mean 0 and standard deviation 1 per column, without gaps."""

    values: NDArray[np.float64]
    """Shape (n_arms, n_columns)."""
    names: tuple[str, ...]
    """The features' names, then ``<name>_missing`` for each that has gaps."""


@dataclass(frozen=True, eq=False)
class ArmTable:
    """All arms of one bandit. Throughout this package, an arm's index is its position in ``arms``.

    Raises ConfigError for an empty table, duplicate ids, and ragged or infinite features.
    """

    arms: tuple[Arm, ...]
    """The order is part of the table: it breaks ties."""
    feature_names: tuple[str, ...]
    """Unique names of the columns of ``features``; those of metrics begin with ``metric:``."""

    def __post_init__(self) -> None:
        if not self.arms:
            message = "the arm table is empty"
            raise ConfigError(message, hint="give at least one arm")
        refuse_repeats("arm id", self.ids)
        refuse_repeats("feature name", self.feature_names)
        names = self.feature_names
        for arm in self.arms:
            if len(arm.features) != len(names):
                count = len(arm.features)
                message = f"arm {arm.id!r} has {count} features, the table names {len(names)}"
                raise ConfigError(message, hint=f"give one number for each of: {', '.join(names)}")
            for name, value in zip(names, arm.features, strict=True):
                if abs(value) > LARGEST_NUMBER:
                    message = f"arm {arm.id!r}: feature {name!r} is {value}"
                    raise ConfigError(message, hint="use NaN for a value that is not known")

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """Arm ids by index."""
        return tuple(arm.id for arm in self.arms)

    @cached_property
    def features(self) -> NDArray[np.float64]:
        """Shape (n_arms, n_features), as given; NaN where not known."""
        rows = [arm.features for arm in self.arms]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self.feature_names))

    @cached_property
    def standardised(self) -> Standardised:
        """The features that kernels and distances use."""
        return _standardise(self.features, self.feature_names)

    def index(self, arm_id: str) -> int:
        """Return the index of an arm. Raises ConfigError with the nearest known id."""
        try:
            return self._index_of[arm_id]
        except KeyError:
            message = f"unknown arm {arm_id!r}"
            raise ConfigError(message, hint=near_miss(str(arm_id), list(self.ids))) from None

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {arm_id: index for index, arm_id in enumerate(self.ids)}


def _standardise(features: NDArray[np.float64], names: tuple[str, ...]) -> Standardised:
    columns: list[NDArray[np.float64]] = []
    column_names = list(names)
    gaps: list[NDArray[np.float64]] = []
    for name, column in zip(names, features.T, strict=True):
        missing = np.isnan(column)
        known = column[~missing]
        columns.append(np.where(missing, np.median(known) if known.size else 0.0, column))
        if missing.any():
            gaps.append(missing.astype(np.float64))
            column_names.append(f"{name}_missing")
    filled = np.array(columns + gaps, dtype=np.float64).reshape(-1, len(features)).T
    mean = filled.mean(axis=0)
    std = filled.std(axis=0)
    # The deviation of a constant column is rounding error; dividing by it would create noise.
    std = np.where(std <= 1e-12 * np.maximum(1.0, np.abs(mean)), 1.0, std)
    return Standardised((filled - mean) / std, tuple(column_names))
