"""The arms of a campaign: their names, keys and baseline."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit.features import columns_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hpc_toolkit.bandit.features import Column, Kind
    from hpc_toolkit.queue.items import Item

TASK = "task"
"""The key that an item of the tasks stage has besides those of its arm."""

MOST_ARMS = 200_000
"""More arms than this are taken for a mistake; run.json contains those of [arms]."""


def arm_id(keys: Mapping[str, Any]) -> str:
    """The name of an arm, from its keys or from one of its items of the tasks stage.

    ``s/step16/layer3`` for a checkpoint and a layer, and otherwise ``depth=2,lr=0.1``.
    """
    own = {key: value for key, value in keys.items() if key != TASK}
    if own.keys() == {"checkpoint", "layer"}:
        return f"{own['checkpoint']}/layer{own['layer']}"
    return ",".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value, sort_keys=True)}"
        for key, value in sorted(own.items())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignArm:
    """One arm: what a workload is given, and what a policy sees."""

    id: str
    keys: dict[str, Any]
    """Keys and values of its items."""
    group: str
    """Items of one group run on one worker where possible."""
    baseline: bool
    """Whether it is one of the arms that the search has to beat."""

    def item(self) -> Item:
        """The item of the metrics stage; with a ``task`` it is one of the tasks stage."""
        return dict(self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRows:
    """Arms that a campaign names itself: a row of keys and values for each."""

    rows: tuple[dict[str, Any], ...]
    features: dict[str, Kind] = field(default_factory=dict)
    """How the values of a key become features, where the campaign says so."""
    baseline: dict[str, Any] = field(default_factory=dict)
    """Keys and values of the arms that the search has to beat; empty: none."""
    group_by: str | None = None
    """The key whose equal values should run on one worker."""

    def arms(self) -> Iterator[CampaignArm]:
        for row in self.rows:
            yield CampaignArm(
                id=arm_id(row),
                keys=row,
                group="" if self.group_by is None else str(row.get(self.group_by)),
                baseline=self.is_baseline(row),
            )

    def columns(self) -> list[Column]:
        """The features from each key. Raises ConfigError."""
        return columns_of(self.rows, self.features)

    def is_baseline(self, row: Mapping[str, Any]) -> bool:
        given = self.baseline.items()
        return bool(given) and all(key in row and row[key] == value for key, value in given)
