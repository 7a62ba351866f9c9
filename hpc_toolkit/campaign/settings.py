"""The settings of a campaign: models and their checkpoints, metrics, tasks, and the search.

They are parsed from TOML and are pure data, so that the coordinator, the command line and the
summary read the same facts.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_toolkit.campaign.tables import (
    ROUNDS,
    WINDOW,
    Search,
    Work,
    a_list,
    metrics_table,
    prepare_table,
    read_table,
    search_table,
    tasks_table,
    without_retired,
)
from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.rundir.files import read_fresh
from hpc_toolkit.rundir.layout import StageSpec, WorkloadSpec
from hpc_toolkit.system.tomltable import count, number_from, text, word

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hpc_toolkit.campaign.tables import Converter
    from hpc_toolkit.rundir.layout import RunPaths

PREPARE, METRICS, TASKS = "prepare", "metrics", "tasks"
"""The stages of a campaign, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model with a series of checkpoints."""

    name: str
    """Name of the series."""
    layers: int
    """Number of blocks; arms have the layers 0 (embeddings) to this one."""
    size: float
    """Number of parameters, or the width; the same one of the two for all models."""
    steps: tuple[int, ...]
    """Training steps that have a checkpoint."""
    checkpoint: str = "{name}/step{step}"
    """Name of a checkpoint, a directory below the workload's root or ``hub/name@revision``."""

    def checkpoint_at(self, step: int) -> str:
        return self.checkpoint.replace("{name}", self.name).replace("{step}", str(step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """The settings of a campaign."""

    name: str
    """Name; by default the run is ``runs/<name>``."""
    models: tuple[Model, ...]
    """Models whose checkpoints and layers are the arms."""
    metrics: Work
    """Measures every (checkpoint, layer)."""
    tasks: Work
    """Scores one (checkpoint, layer) on one evaluation task."""
    search: Search
    """Settings of the bandit."""
    seed: int = 0
    """Seed of the policy."""
    prepare: Work | None = None
    """Work to do first, such as training the checkpoints."""

    def arms(self) -> Iterator[ArmFacts]:
        """Every (checkpoint, layer), in the order that breaks ties."""
        for model in self.models:
            for step in model.steps:
                for layer in range(model.layers + 1):
                    yield ArmFacts(model=model, step=step, layer=layer)

    def stages(self, path: tuple[str, ...]) -> tuple[StageSpec, ...]:
        """The stages of the campaign's run; its code is imported from ``path``."""
        parts: list[tuple[str, Work | None, str | None]] = [
            (PREPARE, self.prepare, None),
            (METRICS, self.metrics, "checkpoint"),
            (TASKS, self.tasks, "checkpoint"),
        ]
        return tuple(
            StageSpec(
                name=name,
                workload=WorkloadSpec(function=work.workload, options=work.options, path=path),
                group_by=group_by,
                max_attempts=work.max_attempts,
                timeout_s=work.timeout_s,
            )
            for name, work, group_by in parts
            if work is not None
        )

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any], file: str = "campaign") -> Campaign:
        """Read the output of :meth:`to_json`; AttributeError or ConfigError if it is not valid."""
        table = _given(record)
        for name in {PREPARE, METRICS, TASKS} & table.keys():
            table[name] = _given(table[name], "items", "names", "kinds", "seconds")
        # Runs from before rounds existed record no ``asks``; their search used a window.
        if "search" in table:
            table["search"] = {"asks": WINDOW, **without_retired(_given(table["search"]))}
        return parse_campaign(table, file)

    def asked_in(self, asks: str | None) -> Campaign:
        """The campaign with ``asks``, or else rounds, if its ``search.asks`` is not set."""
        return replace(self, search=replace(self.search, asks=self.search.asks or asks or ROUNDS))


def _given(record: dict[str, Any], *lists: str) -> dict[str, Any]:
    """Drop what a TOML table would not contain: None, and empty values of the keys in ``lists``."""
    return {k: v for k, v in record.items() if v is not None and not (k in lists and not v)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFacts:
    """One (checkpoint, layer)."""

    model: Model
    step: int
    layer: int

    @property
    def checkpoint(self) -> str:
        return self.model.checkpoint_at(self.step)

    @property
    def id(self) -> str:
        return f"{self.checkpoint}/layer{self.layer}"

    @property
    def is_last_layer(self) -> bool:
        return self.layer == self.model.layers

    def item(self) -> dict[str, Any]:
        """The item of the metrics stage; with a ``task`` it is one of the tasks stage."""
        return {"checkpoint": self.checkpoint, "layer": self.layer}


def read_campaign(path: Path) -> Campaign:
    """Read a campaign's TOML file; a ConfigError names the file and the key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        raise ConfigError(message) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"{path}: not TOML: {error}"
        raise ConfigError(message) from error
    return parse_campaign(table, str(path))


def read_settings(paths: RunPaths, first: dict[str, Any]) -> Campaign:
    """A campaign's current settings: those of its last update, else ``first``, from run.json.

    Raises RunError if they are damaged.
    """
    data = read_fresh(paths.campaign)
    update = bool(data) or os.path.lexists(paths.campaign)
    try:
        return Campaign.from_json(json.loads(data) if update else first)
    except (AttributeError, ConfigError, RecursionError, ValueError) as error:
        path = paths.campaign if update else paths.manifest
        message = f"{path} is damaged: {error}"
        hint = "restore it from a backup; it cannot be rebuilt"
        if update:
            again = "until 'hpctk campaign run FILE --update'"
            hint = f"move it away: the settings in run.json hold then, {again}"
        raise RunError(message, hint=hint) from error


def parse_campaign(table: dict[str, Any], file: str) -> Campaign:
    """Parse a campaign from its TOML table; ``file`` names it in error messages."""
    campaign = read_table(Campaign, table, file, _CAMPAIGN)
    arms = [arm.id for arm in campaign.arms()]
    if len(set(arms)) < len(arms):
        message = f"{file}: models: two arms have one name"
        raise ConfigError(message, hint="give every model a name and every step once")
    budget = campaign.search.budget
    if budget is not None and budget > len(arms):
        message = f"{file}: search.budget: {budget}, but there are {len(arms)} arms"
        raise ConfigError(message, hint=f"at most {len(arms)}")
    return campaign


_FROM_0 = number_from(0, math.inf, "a whole number from 0", whole=True)

_MODEL: dict[str, Converter] = {
    "name": word,
    "layers": count,
    "size": number_from(1e-9, 1e30, "a positive number"),
    "steps": a_list(_FROM_0, "a list of training steps"),
    "checkpoint": text,
}

_CAMPAIGN: dict[str, Converter] = {
    "name": word,
    "seed": _FROM_0,
    "models": a_list(
        lambda value, where: read_table(Model, value, where, _MODEL),
        "one or more [[models]] tables",
    ),
    "prepare": prepare_table,
    "metrics": metrics_table,
    "tasks": tasks_table,
    "search": search_table,
}


def changed_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Names of the settings in which two campaigns differ, such as ``search.budget``."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            found += changed_keys(before, after, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}")
    return found
