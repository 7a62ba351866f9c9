"""The TOML tables of a campaign's stages: workload, items or tasks, and number of attempts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.system.tomltable import Key, convert, count, duration_s, text, word, wrong

if TYPE_CHECKING:
    from collections.abc import Callable


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
