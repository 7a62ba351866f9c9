"""The arms of a campaign: checkpoints and layers of [[models]], or [arms] with any keys."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit.arms import KINDS, Column, Kind, columns_of
from hpc_toolkit.campaign.tables import Converter, a_list, a_table, read_table
from hpc_toolkit.errors import ConfigError, ItemsError, describe, near_miss
from hpc_toolkit.queue.listfiles import each_item
from hpc_toolkit.queue.lists import combinations, parse_values
from hpc_toolkit.science.workloads.pythia import (
    HUB,
    SIZES,
    WIDTHS,
    checkpoint_of,
    parse_layers,
    parse_sizes,
    parse_steps,
)
from hpc_toolkit.system.tomltable import count, number_from, text, word, wrong

if TYPE_CHECKING:
    from hpc_toolkit.queue.items import Item


TASK = "task"
"""The key that an item of the tasks stage has besides those of its arm."""

MOST_ARMS = 200_000
"""More arms than this are taken for a mistake; run.json contains those of [arms]."""

_SOURCES = ("file", "grid", "generate", "rows")


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


def with_rows(table: dict[str, Any], where: str, path: Sequence[str]) -> dict[str, Any]:
    """Replace ``file``, ``grid`` or ``generate`` by the rows that it names.

    Files and code are looked for in the directories ``path``. Raises ConfigError, ItemsError, and
    WorkloadError for code that cannot be imported.
    """
    given = [key for key in _SOURCES if key in table]
    if len(given) != 1:
        message = f"{where}: {' and '.join(given) or 'nothing'} names the arms"
        raise ConfigError(message, hint=f"give one of {', '.join(_SOURCES)}")
    source = given[0]
    read: dict[str, Callable[[Any, str], Iterable[Any]]] = {
        "file": lambda value, here: _from_file(text(value, here), here, path),
        "grid": _from_grid,
        "generate": lambda value, here: _generated(text(value, here), here, path),
        "rows": a_list(a_table, "a list of tables"),
    }
    rows = list(read[source](table[source], f"{where}: {source}"))
    kept = {key: one for key, one in table.items() if key not in _SOURCES}
    return {**kept, "rows": rows}


def arms_table(value: object, where: str) -> ArmRows:
    """Convert [arms] once it has rows. Raises ConfigError."""
    found = read_table(ArmRows, value, where, _ARMS, ("rows",))
    keys = list(dict.fromkeys(key for row in found.rows for key in row))
    if len(found.rows) > MOST_ARMS:
        raise ConfigError(f"{where}: {len(found.rows)} arms", hint=f"use at most {MOST_ARMS}")
    for key in (*found.baseline, *([] if found.group_by is None else [found.group_by])):
        if key not in keys:
            raise ConfigError(f"{where}: no arm has the key {key!r}", hint=near_miss(key, keys))
    if found.group_by is not None and not all(found.group_by in row for row in found.rows):
        message = f"{where}: group_by: some arms have no key {found.group_by!r}"
        raise ConfigError(message, hint="name a key of all arms")
    if found.baseline and not any(map(found.is_baseline, found.rows)):
        message = f"{where}: baseline: no arm has {arm_id(found.baseline)}"
        raise ConfigError(message, hint="give keys and values of one or more arms")
    if found.group_by is None and all("checkpoint" in row for row in found.rows):
        return replace(found, group_by="checkpoint")
    return found


def _from_file(name: str, where: str, path: Sequence[str]) -> list[Any]:
    places = [Path(directory, name) for directory in path or [""]]
    file = next((place for place in places if place.exists()), places[0])
    try:
        return [*each_item(file)]
    except ItemsError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error
    except OSError as error:
        message = f"{where}: cannot read {file}: {error.strerror}"
        raise ConfigError(message, hint="name a file that exists, such as arms.csv") from error


def _from_grid(value: Any, where: str) -> list[Any]:
    """The rows of one grid, or of several one after the other."""
    rows: list[Any] = []
    for one in value if isinstance(value, list) and value else [value]:
        axes = a_table(one, where)
        values = {key: _axis(given, f"{where}.{key}") for key, given in axes.items()}
        rows += combinations(values, where) if values else []
    return rows


def _axis(given: Any, where: str) -> list[Any]:
    if isinstance(given, str):
        return parse_values(given, where)
    if isinstance(given, list) and given:
        return given
    raise wrong(where, given, 'a list of values, or a range such as "0:9"')


def _generated(name: str, where: str, path: Sequence[str]) -> Iterable[Any]:
    from hpc_toolkit.worker.loading import load_object

    make = load_object(name, tuple(path))
    try:
        return list(make())
    except (Exception, SystemExit) as error:
        message = f"{where}: {name}() failed: {describe(error)}"
        hint = "it takes no arguments and returns one dictionary for each arm"
        raise ConfigError(message, hint=hint) from error


def _row(value: object, where: str) -> dict[str, Any]:
    row = a_table(value, where)
    if not row:
        raise wrong(where, value, "a table with at least one key")
    if TASK in row:
        message = f"{where}: an arm has the key {TASK!r}"
        raise ConfigError(message, hint="rename it: items use this key for the evaluation task")
    copy = _as_json(row, where)
    # A policy computes with squares of features.
    good = all(abs(one) <= 1e100 for one in copy.values() if isinstance(one, int | float))
    if not good or copy.keys() != row.keys():
        raise wrong(where, row, "a table of names and values, with numbers up to 1e100")
    return copy


def _as_json(table: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        copy: dict[str, Any] = json.loads(json.dumps(table, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        message = f"{where}: {error}"
        raise ConfigError(message, hint="use numbers, texts, true, false, lists, tables") from error
    return copy


def _kind(value: Any, where: str) -> Any:
    if isinstance(value, list) and value:
        return tuple(_as_json({"": value}, where)[""])
    if value in KINDS:
        return value
    raise wrong(where, value, f"one of {', '.join(KINDS)} or a list of values in their order")


_ARMS: dict[str, Converter] = {
    "rows": a_list(_row, "a list of tables with at least one arm"),
    "features": lambda value, where: {
        key: _kind(one, f"{where}.{key}") for key, one in a_table(value, where).items()
    },
    "baseline": lambda value, where: _as_json(a_table(value, where), where),
    "group_by": text,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model with a series of checkpoints."""

    name: str
    """Name of the series."""
    layers: int
    """Number of blocks; hidden states have the numbers 0 (embeddings) to this one."""
    size: float
    """Number of parameters, or the width; the same one of the two for all models."""
    steps: tuple[int, ...]
    """Training steps that have a checkpoint."""
    checkpoint: str = "{name}/step{step}"
    """Name of a checkpoint, a directory below the workload's root or ``hub/name@revision``."""
    chosen: tuple[int, ...] = ()
    """Layers that are arms; empty: all."""

    def checkpoint_at(self, step: int) -> str:
        return self.checkpoint.replace("{name}", self.name).replace("{step}", str(step))

    def points(self) -> Iterator[tuple[int, int]]:
        """Step and layer of each arm."""
        return itertools.product(self.steps, self.chosen or range(self.layers + 1))

    def arms(self) -> Iterator[CampaignArm]:
        for step, layer in self.points():
            checkpoint = self.checkpoint_at(step)
            keys = {"checkpoint": checkpoint, "layer": layer}
            last = layer == self.layers
            yield CampaignArm(id=arm_id(keys), keys=keys, group=checkpoint, baseline=last)


FROM_0 = number_from(0, math.inf, "a whole number from 0", whole=True)

_MODEL: dict[str, Converter] = {
    "name": word,
    "layers": count,
    "size": number_from(1e-9, 1e30, "a positive number"),
    "steps": a_list(FROM_0, "a list of training steps"),
    "checkpoint": text,
    "chosen": a_list(FROM_0, "a list of layers"),
}


def models_list(value: Any, where: str) -> tuple[Model, ...]:
    """Convert the [[models]] tables; a table with the key ``pythia`` may be several models."""
    tables = a_list(a_table, "one or more [[models]] tables")(value, where)
    found: list[Model] = []
    for place, table in enumerate(tables):
        here = f"{where}[{place}]"
        if "pythia" in table:
            found += read_table(_pythia, table, here, _PYTHIA)
            continue
        model = read_table(Model, table, here, _MODEL)
        if model.chosen and max(model.chosen) > model.layers:
            message = f"{here}: chosen: the model has no layer {max(model.chosen)}"
            raise ConfigError(message, hint=f"its layers are 0 to {model.layers}")
        found.append(model)
    arms = sum(len(one.steps) * (len(one.chosen) or one.layers + 1) for one in found)
    if arms > MOST_ARMS:
        raise ConfigError(f"{where}: {arms} arms", hint=f"use at most {MOST_ARMS}")
    return tuple(found)


def _sizes(value: Any, where: str) -> tuple[str, ...]:
    names = value if isinstance(value, list) and value else [value]
    return tuple(parse_sizes(",".join(text(name, where) for name in names)))


def _texts_of(value: Any, where: str) -> str:
    """A list of numbers as the text that the command line takes."""
    if isinstance(value, list):
        return ",".join(str(FROM_0(one, where)) for one in value)
    return str(FROM_0(value, where)) if isinstance(value, int) else text(value, where)


_PYTHIA: dict[str, Converter] = {
    "pythia": _sizes,
    "steps": _texts_of,
    "layers": _texts_of,
    "checkpoint": text,
}


def _pythia(
    *,
    pythia: tuple[str, ...],
    steps: str = "all",
    layers: str = "blocks",
    checkpoint: str = HUB,
) -> list[Model]:
    """One model for each size of Pythia; ``size`` is the width.

    Args:
        pythia: sizes of models, such as 14m, or all.
        steps: training steps, as for ``hpctk items pythia``.
        layers: layers of each model, as for ``hpctk items pythia``.
        checkpoint: names of the checkpoints; ``{size}`` and ``{step}`` are replaced.
    """
    return [
        Model(
            name=f"pythia-{size}",
            layers=SIZES[size],
            size=WIDTHS[size],
            steps=tuple(parse_steps(steps)),
            checkpoint=checkpoint_of(size, checkpoint),
            chosen=tuple(parse_layers(layers, size)),
        )
        for size in pythia
    ]
