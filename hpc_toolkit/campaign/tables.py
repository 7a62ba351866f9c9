"""The TOML tables of a campaign: the stages' workloads, and [search]."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.system.tomltable import (
    Key,
    convert,
    count,
    duration_h,
    duration_s,
    flag,
    text,
    word,
    wrong,
)

if TYPE_CHECKING:
    from collections.abc import Callable


ROUNDS, WINDOW = "rounds", "window"
"""Values of the key ``asks``: how asks follow each other."""

BUDGETS = ("budget", "evaluations", "gpu_hours", "wall_hours", "win_probability")
"""The keys that end a search; they change no ask."""

NO_OPTIONS = ("name", "arms", "seed", "tasks", "scalariser", "stop")
"""Arguments of every policy; other keys of the file set them, so options of a policy cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The workload of one stage."""

    workload: str
    """``module:name``."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a class workload."""
    items: tuple[dict[str, Any], ...] = ()
    """Items of the prepare stage."""
    names: tuple[str, ...] = ()
    """Evaluation tasks of the tasks stage."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Kind of each task, for a mean over kinds; empty: not given."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Expected duration of each task in seconds; empty: not given."""
    max_attempts: int = 3
    """Failed attempts after which an item is failed."""
    timeout_s: float | None = None
    """Seconds that one item may take."""


def _names(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, list) and value and len(set(map(str, value))) == len(value):
        return tuple(word(name, where) for name in value)
    raise wrong(where, value, "a list of different names")


def _items(value: object, where: str) -> tuple[dict[str, Any], ...]:
    if isinstance(value, list) and value:
        return tuple(a_table(item, where) for item in value)
    raise wrong(where, value, "a list of tables")


def work_table(required: str = "") -> Callable[[Any, str], Work]:
    """A converter for a stage's table; ``required`` is ``items``, ``names`` or ""."""
    extra: dict[str, dict[str, Key]] = {
        "": {},
        "items": {"items": ("items", _items)},
        "names": {
            "names": ("names", _names),
            "kinds": ("kinds", _by_task(word)),
            "seconds": ("seconds", _by_task(duration_s)),
        },
    }

    def convert_work(value: object, where: str) -> Work:
        keys: dict[str, Key] = {
            "workload": ("workload", text),
            "options": ("options", a_table),
            "max_attempts": ("max_attempts", count),
            "timeout_s": ("timeout_s", duration_s),
            **extra[required],
        }
        fields = convert(a_table(value, where), keys, where)
        require(fields, ("workload", *([required] if required else [])), where)
        for key in ("kinds", "seconds"):
            if key in fields:
                _complete(fields[key], fields["names"], f"{where}: {key}")
        return Work(**fields)

    return convert_work


def _by_task(convert_one: Callable[[Any, str], Any]) -> Callable[[Any, str], dict[str, Any]]:
    def convert_all(value: object, where: str) -> dict[str, Any]:
        by_task = a_table(value, where)
        return {task: convert_one(one, f"{where}.{task}") for task, one in by_task.items()}

    return convert_all


def _complete(given: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    """Refuse a table that lacks one of the tasks or has an unknown one."""
    for task in given:
        if task not in names:
            message = f"{where}: unknown task {task!r}"
            raise ConfigError(message, hint=near_miss(task, list(names)))
    for task in names:
        if task not in given:
            message = f"{where}: the task {task!r} is missing"
            raise ConfigError(message, hint="give one for every task of names, or leave it out")


def require(fields: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    """Refuse ``fields`` that lack one of ``names``."""
    for name in names:
        if name not in fields:
            message = f"{where}: the key {name!r} is missing"
            raise ConfigError(message, hint="docs/how-to/campaign.md shows a whole file")


def a_table(value: object, where: str) -> dict[str, Any]:
    """A table with any keys."""
    if isinstance(value, dict):
        return value
    raise wrong(where, value, "a table")


def positive(value: object, where: str) -> float:
    """A positive number, 1e-9 to 1e30."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 1e-9 <= value <= 1e30:
        return value
    raise wrong(where, value, "a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How the bandit searches."""

    policy: str = "gp-ucb"
    """Name of the policy."""
    budget: int | None = None
    """Arms to evaluate. None, here and in the keys below: no such limit."""
    evaluations: int | None = None
    """Evaluations of an arm on a task."""
    gpu_hours: float | None = None
    """Sum of the durations of evaluations, in hours of one worker."""
    wall_hours: float | None = None
    """Hours during which a coordinator was searching."""
    win_probability: float | None = None
    """The search ends when no open arm beats the best with a higher probability than this."""
    pending: int = 1
    """Arms under evaluation at once."""
    asks: str | None = None
    """``rounds``: the policy is asked for ``pending`` arms, and for the next ones when all of these
    are told. ``window``: it is asked for one arm when the oldest of ``pending`` is told, whether or
    not others are back. Either way the sequence of arms does not depend on the speed of workers.
    None: as in the existing run, or rounds in a new one."""
    exhaustive: bool = False
    """Afterwards evaluate everything that is left, to know how close the search came."""
    scalariser: str = "mean"
    """How the scores of several tasks become one reward."""
    metrics: tuple[str, ...] = ()
    """Columns of the metrics table that become features of the arms."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the policy."""

    @property
    def in_rounds(self) -> bool:
        return self.asks != WINDOW


def without_retired(record: dict[str, Any]) -> dict[str, Any]:
    """Drop a key of an older version from a recorded search that did not use it."""
    return {key: one for key, one in record.items() if key != "group_pulls" or one}


def search_table(value: object, where: str, *, ends: bool = True) -> Search:
    """Convert the TOML table; with ``ends`` false it need not say when the search ends.

    Raises:
        ConfigError: names the key.
    """
    fields = convert(
        a_table(value, where),
        {
            "policy": ("policy", word),
            "budget": ("budget", count),
            "evaluations": ("evaluations", _evaluations),
            "gpu_hours": ("gpu_hours", duration_h),
            "wall_hours": ("wall_hours", duration_h),
            "win_probability": ("win_probability", _probability),
            "pending": ("pending", count),
            "asks": ("asks", _asks),
            "exhaustive": ("exhaustive", flag),
            "scalariser": ("scalariser", word),
            "metrics": ("metrics", _metrics),
            "options": ("options", _options),
        },
        where,
    )
    search = Search(**fields)
    endless = all(getattr(search, name) is None for name in BUDGETS)
    if ends and endless and not _ends_by_itself(search):
        message = f"{where}: nothing says when the search ends"
        raise ConfigError(message, hint=f"give one of: {', '.join(BUDGETS)}")
    return search


def _ends_by_itself(search: Search) -> bool:
    # This imports numpy, and most campaigns have a budget and do not need it.
    from hpc_toolkit.bandit.registry import TASK_RULES

    return search.policy in TASK_RULES


def _evaluations(value: object, where: str) -> int:
    if type(value) is int and 1 <= value <= 2**31:
        return value
    raise wrong(where, value, "a whole number from 1")


def _probability(value: object, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return value
    raise wrong(where, value, "a probability, 0 to 1")


def _asks(value: object, where: str) -> str:
    if isinstance(value, str) and value in (ROUNDS, WINDOW):
        return value
    message = f"{where}: {str(value)[:200]!r}"
    raise ConfigError(message, hint=near_miss(str(value), [ROUNDS, WINDOW]))


def _options(value: object, where: str) -> dict[str, Any]:
    table = a_table(value, where)
    for name in table:
        if name in NO_OPTIONS:
            message = f"{where}.{name}: not an option of a policy"
            raise ConfigError(message, hint="docs/how-to/campaign.md says which key it is, if any")
    return table


def _metrics(value: object, where: str) -> tuple[str, ...]:
    return _names(value, where) if value != [] else ()
