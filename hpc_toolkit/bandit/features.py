"""Features of arms: geometry, measured metrics, and the columns that a rule uses."""

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
            message = f"no arm has a metric {name!r}"
            raise ConfigError(message, hint=near_miss(name, known))
        given = (rows.get(arm, {}).get(name) for arm in table.ids)
        values = [math.nan if value is None else float(value) for value in given]
        if sum(map(math.isnan, values)) <= MOST_GAPS * len(values):
            columns[METRIC_PREFIX + name] = values
    arms = [
        replace(arm, features=(*arm.features, *(column[index] for column in columns.values())))
        for index, arm in enumerate(table.arms)
    ]
    return ArmTable(tuple(arms), (*table.feature_names, *columns))


def columns(table: ArmTable, wanted: str) -> NDArray[np.float64]:
    """Return shape (n_arms, n_columns): the standardised features of one of ``FEATURES``.

    "geometry" selects all features that are not metrics, whatever their names. Raises ConfigError
    for "metrics" if the table has none.
    """
    measured = [name.startswith(METRIC_PREFIX) for name in table.standardised.names]
    if wanted == "metrics" and not any(measured):
        message = "the arms have no metrics as features"
        raise ConfigError(message, hint="use features = 'geometry'")
    keep = {"geometry": (False,), "metrics": (True,), "all": (False, True)}[wanted]
    return table.standardised.values[:, [metric in keep for metric in measured]]
