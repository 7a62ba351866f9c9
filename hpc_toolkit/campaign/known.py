"""Results that a campaign starts from: those of earlier runs, and of tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_toolkit.bandit import Observation
from hpc_toolkit.campaign.arms import TASK
from hpc_toolkit.campaign.decisions import read_decisions
from hpc_toolkit.campaign.settings import METRICS, TASKS, read_settings
from hpc_toolkit.errors import ConfigError, ItemsError
from hpc_toolkit.queue.listfiles import read_list
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.tables import INHERITED, OWN, Row, check_rows
from hpc_toolkit.rundir.layout import Manifest, RunPaths, read_manifest

_VALUE = "value."
"""Prefix of the columns of a result in a table of 'hpctk gather'."""


def known_rows(sources: Sequence[str], stage: str, keys: Sequence[str]) -> list[Row]:
    """The finished rows of runs and tables; an item consists of ``keys``.

    ``stage`` is read from a run that has it, and otherwise the run's last stage. Raises ConfigError
    for a table that cannot be read or lacks one of ``keys``, and RunError for a damaged run.
    """
    rows: list[Row] = []
    for source in sources:
        path = Path(source)
        found = _of_run(path, stage) if path.is_dir() else list(_of_table(path, keys))
        rows += [row for row in found if row["state"] == "done"]
    return rows


def _of_run(path: Path, stage: str) -> list[Row]:
    manifest = read_manifest(path)
    view = RunView(RunPaths(path), manifest)
    name = stage
    if stage not in view.stages:
        name = manifest.stages[-1].name
        if stage == METRICS and manifest.campaign is not None:
            message = f"{path} has no stage {METRICS!r}"
            raise ConfigError(message, hint="name the run that measured, or a table")
    rows = gather(view, name, partial=True).rows
    check_rows(rows)
    return [*inherited_rows(view, manifest), *rows] if stage == TASKS else rows


def inherited_rows(view: RunView, manifest: Manifest) -> list[Row]:
    """The evaluations that a campaign started from, as recorded with its first decision.

    Their source is that of the settings, and their values are score and standard error only.
    """
    if manifest.campaign is None:
        return []
    decisions = read_decisions(view.stages[TASKS].log.segments.values())
    if not decisions or not decisions[0].known:
        return []
    campaign = read_settings(view.paths, manifest.campaign)
    keys = {arm.id: arm.keys for arm in campaign.arms()}
    source = "; ".join(campaign.tasks.known)
    known = decisions[0].known
    return [row for one in known for _, row in rows_of(one, keys[one.arm], source)]


def with_inherited(view: RunView, manifest: Manifest, rows: list[Row]) -> list[Row]:
    """Rows of the tasks stage after the inherited ones; the same rows if there are none."""
    inherited = inherited_rows(view, manifest)
    return [*inherited, *({**row, INHERITED: None} for row in rows)] if inherited else rows


def rows_of(
    known: Observation, keys: Mapping[str, Any], source: str = ""
) -> Iterator[tuple[str, Row]]:
    """Task and row of each evaluation that was known before a campaign."""
    for task, score in known.scores.items():
        stderr = known.stderrs.get(task)
        row: Row = {
            "item": {**keys, TASK: task},
            "state": "done",
            "value": {"score": score} if stderr is None else {"score": score, "stderr": stderr},
            "error": None,
            "attempts": 0,
            "seconds": known.seconds.get(task, 0.0),
            "worker": "",
            INHERITED: source,
        }
        yield task, row


def _of_table(path: Path, keys: Sequence[str]) -> Iterator[Row]:
    try:
        table = read_list(path)
    except ItemsError as error:
        raise ConfigError(error.message, hint=error.hint) from error
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        raise ConfigError(message, hint="name a run directory or a table") from error
    for cells in table:
        if isinstance(cells.get("item"), dict) and "value" in cells:  # .json and .jsonl of gather
            yield cells
            continue
        values = {key: one for key, one in cells.items() if key.startswith(_VALUE)}
        own = values or {key: one for key, one in cells.items() if key not in (*keys, *OWN)}
        yield {
            # Empty cells are keys of other arms.
            "item": {key: cells[key] for key in keys if cells.get(key, "") != ""},
            "state": _own(cells, "state", "done"),
            # A number alone is the score, and its column is called value.
            "value": own["value"]
            if "value" in own and "score" not in own
            else {key.removeprefix(_VALUE): one for key, one in own.items() if one != ""},
            "seconds": seconds
            if isinstance(seconds := _own(cells, "seconds", 0.0), int | float)
            else 0.0,
        }


def _own(cells: Mapping[str, Any], name: str, missing: Any) -> Any:
    """A column that describes a row; it has a prefix if items have a key of its name."""
    return cells.get(f"hpctk.{name}", cells.get(name, missing))
