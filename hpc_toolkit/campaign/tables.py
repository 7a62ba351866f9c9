"""The TOML tables of a campaign: the stages' workloads, and [search]."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypeVar

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.system import tomltable as t

Converter = Callable[[Any, str], Any]
"""Takes a value and its place in the file; raises ConfigError."""

Made = TypeVar("Made")

ROUNDS, WINDOW = "rounds", "window"
"""Values of the key ``asks``: how asks follow each other."""

BUDGETS = ("budget", "evaluations", "gpu_hours")
"""The keys that end a search; they change no ask."""

ONE_TASK = "score"
"""The task of a campaign that names none."""

MTEB = "hpc_toolkit.science.workloads.mteb_tasks:MtebTasks"
"""The workload of a campaign that names tasks but no workload."""

NO_OPTIONS = ("policy", "arms", "seed", "tasks", "stop")
"""Arguments of every policy; other keys of the file set them, so options of a policy cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The workload of one stage."""

    workload: str = ""
    """``module:name`` of a function or class."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a class workload."""
    items: tuple[dict[str, Any], ...] = ()
    names: tuple[str, ...] = ()
    """Evaluation tasks. Without a ``workload`` they are tasks of mteb, or ``module:Class``."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Expected duration of an evaluation, for each task."""
    known: tuple[str, ...] = ()
    """Runs with results, which are not computed again: one path or several."""
    max_attempts: int = 3
    """Failed attempts after which an item is failed."""
    timeout_s: float | None = None


def read_table(
    kind: Callable[..., Made],
    value: object,
    where: str,
    keys: Mapping[str, Converter | t.Key],
    required: tuple[str, ...] = (),
) -> Made:
    """Convert a TOML table into a dataclass; a converter alone sets the field of the same name.

    Fields without a default are required, and so are those in ``required``.
    """
    fields = {key: one if isinstance(one, tuple) else (key, one) for key, one in keys.items()}
    given = t.convert(a_table(value, where), fields, where)
    for name, parameter in signature(kind).parameters.items():
        if name not in given and (parameter.default is Parameter.empty or name in required):
            message = f"{where}: the key {name!r} is missing"
            raise ConfigError(message, hint="docs/how-to/campaign.md shows a complete file")
    return kind(**given)


a_table = t.kept(lambda value: isinstance(value, dict), "a table")


def a_list(convert_one: Converter, wanted: str) -> Converter:
    """A converter for a list that is not empty, which ``wanted`` describes to users."""

    def convert_all(value: Any, where: str) -> Any:
        if isinstance(value, list) and value:
            return tuple(convert_one(one, f"{where}[{place}]") for place, one in enumerate(value))
        raise t.wrong(where, value, wanted)

    return convert_all


def _names(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, list) and value and len(set(map(str, value))) == len(value):
        return tuple(_name(name, where) for name in value)
    raise t.wrong(where, value, "a list of different names")


def _name(value: object, where: str) -> str:
    if name := t.text(value, where).strip():
        return name
    raise t.wrong(where, value, "a name")


def _by_task(convert_one: Converter) -> Converter:
    def convert_all(value: object, where: str) -> dict[str, Any]:
        by_task = a_table(value, where)
        return {task: convert_one(one, f"{where}.{task}") for task, one in by_task.items()}

    return convert_all


_WORK: dict[str, Converter] = {
    "workload": t.text,
    "options": a_table,
    "max_attempts": t.count,
    "timeout_s": t.duration_s,
}


def _sources(value: object, where: str) -> tuple[str, ...]:
    names = value if isinstance(value, list) and value else [value]
    return tuple(str(Path(t.text(name, where)).absolute()) for name in names)


_PREPARE: dict[str, Converter] = {**_WORK, "items": a_list(a_table, "a list of tables")}
_METRICS: dict[str, Converter | t.Key] = {**_WORK, "from": ("known", _sources)}
_TASKS: dict[str, Converter | t.Key] = {
    **_METRICS,
    "names": _names,
    "seconds": _by_task(t.duration_s),
}


def metrics_table(value: object, where: str) -> Work:
    work = read_table(Work, value, where, _METRICS)
    if bool(work.workload) == bool(work.known):
        message = f"{where}: {'both' if work.known else 'neither'} 'workload' and 'from'"
        hint = "give the workload that measures, or a run with the metrics"
        raise ConfigError(message, hint=hint)
    return work


def prepare_table(value: object, where: str) -> Work:
    return read_table(Work, value, where, _PREPARE, ("workload", "items"))


def tasks_table(value: object, where: str) -> Work:
    work = read_table(Work, value, where, _TASKS)
    if not work.workload and not work.names:
        message = f"{where}: neither 'workload' nor 'names'"
        raise ConfigError(message, hint="docs/how-to/campaign.md shows a complete file")
    work = replace(work, names=work.names or (ONE_TASK,)) if work.workload else _of_mteb(work)
    if work.seconds:
        _complete(work.seconds, work.names, f"{where}: seconds")
    return work


def _of_mteb(work: Work) -> Work:
    """Tasks without a workload are those of mteb; ``module:Class`` is a class of the user's."""
    own = sorted({name.partition(":")[0] for name in work.names if ":" in name})
    options = {"own_tasks": own, **work.options} if own else work.options
    return replace(work, workload=MTEB, options=options)


def _complete(given: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    """Refuse a table that lacks one of the tasks or has an unknown one."""
    for task in given:
        if task not in names:
            raise ConfigError(f"{where}: unknown task {task!r}", hint=near_miss(task, list(names)))
    for task in names:
        if task not in given:
            message = f"{where}: the task {task!r} is missing"
            raise ConfigError(message, hint="give one for every task of names, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How the bandit searches."""

    policy: str = "gp-ucb"
    """Name of the policy, or ``module:Class`` of the user's own."""
    budget: int | None = None
    """Limit: arms to evaluate."""
    evaluations: int | None = None
    """Limit: evaluations of an arm on a task."""
    gpu_hours: float | None = None
    """Limit: sum of the durations of evaluations."""
    pending: int | None = None
    """Arms under evaluation at once. By default as in the existing run, or, in a new one, an eighth
    of the arms that the budget allows, at most 24."""
    asks: str | None = None
    """``rounds``: ``pending`` arms are requested, and the next ones when all of these have results.
    ``window``: one arm is requested when the oldest of ``pending`` has its results, whether or not
    others have theirs. Either way the sequence of arms does not depend on the speed of workers. By
    default as in the existing run, or rounds in a new one."""
    exhaustive: bool = False
    """Afterwards evaluate all other arms, to measure how close the search came."""
    metrics: tuple[str, ...] = ()
    """Columns of the metrics table that become features of the arms."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether the policy is a user's class."""
        return ":" in self.policy

    @property
    def most_pending(self) -> int:
        return self.pending or 1

    @property
    def in_rounds(self) -> bool:
        return self.asks != WINDOW


def search_table(value: object, where: str, *, ends: bool = True) -> Search:
    """Convert the TOML table; with ``ends`` false it need not say when the search ends."""
    search = read_table(Search, value, where, _SEARCH)
    if ends and all(getattr(search, name) is None for name in BUDGETS):
        # This imports numpy, and most campaigns have a budget and do not need it.
        from hpc_toolkit.bandit.asktell import TASK_RULES

        if search.policy not in TASK_RULES and not search.is_own:
            message = f"{where}: no budget is set"
            raise ConfigError(message, hint=f"give one of: {', '.join(BUDGETS)}")
    return search


def _policy(value: object, where: str) -> str:
    return t.text(value, where) if isinstance(value, str) and ":" in value else t.word(value, where)


def _asks(value: object, where: str) -> str:
    if isinstance(value, str) and value in (ROUNDS, WINDOW):
        return value
    message = f"{where}: {str(value)[:200]!r}"
    raise ConfigError(message, hint=near_miss(str(value), [ROUNDS, WINDOW]))


def _options(value: object, where: str) -> dict[str, Any]:
    table: dict[str, Any] = a_table(value, where)
    for name in table:
        if name in NO_OPTIONS:
            message = f"{where}.{name}: not an option of a policy"
            raise ConfigError(message, hint="docs/reference/campaign-file.md lists the keys")
    try:
        json.dumps(table, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"{where}: {error}"
        raise ConfigError(message, hint="use numbers, texts, true, false, lists") from error
    return table


_SEARCH: dict[str, Converter] = {
    "policy": _policy,
    "budget": t.count,
    "evaluations": t.number_from(1, 2**31, "a whole number from 1", whole=True),
    "gpu_hours": t.duration_h,
    "pending": t.count,
    "asks": _asks,
    "exhaustive": t.flag,
    "metrics": lambda value, where: _names(value, where) if value != [] else (),
    "options": _options,
}
