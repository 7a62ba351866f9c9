"""The keys of cluster files, what they mean and what their values are, for the reference."""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import Any

from hpc_toolkit.slurm import clusters
from hpc_toolkit.slurm.clusters import facts, keys
from hpc_toolkit.slurm.render.spec import OPTIONS
from hpc_toolkit.system import tomltable as t

_VALUES: dict[Any, str] = {
    t.date: "date",
    t.flag: "`true` or `false`",
    t.walltime: 'text such as `"7-00:00:00"`',
    t.mem: 'text such as `"500G"`',
    **dict.fromkeys((t.count, t.count_or_zero), "whole number"),
    keys.amount: "number",
    keys.restricted: "`true` or `false` or text",
    **dict.fromkeys(
        (t.texts, keys.binds, keys.directories, keys.modules, keys.commands), "list of texts"
    ),
    **dict.fromkeys((t.pairs, keys.exports, keys.nccl), "table"),
    **dict.fromkeys((keys.defaults, keys.sbatch_defaults), "table"),
    keys.partitions: "list of tables",
}
"""The values of converters; all others take text."""


def cluster_tables() -> dict[str, list[tuple[str, str, str]]]:
    """Each table of a cluster file, by its heading: key, value and meaning."""
    identify: Any = facts.KEYS["identify"][1]
    return {
        "": _rows(facts.KEYS, "Cluster"),
        "[identify]": _rows(identify.keys, identify.of),
        "[defaults]": _rows(keys.DEFAULTS.keys, keys.DEFAULTS.of),
        "[[partitions]]": _rows(keys.PARTITION_KEYS, "Partition"),
    }


def _rows(table: dict[str, t.Key], of: str) -> list[tuple[str, str, str]]:
    about = _docstrings(of)
    return [(key, _value(read), about.get(field, "")) for key, (field, read) in table.items()]


def _value(convert: Any) -> str:
    if isinstance(convert, t.Choice):
        return " or ".join(f'`"{word}"`' for word in convert.choices)
    if isinstance(convert, keys.Table | keys.Named):
        return "table"
    if isinstance(convert, keys.Option) and OPTIONS[convert.name].value.word is int:
        return "whole number"
    return _VALUES.get(convert, "text")


def _docstrings(name: str) -> dict[str, str]:
    """Return the docstring below each field of the dataclass ``name``."""
    trees = [ast.parse(inspect.getsource(module)) for module in (keys, facts, clusters)]
    bodies = [one for tree in trees for one in tree.body if isinstance(one, ast.ClassDef)]
    shared = "Limits" if name in ("Cluster", "Partition") else ""
    classes = [one for one in bodies if one.name in (shared, name)]
    found = {}
    for field, text in itertools.pairwise(one for n in classes for one in n.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return {field: " ".join(text.split()).replace("``", "'") for field, text in found.items()}
