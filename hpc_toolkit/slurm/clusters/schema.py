"""The JSON schema of cluster files, generated from the keys that the reader knows.

It accepts every valid file. Only the reader checks rules that JSON schema cannot express: a single
memory option, unique partition names, variables that a script may export.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import Any

from hpc_toolkit.slurm.allowlist import COUNTS, PATTERNS
from hpc_toolkit.slurm.clusters import facts as clusters
from hpc_toolkit.slurm.clusters import keys
from hpc_toolkit.system import tomltable as t

_LINE = r"^[^\u0000-\u001f\u007f]*$"
_INT = "[0-9]{1,12}"
_SIZE = rf"[0-9]{{1,19}}(\.{_INT})? ?([KMGTPkmgtp][Ii]?[Bb]?|[Bb])"
_MEM = f"{_INT}|{_SIZE}"
_PART = rf"{_INT}(\.{_INT})? ?(ms|min|s|m|h|d)"
_DURATION = f"{_INT}-{_INT}(:{_INT}){{0,2}}|{_INT}:{_INT}:{_INT}|{_PART}( ?{_PART})*"
_NOT_ZERO = "(?=.*[1-9])"
"""Before a pattern: some digit is not 0."""
_TEXTS = {"type": "array", "items": {"type": "string", "pattern": _LINE}}
_PAIRS = {"type": "object", "additionalProperties": {"type": "string", "pattern": _LINE}}


def cluster_schema() -> dict[str, Any]:
    """Return the schema in draft 7, which editors for TOML support."""
    described = _docstrings("Cluster")
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A cluster file of hpctk",
        **_object(keys.KEYS, described),
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
    if isinstance(convert, keys.Option):
        return _option(convert.name)
    return _SCHEMAS[convert]


def _option(name: str) -> dict[str, Any]:
    if name in PATTERNS:
        return _text(PATTERNS[name][0], **{"not": {"pattern": keys.BLANKED}})
    if name == "time":
        return _text(f"{_NOT_ZERO}({_DURATION}|{_INT}(:{_INT})?)")
    return _text(f"{'' if name == 'mem' else _NOT_ZERO}({_MEM})")


def _text(pattern: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^({pattern})$", **more}


def _docstrings(name: str) -> dict[str, str]:
    """Return the docstring below each field of the dataclass ``name`` in ``facts``."""
    tree = ast.parse(inspect.getsource(clusters))
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in ("Limits", name)]
    found = {}
    for field, text in itertools.pairwise(one for n in classes for one in n.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return {field: " ".join(text.split()).replace("``", "'") for field, text in found.items()}


_SCHEMAS: dict[Any, dict[str, Any]] = {
    t.text: {"type": "string", "pattern": _LINE},
    t.word: _text(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"),
    t.path: _text(r"/[^\u0000-\u001f\u007f]*"),
    t.date: {"type": "string", "format": "date"},
    t.flag: {"type": "boolean"},
    t.count: {"type": "integer", "minimum": 1, "maximum": t.MAX_COUNT},
    t.count_or_zero: {"type": "integer", "minimum": 0, "maximum": t.MAX_COUNT},
    t.mem: _text(f"{_NOT_ZERO}({_SIZE})", examples=["480G"]),
    t.walltime: _text(f"{_NOT_ZERO}({_DURATION})", examples=["3-00:00:00", "12h"]),
    t.texts: _TEXTS,
    t.pairs: _PAIRS,
    keys.amount: {"type": "number", "minimum": 0, "maximum": keys.MAX_AMOUNT},
    keys.cpus_per_task: {
        "type": "integer",
        **dict(zip(("minimum", "maximum"), COUNTS["cpus_per_task"], strict=True)),
    },
    keys.partition_name: _text(keys.PARTITION_NAME),
    keys.variable: _text(keys.VARIABLE),
    keys.binds: {"type": "array", "items": _text(keys.BIND)},
    keys.directories: {"type": "array", "items": _text(keys.DIRECTORY)},
    keys.modules: _TEXTS,
    keys.commands: _TEXTS,
    keys.exports: _PAIRS,
    keys.nccl: {**_PAIRS, "propertyNames": {"pattern": f"^{keys.NCCL_NAME}$"}},
}
# Tables come last, because their schemas contain those of the converters above.
_SCHEMAS |= {
    keys.defaults: _object(keys.DEFAULT_KEYS, {}),
    keys.identify: _object(keys.IDENTIFY_KEYS, {}),
    keys.partitions: {
        "type": "array",
        "items": {**_object(keys.PARTITION_KEYS, _docstrings("Partition")), "required": ["name"]},
    },
}
