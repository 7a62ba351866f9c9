"""Asks and tells in the log of the tasks stage (rule R14), and earlier results to start from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_toolkit.bandit import Observation, Pull
from hpc_toolkit.campaign.arms import TASK
from hpc_toolkit.campaign.settings import METRICS
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.log import damaged
from hpc_toolkit.queue.units import Segment
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.tables import Row, check_rows
from hpc_toolkit.rundir.layout import RunPaths, read_manifest

SEARCH, EXHAUSTIVE = "search", "exhaustive"
"""Why arms were requested: the policy chose them, or they were all that was left."""

MetricColumns = dict[str, list[float | None]]
"""Metrics used as features: one value for each arm, in the arms' order; None if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One ask, with the tells since the ask before; it is in the header of its segment."""

    why: str
    """:data:`SEARCH` or :data:`EXHAUSTIVE`."""
    number: int
    """From 1."""
    pulls: tuple[Pull, ...]
    """The pulls that were requested; a pull without tasks is of all tasks."""
    tells: tuple[Observation, ...] = ()
    """Results that were told since the decision before, in the order of their asks."""
    metrics: MetricColumns | None = None
    """In the first decision of a search that uses metrics: their values at that time. A later table
    may have more values, and would lead to other asks."""
    search: dict[str, Any] | None = None
    """In the first decision: the keys of [search] that asks depend on. They hold from then on,
    whatever the settings say."""
    known: tuple[Observation, ...] = ()
    """In the first decision: results from before the campaign, read from runs that may change."""

    def to_json(self) -> dict[str, Any]:
        """Plain values. ``tasks`` is left out if every pull is of all tasks."""
        some = any(pull.tasks for pull in self.pulls)
        record = {
            "why": self.why,
            "number": self.number,
            "arms": [pull.arm for pull in self.pulls],
            "tells": [observation.to_json() for observation in self.tells],
            "tasks": [list(pull.tasks) for pull in self.pulls] if some else None,
            "metrics": self.metrics,
            "search": self.search,
            "known": [observation.to_json() for observation in self.known] or None,
        }
        return {key: value for key, value in record.items() if value is not None}


def read_decisions(segments: Iterable[Segment]) -> list[Decision]:
    return [read_decision(segment) for segment in segments if segment.decision is not None]


def read_decision(segment: Segment) -> Decision:
    """Read the decision of a segment that has one. Raises RunError that names a damaged file."""
    assert segment.decision is not None
    record = {**_LEFT_OUT, **segment.decision}
    for key, is_good in _FORMS.items():
        if key not in record or not is_good(record[key]):
            problem = f"{key!r} of its decision is {str(record.get(key))[:50]}"
            raise damaged(segment.path, f"line 1: {problem}")
    try:
        tells = tuple(map(Observation.from_json, record["tells"]))
        known = tuple(map(Observation.from_json, record["known"]))
    except (ConfigError, TypeError) as error:
        raise damaged(segment.path, f"line 1: a tell of its decision: {error}") from error
    arms, tasks = record["arms"], record["tasks"]
    if tasks is None:
        tasks = [[]] * len(arms)
    if len(tasks) != len(arms):
        raise damaged(segment.path, f"line 1: tasks of {len(tasks)} pulls for {len(arms)} arms")
    return Decision(
        why=record["why"],
        number=record["number"],
        pulls=tuple(Pull(arm, tuple(some)) for arm, some in zip(arms, tasks, strict=True)),
        tells=tells,
        metrics=record["metrics"],
        search=record["search"],
        known=known,
    )


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _is_column(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(one, int | float | None) for one in values)


_LEFT_OUT: dict[str, Any] = {"tasks": None, "metrics": None, "search": None, "known": []}
"""What a decision means that lacks a key; without ``tasks`` every pull is of all tasks."""

_FORMS: dict[str, Callable[[Any], bool]] = {
    "why": lambda why: isinstance(why, str),
    "number": lambda number: isinstance(number, int),
    "arms": _are_texts,
    "tells": lambda tells: isinstance(tells, list),
    "known": lambda known: isinstance(known, list),
    "tasks": lambda tasks: (
        tasks is None or (isinstance(tasks, list) and all(map(_are_texts, tasks)))
    ),
    "metrics": lambda metrics: (
        metrics is None or (isinstance(metrics, dict) and all(map(_is_column, metrics.values())))
    ),
    "search": lambda search: isinstance(search, dict | None),
}
"""What a decision must be, key by key, apart from its tells."""


@dataclass(slots=True)
class Decisions:
    """The asks and tells so far, in order."""

    asked: list[Pull] = field(default_factory=list)
    """The pulls that the policy requested."""
    numbers: dict[Pull, int] = field(default_factory=dict)
    """The decision, from 1, that requested each of ``asked``."""
    told: list[Observation] = field(default_factory=list)
    """The results of the first of ``asked``, in their order."""
    entries: int = 0
    """Decisions read or made."""
    exhausted: bool = False
    """Whether everything that was left was requested as well."""

    @property
    def waiting(self) -> list[Pull]:
        return self.asked[len(self.told) :]

    def take(self, decision: Decision) -> None:
        """Record the asks of the next decision; its tells are added to ``told`` one by one."""
        self.entries += 1
        if decision.why == EXHAUSTIVE:
            self.exhausted = True
            return
        self.asked += decision.pulls
        self.numbers |= dict.fromkeys(decision.pulls, self.entries)


def left_over(asked: Iterable[Pull], arms: Sequence[str], tasks: Sequence[str]) -> list[Pull]:
    """The pulls that were not requested; arms that lack the most tasks first, then in arm order."""
    taken = {(pull.arm, task) for pull in asked for task in pull.tasks or tasks}
    left = []
    for arm in arms:
        missing = tuple(task for task in tasks if (arm, task) not in taken)
        if missing:
            left.append(Pull(arm, () if len(missing) == len(tasks) else missing))
    # The first arm sets the order in which tasks begin, so it should have all that are left.
    return sorted(left, key=lambda pull: -len(pull.tasks or tasks))


def known_rows(sources: Sequence[str], stage: str) -> list[Row]:
    """The finished rows of runs, from their ``stage`` or, in a run without it, their last stage.

    Raises ConfigError for a source that is not a run, and RunError for a damaged run.
    """
    rows = [row for source in sources for row in _of_run(Path(source), stage)]
    return [row for row in rows if row["state"] == "done"]


def _of_run(path: Path, stage: str) -> list[Row]:
    if not path.is_dir():
        message = f"{stage}: from: {path} is not a run directory"
        raise ConfigError(message, hint="name a run, not a table")
    manifest = read_manifest(path)
    view = RunView(RunPaths(path), manifest)
    name = stage
    if stage not in view.stages:
        name = manifest.stages[-1].name
        if stage == METRICS and manifest.campaign is not None:
            message = f"{stage}: from: {path} has no stage {METRICS!r}"
            raise ConfigError(message, hint="name the run that measured")
    rows = gather(view, name, partial=True).rows
    check_rows(rows)
    return rows


def rows_of(known: Observation, keys: Mapping[str, Any]) -> Iterator[tuple[str, Row]]:
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
        }
        yield task, row
