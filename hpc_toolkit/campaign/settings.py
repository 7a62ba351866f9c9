"""The settings of a campaign: models and their checkpoints, metrics, tasks, and the search.

They are parsed from TOML and are pure data, so that the coordinator, the command line and the
summary read the same facts.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_toolkit.campaign import tables
from hpc_toolkit.campaign.arms import (
    FROM_0,
    TASK,
    ArmRows,
    CampaignArm,
    Model,
    arms_table,
    models_list,
    with_rows,
)
from hpc_toolkit.errors import ConfigError, RunError, near_path
from hpc_toolkit.rundir.files import read_fresh
from hpc_toolkit.rundir.layout import Manifest, RunPaths, StageSpec, WorkloadSpec
from hpc_toolkit.system.jsonlines import AT_ONCE
from hpc_toolkit.system.tomltable import Key, word

MOST_PENDING = 24
"""Most arms under evaluation at once, unless the campaign says so."""

PREPARE, METRICS, TASKS = "prepare", "metrics", "tasks"
"""The stages of a campaign, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    name: str
    """Name; by default the run is ``runs/<name>``."""
    tasks: tables.Work
    """Scores one arm on one evaluation task."""
    search: tables.Search
    models: tuple[Model, ...] = ()
    """Models whose checkpoints and layers are the arms; empty: ``rows`` has the arms."""
    rows: ArmRows | None = None
    """Arms that the campaign names itself; None: those of ``models``."""
    metrics: tables.Work | None = None
    """Measures every arm."""
    seed: int = 0
    prepare: tables.Work | None = None
    """Work to do first, such as training the checkpoints."""
    path: tuple[str, ...] = field(default=(), compare=False)
    """Directories in which code of the campaign is looked for; not among the settings of a run."""

    @property
    def group_by(self) -> str | None:
        """The key by which the queue groups items."""
        return "checkpoint" if self.rows is None else self.rows.group_by

    @property
    def baseline(self) -> str:
        """What people call the best arm of the baseline; empty if there is none."""
        if self.rows is None:
            return "best last layer"
        return "baseline" if self.rows.baseline else ""

    def arms(self) -> Iterator[CampaignArm]:
        """Every arm, in the order that breaks ties."""
        for source in self.models if self.rows is None else (self.rows,):
            yield from source.arms()

    def stages(self, path: tuple[str, ...]) -> tuple[StageSpec, ...]:
        """The stages of the campaign's run; its code is imported from ``path``."""
        parts: list[tuple[str, tables.Work | None, str | None]] = [
            (PREPARE, self.prepare, None),
            (METRICS, self.metrics, self.group_by),
            (TASKS, self.tasks, self.group_by),
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
            if work is not None and work.workload
        )

    def to_json(self) -> dict[str, Any]:
        """The settings under the keys of the TOML file; None where a key is not given."""
        record: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del record["path"]
        if (rows := record.pop("rows")) is not None:
            record["arms"] = rows
        for name in (METRICS, TASKS):
            if record[name] is not None and (known := record[name].pop("known")):
                record[name]["from"] = known
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Campaign:
        """Read the output of :meth:`to_json`; AttributeError or ConfigError if it is not valid."""
        table = _given(record)
        if "models" in table:
            table["models"] = [_given(model) for model in table["models"]]
        for name in {"arms", PREPARE, METRICS, TASKS, "search"} & table.keys():
            table[name] = _given(table[name])
        return parse_campaign(table, "campaign")

    def with_pending(self, known: tables.Search | None = None) -> Campaign:
        """The campaign with ``asks`` and ``pending``, as in ``known`` if the file leaves them out.

        Without ``known``, asks are in rounds of an eighth of the arms that the budget allows: large
        enough for many workers, and small enough to learn from.
        """
        search, names = self.search, self.tasks.names
        if known is None:
            arms = sum(1 for _ in self.arms())
            within = [
                search.budget or arms,
                (search.evaluations or arms * len(names)) // len(names),
            ]
            known = tables.Search(
                asks=tables.ROUNDS, pending=max(1, min(MOST_PENDING, *(n // 8 for n in within)))
            )
        search = replace(
            search, asks=search.asks or known.asks, pending=search.pending or known.pending
        )
        return replace(self, search=search)


def _given(record: dict[str, Any]) -> dict[str, Any]:
    """Drop what a TOML table would not contain: None, and empty texts, lists and tables."""
    return {key: value for key, value in record.items() if value not in (None, "", [], {})}


def read_campaign(path: Path) -> Campaign:
    """Read a campaign's TOML file; a ConfigError names the file and the key.

    Code and tables that it names are looked for beside it, and then in the current directory.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        hint = near_path(path, "'hpctk new NAME --example campaign' writes one")
        raise ConfigError(message, hint=hint) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for name in (METRICS, TASKS):
        _resolve_sources(table.get(name), path)
    if isinstance(arms := table.get("arms"), dict):
        table["arms"] = with_rows(arms, f"{path}: arms", code_path(path))
    return replace(parse_campaign(table, str(path)), path=code_path(path))


def _resolve_sources(table: object, file: Path) -> None:
    """Make the sources of [metrics] and [tasks] that are beside ``file`` paths from here."""
    if not isinstance(table, dict) or "from" not in table:
        return
    given = table["from"] if isinstance(table["from"], list) else [table["from"]]
    beside = [
        str(file.parent / one) if isinstance(one, str) and (file.parent / one).exists() else one
        for one in given
    ]
    table["from"] = beside


def code_path(file: Path) -> tuple[str, ...]:
    """The directories in which the code that a campaign's file names is looked for."""
    return tuple(dict.fromkeys([str(file.absolute().parent), str(Path.cwd())]))


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
        message = f"{path} is damaged, or of another version of hpctk: {error}"
        hint = "restore it from a backup; it cannot be rebuilt"
        if update:
            again = "until 'hpctk campaign run FILE --update'"
            hint = f"move it away: the settings in run.json hold then, {again}"
        raise RunError(message, hint=hint) from error


def settings_of(paths: RunPaths, manifest: Manifest) -> Campaign:
    """The current settings of a run's campaign; RunError for a plain list of items."""
    if manifest.campaign is None:
        message = f"{paths.root} is not a campaign"
        raise RunError(message, hint="'hpctk campaign run CAMPAIGN.toml' creates one")
    settings = read_settings(paths, manifest.campaign)
    return replace(settings, path=manifest.stages[-1].workload.path)


def parse_campaign(table: dict[str, Any], file: str) -> Campaign:
    """Parse a campaign from its TOML table; ``file`` names it in error messages."""
    if ("models" in table) == ("arms" in table):
        message = f"{file}: {'both' if 'arms' in table else 'neither'} [[models]] and [arms]"
        raise ConfigError(message, hint="docs/how-to/campaign.md shows complete files")
    campaign = tables.read_table(Campaign, table, file, _CAMPAIGN)
    arms = [arm.id for arm in campaign.arms()]
    if len(set(arms)) < len(arms):
        name = next(name for name, times in Counter(arms).items() if times > 1)
        message = f"{file}: two arms are called {name}"
        hint = "give every model a name and every step once"
        if campaign.rows is not None:
            hint = "remove one, or give them a key that tells them apart"
        raise ConfigError(message, hint=hint)
    budget = campaign.search.budget
    if budget is not None and budget > len(arms):
        message = f"{file}: search.budget: {budget}, but there are {len(arms)} arms"
        raise ConfigError(message, hint=f"at most {len(arms)}")
    return campaign


_CAMPAIGN: dict[str, tables.Converter | Key] = {
    "name": word,
    "seed": FROM_0,
    "models": models_list,
    "arms": ("rows", arms_table),
    "prepare": tables.prepare_table,
    "metrics": tables.metrics_table,
    "tasks": tables.tasks_table,
    "search": tables.search_table,
}


def checked_stages(campaign: Campaign, path: tuple[str, ...]) -> tuple[StageSpec, ...]:
    """The stages, with how their functions are called; imports their code from ``path``.

    Raises ConfigError, WorkloadError: a stage cannot work.
    """
    from hpc_toolkit.worker.loading import check_stage
    from hpc_toolkit.worker.stages import fit

    arms = [arm.item() for arm in islice(campaign.arms(), AT_ONCE)]
    names = campaign.tasks.names
    items: dict[str, Sequence[dict[str, Any]]] = {
        PREPARE: campaign.prepare.items if campaign.prepare else (),
        METRICS: arms,
        TASKS: [{**arm, TASK: names[0]} for arm in arms],
    }
    stages = []
    for stage in campaign.stages(path):
        check_stage(stage)
        # A function that needs no task is called without the one that a campaign has by default.
        plain = names == (tables.ONE_TASK,) and stage.name == TASKS
        made = fit(stage, items[stage.name], dropped=TASK if plain else "")
        stages.append(made[0])
        deque(made[1], 0)
    return tuple(stages)


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
