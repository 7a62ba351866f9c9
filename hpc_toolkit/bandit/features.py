"""Add measured metrics to the features of arms, and select the features that a rule uses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from hpc_toolkit.bandit.arms import METRIC_PREFIX, ArmTable
from hpc_toolkit.errors import ConfigError, near_miss

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

MOST_GAPS = 0.5
"""A metric that is missing for more than this share of the arms is left out."""

FEATURES = ("geometry", "metrics", "all")
"""The sets of columns that a rule can be configured to use."""


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
            message = f"no arm has a metric {name!r}"
            raise ConfigError(message, hint=near_miss(name, known))
        values = [_number(rows.get(arm, {}).get(name)) for arm in table.ids]
        if sum(map(math.isnan, values)) <= MOST_GAPS * len(values):
            columns[METRIC_PREFIX + name] = values
    arms = [
        replace(arm, features=(*arm.features, *(column[index] for column in columns.values())))
        for index, arm in enumerate(table.arms)
    ]
    return ArmTable(tuple(arms), (*table.feature_names, *columns), table.metrics + len(columns))


def columns_of(table: ArmTable, wanted: str) -> tuple[int, ...]:
    """Return the indices of the standardised columns of one of ``FEATURES``.

    "geometry" selects all features that are not metrics, whatever their names. Raises ConfigError
    for "metrics" if the table has none.
    """
    names = table.standardised.names
    metrics = [name.startswith(METRIC_PREFIX) for name in names]
    if wanted == "metrics" and not any(metrics):
        message = "the arms have no metrics as features"
        raise ConfigError(message, hint="use features = 'geometry'")
    keep = {"geometry": (False,), "metrics": (True,), "all": (False, True)}[wanted]
    return tuple(index for index, is_metric in enumerate(metrics) if is_metric in keep)


def columns(table: ArmTable, wanted: str) -> NDArray[np.float64]:
    """Return shape (n_arms, n_columns): the standardised features of one of ``FEATURES``."""
    return table.standardised.values[:, columns_of(table, wanted)]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
