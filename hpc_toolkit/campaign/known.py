"""Results that a campaign starts from: those of earlier runs, and of tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.campaign.arms import TASK, arm_id
from hpc_toolkit.errors import ConfigError, ItemsError
from hpc_toolkit.queue.lists import read_list
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.tables import OWN, Row, check_rows
from hpc_toolkit.run import Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    run = Run.open(path)
    name = stage if stage in run.view.stages else run.manifest.stages[-1].name
    rows = gather(run.view, name, partial=True).rows
    check_rows(rows)
    return rows


def _of_table(path: Path, keys: Sequence[str]) -> Iterator[Row]:
    try:
        table = read_list(path)
    except ItemsError as error:
        raise ConfigError(error.message, hint=error.hint) from error
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        raise ConfigError(message, hint="name a run directory or a table") from error
    for place, cells in enumerate(table, 1):
        for key in keys:
            if key not in cells:
                message = f"{path}: row {place} has no column {key!r}"
                raise ConfigError(message, hint=f"a row needs: {', '.join(keys)}")
        values = {key: one for key, one in cells.items() if key.startswith(_VALUE)}
        own = values or {key: one for key, one in cells.items() if key not in (*keys, *OWN)}
        yield {
            "item": {key: cells[key] for key in keys},
            "state": cells.get("state", "done"),
            "value": {key.removeprefix(_VALUE): one for key, one in own.items() if one != ""},
            "seconds": seconds if isinstance(seconds := cells.get("seconds"), int | float) else 0.0,
        }


def by_arm_and_task(
    rows: Sequence[Row], arms: Sequence[str], tasks: Sequence[str]
) -> dict[str, list[Row]]:
    """The rows of these arms and tasks, by arm; of several rows of one evaluation the first."""
    wanted, found = set(arms), dict[str, dict[str, Any]]()
    for row in rows:
        arm, task = arm_id(row["item"]), row["item"].get(TASK)
        if arm in wanted and task in tasks:
            found.setdefault(arm, {}).setdefault(task, row)
    return {arm: list(some.values()) for arm, some in found.items()}
