"""The arms of a bandit: a fixed, finite list, each with a group and numeric features.

Features are geometry, values of a table of settings, or measured metrics. A rule uses the
standardised columns of some of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hpc_toolkit.bandit.policy import LARGEST_NUMBER, Floats, look_up, refuse_repeats
from hpc_toolkit.errors import ConfigError, near_miss

METRIC_PREFIX = "metric:"
"""Prefix of the names of measured features (see ``arms.with_metrics``)."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One thing that can be evaluated, for instance one layer of one checkpoint."""

    id: str
    """Unique within its table."""
    group: str
    """Name of the arm's group, for instance its checkpoint."""
    features: tuple[float, ...]
    """One number per feature of the table, in the table's order; NaN means not known."""
    keys: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What the arm consists of, for a user's own policy."""

    def __post_init__(self) -> None:
        try:
            features = tuple(float(value) for value in self.features)
        except (TypeError, ValueError) as error:
            message = f"arm {self.id!r}: features {self.features!r} are not numbers"
            raise ConfigError(message) from error
        object.__setattr__(self, "features", features)


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
            raise ConfigError("there are no arms", hint="give at least one arm")
        refuse_repeats("arm id", self.ids)
        refuse_repeats("feature name", self.feature_names)
        names = self.feature_names
        for arm in self.arms:
            if len(arm.features) != len(names):
                count = len(arm.features)
                message = f"arm {arm.id!r} has {count} features, but {len(names)} are named"
                raise ConfigError(message, hint=f"give one number for each of: {', '.join(names)}")
            for name, value in zip(names, arm.features, strict=True):
                if abs(value) > LARGEST_NUMBER:
                    message = f"arm {arm.id!r}: feature {name!r} is {value}"
                    raise ConfigError(message, hint="use NaN for an unknown value")

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(arm.id for arm in self.arms)

    @cached_property
    def features(self) -> Floats:
        """Shape (n_arms, n_features), as given; NaN where not known."""
        rows = [arm.features for arm in self.arms]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self.feature_names))

    @cached_property
    def standardised(self) -> tuple[Floats, tuple[str, ...]]:
        """Features with mean 0 and standard deviation 1, shape (n_arms, n_columns), without gaps;
        and the columns' names: the features, then ``<name>_missing`` for each that has gaps.
        """
        columns: list[Floats] = []
        gaps: dict[str, Floats] = {}
        for name, column in zip(self.feature_names, self.features.T, strict=True):
            missing = np.isnan(column)
            known = column[~missing]
            columns.append(np.where(missing, np.median(known) if known.size else 0.0, column))
            if missing.any():
                gaps[f"{name}_missing"] = missing.astype(np.float64)
        every = np.array([*columns, *gaps.values()], dtype=np.float64)
        filled = every.reshape(-1, len(self.arms)).T
        mean, std = filled.mean(axis=0), filled.std(axis=0)
        # The deviation of a constant column is rounding error; dividing by it would create noise.
        std = np.where(std <= 1e-12 * np.maximum(1.0, np.abs(mean)), 1.0, std)
        return (filled - mean) / std, (*self.feature_names, *gaps)

    def index(self, arm_id: str) -> int:
        """Return the index of an arm. Raises ConfigError with the nearest known id."""
        return look_up("arm", arm_id, self._index_of)

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {arm_id: index for index, arm_id in enumerate(self.ids)}


GEOMETRY_NAMES = ("log_size", "log1p_step", "relative_depth")
"""The names of the values of ``geometry_features``, in the same order."""

MOST_GAPS = 0.5
"""A metric that is missing for more than this share of the arms is left out."""

FEATURES = ("geometry", "metrics", "all")
"""The sets of columns that a rule can be configured to use."""


def geometry_features(
    *, size: float, step: int, layer: int, layers: int
) -> tuple[float, float, float]:
    """Return log(size), log(1 + step) and layer / layers.

    ``size`` is either the number of parameters or the model's width; use the same for all arms.
    ``layer`` runs from 0, the embeddings, to ``layers``, the output of the last block.
    """
    return math.log(size), math.log1p(step), layer / layers


def with_metrics(
    table: ArmTable, rows: Mapping[str, Mapping[str, float | None]], names: Sequence[str]
) -> ArmTable:
    """Return the table with one feature ``metric:<name>`` per metric appended.

    ``rows`` maps an arm's id to its metrics. None, NaN and a missing entry are gaps. A metric that
    more than half of the arms lack is left out: compare ``feature_names``. Raises ConfigError for
    an unknown arm, a metric that no row names, a metric that the table already has, and whatever
    ``ArmTable`` rejects.
    """
    for arm in rows:
        table.index(arm)
    known = sorted({name for row in rows.values() for name in row})
    columns: dict[str, list[float]] = {}
    for name in names:
        if name not in known:
            raise ConfigError(f"no arm has a metric {name!r}", hint=near_miss(name, known))
        given = (rows.get(arm, {}).get(name) for arm in table.ids)
        values = [math.nan if value is None else float(value) for value in given]
        if sum(map(math.isnan, values)) <= MOST_GAPS * len(values):
            columns[METRIC_PREFIX + name] = values
    arms = [
        replace(arm, features=(*arm.features, *(column[index] for column in columns.values())))
        for index, arm in enumerate(table.arms)
    ]
    return ArmTable(tuple(arms), (*table.feature_names, *columns))


def columns(table: ArmTable, wanted: str) -> Floats:
    """Return shape (n_arms, n_columns): the standardised features of one of ``FEATURES``.

    "geometry" selects all features that are not metrics, whatever their names. Raises ConfigError
    for "metrics" if the table has none.
    """
    values, names = table.standardised
    measured = [name.startswith(METRIC_PREFIX) for name in names]
    if wanted == "metrics" and not any(measured):
        raise ConfigError("the arms have no metrics as features", hint="use features = 'geometry'")
    keep = {"geometry": (False,), "metrics": (True,), "all": (False, True)}[wanted]
    return values[:, [metric in keep for metric in measured]]


LINEAR, LOG, CATEGORIES, NONE = "linear", "log", "categories", "none"
KINDS = (LINEAR, LOG, CATEGORIES, NONE)
"""How the values of a key can become features; or a list of its values, in their order."""

MOST_CATEGORIES = 12
"""Texts with more different values are names and not categories, unless the campaign says so."""

Kind = str | tuple[Any, ...]


class Numbers(NamedTuple):
    name: str
    values: tuple[float, ...]
    """One number for each arm; NaN if it is unknown."""


@dataclass(frozen=True, slots=True)
class Column:
    """The features from one key of the arms."""

    key: str
    kind: Kind
    numbers: tuple[Numbers, ...]
    """The features: several for categories, none if the key is not used."""


def columns_of(rows: Sequence[Mapping[str, Any]], given: Mapping[str, Kind]) -> list[Column]:
    """The features of each key, in the order in which the keys first occur.

    Raises ConfigError: ``given`` does not fit the values of a key, or there is no such key.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for key in given:
        if key not in keys:
            raise ConfigError(f"features: no arm has the key {key!r}", hint=near_miss(key, keys))
    found = []
    for key in keys:
        values = [row.get(key) for row in rows]
        kind = given[key] if key in given else kind_of(values)
        found.append(Column(key, kind, tuple(_numbers(key, values, kind))))
    return found


def kind_of(values: Iterable[Any]) -> str:
    """How values become features, if nobody says so; a key with one value does not become any.

    Positive numbers whose logarithms are more evenly spaced than they are themselves become
    logarithms, such as 0.001, 0.01, 0.1 or 16, 32, 64.
    """
    known = {_text(value): value for value in values if value is not None}
    if len(known) < 2:
        return NONE
    if not all(isinstance(value, int | float) for value in known.values()):
        return CATEGORIES if len(known) <= MOST_CATEGORIES else NONE
    numbers = sorted(set(map(float, known.values())))
    if len(numbers) < 2:
        return NONE
    if numbers[0] <= 0 or len(numbers) < 3:
        return LINEAR
    if len(set(map(math.log, numbers))) < len(numbers):
        return LINEAR
    return LOG if _unevenness(list(map(math.log, numbers))) < _unevenness(numbers) else LINEAR


def _unevenness(ascending: list[float]) -> float:
    """The variance of the gaps relative to their mean, rounded: gaps of 0.1 are not exact."""
    gaps = [after - before for before, after in pairwise(ascending)]
    mean = math.fsum(gaps) / len(gaps)
    return round(math.fsum((gap / mean - 1) ** 2 for gap in gaps) / len(gaps), 6)


def _numbers(key: str, values: Sequence[Any], kind: Kind) -> Iterable[Numbers]:
    if kind == NONE:
        return
    if isinstance(kind, str) and kind != CATEGORIES:
        yield Numbers(key, tuple(_number(key, value, kind) for value in values))
        return
    texts = [None if value is None else _text(value) for value in values]
    if isinstance(kind, str):
        for category in sorted({text for text in texts if text is not None}):
            yield Numbers(f"{key}={category}", tuple(float(text == category) for text in texts))
        return
    order = {_text(value): float(place) for place, value in enumerate(kind)}
    for text in texts:
        if text is not None and text not in order:
            message = f"features.{key}: the value {text} is not in the list"
            raise ConfigError(message, hint="list every value of the key, in order")
    yield Numbers(key, tuple(math.nan if text is None else order[text] for text in texts))


def _number(key: str, value: Any, kind: str) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        message = f"features.{key}: the value {_text(value)[:80]} is not a number"
        raise ConfigError(message, hint='write "categories", "none" or a list of the values')
    if kind == LINEAR:
        return float(value)
    if value <= 0:
        message = f"features.{key}: the value {value} has no logarithm"
        raise ConfigError(message, hint='write "linear"')
    return math.log(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
