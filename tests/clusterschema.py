"""The keys of cluster files as a JSON schema, from which the page of the reference is made.

It says which keys there are, what they mean and what type their values have.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import Any

from hpc_toolkit.slurm.clusters import facts as clusters
from hpc_toolkit.slurm.clusters import keys, nodes
from hpc_toolkit.slurm.render.spec import OPTIONS
from hpc_toolkit.system import tomltable as t

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_PAIRS = {"type": "object", "additionalProperties": _TEXT}


def cluster_schema() -> dict[str, Any]:
    """Return the schema in draft 7, which editors for TOML support."""
    described = _docstrings("Cluster")
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A cluster file of hpctk",
        **_object(clusters.KEYS, described),
    }


def _object(table: dict[str, t.Key], described: dict[str, str]) -> dict[str, Any]:
    properties = {}
    for key, (field, convert) in table.items():
        text = described.get(field, "")
        properties[key] = {**({"description": text} if text else {}), **_schema(convert)}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema(convert: Any) -> dict[str, Any]:
    if isinstance(convert, t.Choice):
        return {"enum": list(convert.choices)}
    if isinstance(convert, keys.Table):
        return _object(convert.keys, _docstrings(convert.of))
    if isinstance(convert, keys.Named):
        return {"type": "object", "additionalProperties": _schema(convert.each)}
    if isinstance(convert, keys.Option):
        return {"type": "integer"} if OPTIONS[convert.name].value.word is int else _TEXT
    return _SCHEMAS.get(convert, _TEXT)


def _docstrings(name: str) -> dict[str, str]:
    """Return the docstring below each field of the dataclass ``name``."""
    trees = [ast.parse(inspect.getsource(module)) for module in (keys, clusters, nodes)]
    bodies = [one for tree in trees for one in tree.body if isinstance(one, ast.ClassDef)]
    shared = "Limits" if name in ("Cluster", "Partition") else ""
    classes = [one for one in bodies if one.name in (shared, name)]
    found = {}
    for field, text in itertools.pairwise(one for n in classes for one in n.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return {field: " ".join(text.split()).replace("``", "'") for field, text in found.items()}


_SCHEMAS: dict[Any, dict[str, Any]] = {
    t.date: {"type": "string", "format": "date"},
    t.flag: {"type": "boolean"},
    t.walltime: {**_TEXT, "examples": ["7-00:00:00", "12:00:00"]},
    t.mem: {**_TEXT, "examples": ["500G"]},
    t.count: {"type": "integer"},
    t.count_or_zero: {"type": "integer"},
    keys.amount: {"type": "number"},
    keys.restricted: {"type": ["boolean", "string"]},
    **dict.fromkeys((t.texts, keys.binds, keys.directories, keys.modules, keys.commands), _TEXTS),
    **dict.fromkeys((t.pairs, keys.exports, keys.nccl), _PAIRS),
}
"""The schemas of converters; all others take text."""

# Their schemas contain those of the converters above.
_ONE = {"type": ["string", "integer", "boolean"]}
_SCHEMAS[keys.sbatch_defaults] = {"type": "object", "additionalProperties": _ONE}
_SCHEMAS[keys.defaults] = _schema(keys.DEFAULTS)
_SCHEMAS |= {
    keys.partitions: {
        "type": "array",
        "items": {**_object(keys.PARTITION_KEYS, _docstrings("Partition")), "required": ["name"]},
    }
}
