"""The [[models]] of a campaign, whose checkpoints and layers are the arms."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.campaign.arms import MOST_ARMS, CampaignArm, arm_id
from hpc_toolkit.campaign.tables import a_list, a_table, read_table
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.science.workloads.pythia import (
    HUB,
    SIZES,
    WIDTHS,
    checkpoint_of,
    parse_layers,
    parse_sizes,
    parse_steps,
)
from hpc_toolkit.system.tomltable import count, flag, number_from, text, word

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.campaign.tables import Converter


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
    "deduped": flag,
    "checkpoint": text,
}


def _pythia(
    *,
    pythia: tuple[str, ...],
    steps: str = "all",
    layers: str = "blocks",
    deduped: bool = False,
    checkpoint: str = HUB,
) -> list[Model]:
    """One model for each size of Pythia; ``size`` is the width.

    Args:
        pythia: sizes, such as ``["14m", "70m"]``; their layers and widths are known.
        steps: training steps, such as ``"0,1000:143000:1000"``.
        layers: ``blocks``, ``all``, ``last``, or numbers such as ``"0,4:12:4"``.
        deduped: use the models that were trained on the deduplicated Pile.
        checkpoint: name that items carry, with ``{size}``.
    """
    return [
        Model(
            name=f"pythia-{size}",
            layers=SIZES[size],
            size=WIDTHS[size],
            steps=tuple(parse_steps(steps)),
            checkpoint=checkpoint_of(size, deduped=deduped, checkpoint=checkpoint),
            chosen=tuple(parse_layers(layers, size)),
        )
        for size in pythia
    ]
