"""The scores of a campaign as a table on which searches are replayed."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_toolkit.bandit import Arm, ArmTable, TaskSet
from hpc_toolkit.bandit.bench.replay import ScoreTable
from hpc_toolkit.bandit.features import columns_of
from hpc_toolkit.campaign.arms import TASK, arm_id
from hpc_toolkit.campaign.decisions import read_decisions
from hpc_toolkit.campaign.known import by_arm_and_task, known_rows
from hpc_toolkit.campaign.search import make_arms, observe, score_of
from hpc_toolkit.campaign.settings import TASKS, settings_of
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.listfiles import read_list
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.tables import INHERITED, OWN
from hpc_toolkit.rundir.layout import RunPaths, read_manifest
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpc_toolkit.results.tables import Row

_STEP = re.compile(r"^(.*?)[^0-9A-Za-z]*step([0-9]{1,15})$")


def scores_of_run(path: Path) -> ScoreTable:
    """The scores of a campaign's run, with its own features. Raises ConfigError, RunError."""
    manifest = read_manifest(path)
    view = RunView(RunPaths(path), manifest)
    campaign = settings_of(view.paths, manifest)
    rows = known_rows([str(path)], TASKS, ())
    decisions = read_decisions(view.stages[TASKS].log.segments.values())
    arms = make_arms(campaign, decisions[0].metrics if decisions else None)
    return _table(path, arms, campaign.tasks.names, rows)


def scores_of_table(path: Path) -> ScoreTable:
    """The scores of a table of 'hpctk gather'; features are taken from the keys of the arms."""
    columns = list(read_list(path)[0])
    not_keys = {*OWN, INHERITED}
    own = [k for k in columns if k not in not_keys and not k.startswith(("value.", "hpctk."))]
    rows = known_rows([str(path)], TASKS, own)
    keys = [{key: one for key, one in row["item"].items() if key != TASK} for row in rows]
    distinct = {arm_id(one): one for one in keys}
    found = [
        numbers
        for column in columns_of([_described(one) for one in distinct.values()], {})
        for numbers in column.numbers
    ]
    values = list(zip(*(column.values for column in found), strict=True)) or [()] * len(distinct)
    arms = ArmTable(
        tuple(
            Arm(id=name, group=name, features=numbers, keys=one)
            for (name, one), numbers in zip(distinct.items(), values, strict=True)
        ),
        tuple(column.name for column in found),
    )
    tasks = tuple(dict.fromkeys(str(row["item"].get(TASK)) for row in rows))
    return _table(path, arms, tasks, rows)


def _described(keys: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's model and the logarithm of its step in place of its name."""
    match = _STEP.match(str(keys.get("checkpoint", "")))
    if match is None:
        return keys
    rest = {key: one for key, one in keys.items() if key != "checkpoint"}
    return {"model": match[1], "log1p_step": math.log1p(int(match[2])), **rest}


def _table(path: Path, arms: ArmTable, tasks: Sequence[str], rows: Sequence[Row]) -> ScoreTable:
    """The arms that have a score on every task."""
    scored = [row for row in rows if score_of(row) is not None]
    found = by_arm_and_task(scored, arms.ids, tasks)
    kept = [arm for arm in arms.arms if len(found.get(arm.id, ())) == len(tasks)]
    if len(kept) < 2:
        message = f"{path}: {len(kept)} of {len(arms.arms)} arms have a score on every task"
        raise ConfigError(message, hint="set exhaustive = true in [search], and run it to its end")
    if len(kept) < len(arms.arms):
        left_out = f"{path}: {len(arms.arms) - len(kept)} of {len(arms.arms)} arms are left out"
        note(f"{left_out}: they lack the score of a task", "warning")
    told = [observe(arm.id, found[arm.id]) for arm in kept]

    def matrix(of: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([[getattr(one, of).get(task, np.nan) for task in tasks] for one in told])

    stderrs = matrix("stderrs")
    return ScoreTable(
        arms=ArmTable(tuple(kept), arms.feature_names),
        tasks=TaskSet(tuple(tasks)),
        scores=matrix("scores"),
        seconds=matrix("seconds"),
        stderrs=None if np.isnan(stderrs).any() else stderrs,
    )
