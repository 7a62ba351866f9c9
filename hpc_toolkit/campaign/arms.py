"""The arms of a campaign: names, keys and baseline, and [arms]: a file, a grid or a function."""

from __future__ import annotations

import ast
import json
import operator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit.arms import KINDS, columns_of
from hpc_toolkit.campaign.tables import a_list, a_table, read_table
from hpc_toolkit.errors import ConfigError, ItemsError, describe, near_miss
from hpc_toolkit.queue.listfiles import read_list
from hpc_toolkit.queue.lists import combinations, parse_values
from hpc_toolkit.system.tomltable import text, wrong

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hpc_toolkit.bandit.arms import Column, Kind
    from hpc_toolkit.campaign.tables import Converter
    from hpc_toolkit.queue.items import Item

TASK = "task"
"""The key that an item of the tasks stage has besides those of its arm."""

MOST_ARMS = 200_000
"""More arms than this are taken for a mistake; run.json contains those of [arms]."""

_SOURCES = ("file", "grid", "generate", "rows")


def arm_id(keys: Mapping[str, Any]) -> str:
    """The name of an arm, from its keys or from one of its items of the tasks stage.

    ``s/step16/layer3`` for a checkpoint and a layer, and otherwise ``depth=2,lr=0.1``.
    """
    own = {key: value for key, value in keys.items() if key != TASK}
    if own.keys() == {"checkpoint", "layer"}:
        return f"{own['checkpoint']}/layer{own['layer']}"
    return ",".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value, sort_keys=True)}"
        for key, value in sorted(own.items())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignArm:
    """One arm: what a workload is given, and what a policy sees."""

    id: str
    keys: dict[str, Any]
    """Keys and values of its items."""
    group: str
    """Items of one group run on one worker where possible."""
    baseline: bool
    """Whether it is one of the arms that the search has to beat."""

    def item(self) -> Item:
        """The item of the metrics stage; with a ``task`` it is one of the tasks stage."""
        return dict(self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRows:
    """Arms that a campaign names itself: a row of keys and values for each."""

    rows: tuple[dict[str, Any], ...]
    features: dict[str, Kind] = field(default_factory=dict)
    """How the values of a key become features, where the campaign says so."""
    baseline: dict[str, Any] = field(default_factory=dict)
    """Keys and values of the arms that the search has to beat; empty: none."""
    group_by: str | None = None
    """The key whose equal values should run on one worker."""

    def arms(self) -> Iterator[CampaignArm]:
        for row in self.rows:
            yield CampaignArm(
                id=arm_id(row),
                keys=row,
                group="" if self.group_by is None else str(row.get(self.group_by)),
                baseline=self.is_baseline(row),
            )

    def columns(self) -> list[Column]:
        """The features from each key. Raises ConfigError."""
        return columns_of(self.rows, self.features)

    def is_baseline(self, row: Mapping[str, Any]) -> bool:
        given = self.baseline.items()
        return bool(given) and all(key in row and row[key] == value for key, value in given)


def with_rows(table: dict[str, Any], where: str, path: Sequence[str]) -> dict[str, Any]:
    """Replace ``file``, ``grid`` or ``generate``, and ``where``, by the rows that they name.

    Files and code are looked for in the directories ``path``. Raises ConfigError, ItemsError, and
    WorkloadError for code that cannot be imported.
    """
    given = [key for key in _SOURCES if key in table]
    if len(given) != 1:
        message = f"{where}: {' and '.join(given) or 'nothing'} names the arms"
        raise ConfigError(message, hint=f"give one of {', '.join(_SOURCES)}")
    source = given[0]
    read: dict[str, Callable[[Any, str], Iterable[Any]]] = {
        "file": lambda value, here: _from_file(text(value, here), here, path),
        "grid": _from_grid,
        "generate": lambda value, here: _generated(text(value, here), here, path),
        "rows": a_list(a_table, "a list of tables"),
    }
    rows = list(read[source](table[source], f"{where}: {source}"))
    if "where" in table:
        rows = _filtered(rows, text(table["where"], f"{where}: where"), f"{where}: where")
    kept = {key: one for key, one in table.items() if key not in (*_SOURCES, "where")}
    return {**kept, "rows": rows}


def arms_table(value: object, where: str) -> ArmRows:
    """Convert [arms] once it has rows. Raises ConfigError."""
    found = read_table(ArmRows, value, where, _ARMS, ("rows",))
    keys = list(dict.fromkeys(key for row in found.rows for key in row))
    if len(found.rows) > MOST_ARMS:
        raise ConfigError(f"{where}: {len(found.rows)} arms", hint=f"use at most {MOST_ARMS}")
    for key in (*found.baseline, *([] if found.group_by is None else [found.group_by])):
        if key not in keys:
            raise ConfigError(f"{where}: no arm has the key {key!r}", hint=near_miss(key, keys))
    if found.group_by is not None and not all(found.group_by in row for row in found.rows):
        message = f"{where}: group_by: some arms have no key {found.group_by!r}"
        raise ConfigError(message, hint="name a key of all arms")
    if found.baseline and not any(map(found.is_baseline, found.rows)):
        message = f"{where}: baseline: no arm has {arm_id(found.baseline)}"
        raise ConfigError(message, hint="give keys and values of one or more arms")
    if found.group_by is None and all("checkpoint" in row for row in found.rows):
        return replace(found, group_by="checkpoint")
    return found


def _from_file(name: str, where: str, path: Sequence[str]) -> list[Any]:
    places = [Path(directory, name) for directory in path or [""]]
    file = next((place for place in places if place.exists()), places[0])
    try:
        return read_list(file)
    except ItemsError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error
    except OSError as error:
        message = f"{where}: cannot read {file}: {error.strerror}"
        raise ConfigError(message, hint="name a file that exists, such as arms.csv") from error


def _from_grid(value: Any, where: str) -> list[Any]:
    """The rows of one grid, or of several one after the other."""
    rows: list[Any] = []
    for one in value if isinstance(value, list) and value else [value]:
        axes = a_table(one, where)
        values = {key: _axis(given, f"{where}.{key}") for key, given in axes.items()}
        rows += combinations(values, where) if values else []
    return rows


def _axis(given: Any, where: str) -> list[Any]:
    if isinstance(given, str):
        return parse_values(given, where)
    if isinstance(given, list) and given:
        return given
    raise wrong(where, given, 'a list of values, or a range such as "0:9"')


def _generated(name: str, where: str, path: Sequence[str]) -> Iterable[Any]:
    from hpc_toolkit.worker.loading import load_object

    make = load_object(name, tuple(path))
    try:
        return list(make())
    except (Exception, SystemExit) as error:
        message = f"{where}: {name}() failed: {describe(error)}"
        hint = "it takes no arguments and returns one dictionary for each arm"
        raise ConfigError(message, hint=hint) from error


def _row(value: object, where: str) -> dict[str, Any]:
    row = a_table(value, where)
    if not row:
        raise wrong(where, value, "a table with at least one key")
    if TASK in row:
        message = f"{where}: an arm has the key {TASK!r}"
        raise ConfigError(message, hint="rename it: items use this key for the evaluation task")
    copy = _as_json(row, where)
    # A policy computes with squares of features.
    good = all(abs(one) <= 1e100 for one in copy.values() if isinstance(one, int | float))
    if not good or copy.keys() != row.keys():
        raise wrong(where, row, "a table of names and values, with numbers up to 1e100")
    return copy


def _as_json(table: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        copy: dict[str, Any] = json.loads(json.dumps(table, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        message = f"{where}: {error}"
        raise ConfigError(message, hint="use numbers, texts, true, false, lists, tables") from error
    return copy


def _kind(value: Any, where: str) -> Any:
    if isinstance(value, list) and value:
        return tuple(_as_json({"": value}, where)[""])
    if value in KINDS:
        return value
    raise wrong(where, value, f"one of {', '.join(KINDS)} or a list of values in their order")


_ARMS: dict[str, Converter] = {
    "rows": a_list(_row, "a list of tables with at least one arm"),
    "features": lambda value, where: {
        key: _kind(one, f"{where}.{key}") for key, one in a_table(value, where).items()
    },
    "baseline": lambda value, where: _as_json(a_table(value, where), where),
    "group_by": text,
}

_ARITHMETIC: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
"""Of numbers as floats: a product of integers or texts could take all memory."""

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, values: value in values,
    ast.NotIn: lambda value, values: value not in values,
}


def _filtered(rows: list[Any], condition: str, where: str) -> list[Any]:
    """The rows that fulfil a condition on their keys, such as ``depth > 2 or lr < 0.1``.

    Only comparisons, arithmetic, and, or, not and in are evaluated; nothing is called. A key that
    a row lacks is None, and a comparison of None by size is false.
    """
    try:
        tree = ast.parse(condition.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = f"{where}: {condition!r} is not a condition"
        raise ConfigError(message, hint='such as "depth > 2 and lr < 0.1"') from error
    known = {key for row in rows for key in row}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in {*known, "true", "false"}:
            message = f"{where}: no arm has the key {node.id!r}"
            raise ConfigError(message, hint=near_miss(node.id, sorted(known)))
    try:
        kept = [row for row in rows if _value(tree, row)]
    except (ArithmeticError, TypeError, KeyError, RecursionError) as error:
        message = f"{where}: {condition!r}: {error}"
        raise ConfigError(message, hint="compare numbers with numbers, texts with texts") from error
    if not kept:
        message = f"{where}: no arm of {len(rows)} fulfils {condition!r}"
        raise ConfigError(message, hint="relax the condition")
    return kept


def _value(node: ast.AST, row: Mapping[str, Any]) -> Any:
    found: Any
    match node:
        case ast.Constant(found):
            pass
        case ast.Name("true" | "false" as name) if name not in row:
            found = name == "true"
        case ast.Name(name):
            found = row.get(name)
        case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
            found = [_value(one, row) for one in elements]
        case ast.UnaryOp(sign, operand) if type(sign) in _OPERATORS:
            found = _OPERATORS[type(sign)](_value(operand, row))
        case ast.BinOp(left, sign, right) if type(sign) in _ARITHMETIC:
            one, other = _value(left, row), _value(right, row)
            if isinstance(one, str) or isinstance(other, str):
                raise TypeError("arithmetic needs numbers")
            found = _ARITHMETIC[type(sign)](float(one), float(other))
        case ast.BoolOp(sign, parts):
            all_or_any = all if isinstance(sign, ast.And) else any
            found = all_or_any(_value(one, row) for one in parts)
        case ast.Compare(left, signs, rights):
            values = [_value(one, row) for one in (left, *rights)]
            found = all(map(_compare, signs, values, values[1:]))
        case _:
            raise TypeError(f"{ast.unparse(node)!r} is not a comparison of keys and values")
    return found


def _compare(sign: ast.cmpop, left: Any, right: Any) -> bool:
    by_size = isinstance(sign, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    if by_size and (left is None or right is None):
        return False
    if type(sign) not in _OPERATORS:
        raise TypeError("'is' is not supported: use == or !=")
    return bool(_OPERATORS[type(sign)](left, right))
