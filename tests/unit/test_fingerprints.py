"""Fingerprints: equal in every process for what is the same, different for what changed."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.worker.fingerprints import fingerprint

SCRIPT = """
import collections, dataclasses, datetime, decimal, enum, functools, hashlib, math, os, pathlib, re
import threading, typing
import helpers
import package.sub
import numpy as np
from hpc_toolkit.calls import Caller
from hpc_toolkit.calls.recorded import key_of
from hpc_toolkit.worker.fingerprints import fingerprint, of_function

caller = Caller(pathlib.Path("calls"))
digest = lambda key: hashlib.sha256(key).hexdigest()
LIMIT = 5
ATTRIBUTE = 1

@dataclasses.dataclass
class Config:
    lr: float
    tags: set

class Color(enum.Enum):
    RED = 1

class Model:
    def __init__(self, k):
        self.k = k
    def predict(self, x):
        return self.k * x + LIMIT

def plain(x, y=2):
    "What it does."
    names = {"left", "right", "up", "down"}
    return helpers.scale(x) + LIMIT if x in names else [y for y in range(x)]

def make(k):
    def inner(x):
        return x + k
    return inner

@functools.lru_cache
def cached(x):
    return x + 1

def reads(x):
    return package.sub.scale(x.ATTRIBUTE)

class Generic(typing.Generic[typing.TypeVar("T")]):
    pass

loop = [1]
loop.append(loop)
node = Model(5)
node.neighbours = {node, Model(6)}
VALUES = [
    1, "x", 1.5, None, (1, "a"), {"b": 1, "a": {2, 3, "x", "y"}}, frozenset("abcdef"), b"x",
    loop, node,
    np.arange(5), np.float32(1), np.array(["a"], dtype=object), datetime.date(2026, 1, 2),
    decimal.Decimal("1.10"), pathlib.Path("a"), Config(0.1, {"p", "q", "r"}), Color.RED, Model(3),
    re.compile("a+"), collections.OrderedDict(a=1), threading.Lock(), slice(1, 2), range(3), Model,
    os.environ, {1, "a", None, (1, "x"), frozenset("abc")}, {frozenset("abc"), frozenset("xyz")},
    {Model(1), Color.RED}, Generic, {"functions": [plain, Model], 1: {plain, make(5)}},
]
FUNCTIONS = [plain, make(3), make(4), Model(3).predict, cached, lambda x: x + LIMIT, "abc".upper,
             functools.partial(plain, 1), math.sqrt, Model, reads]
for value in VALUES:
    print(*fingerprint(value), digest(key_of(caller.call(len, [value], {}).item)))
for function in FUNCTIONS:
    print(*of_function(function))
"""
HELPERS = "FACTOR = 2\ndef scale(x):\n    return x * FACTOR\n"


def fingerprints(
    tmp_path: Path, script: str = SCRIPT, helpers: str = HELPERS, seed: int = 1
) -> list[str]:
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "helpers.py").write_text(helpers)
    (tmp_path / "package").mkdir(exist_ok=True)
    (tmp_path / "package" / "sub.py").write_text(helpers)
    environ = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "script.py"]
    done = subprocess.run(argv, cwd=tmp_path, env=environ, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode().splitlines()


def test_fingerprints_are_the_same_in_every_process_and_differ_from_each_other(
    tmp_path: Path,
) -> None:
    first = fingerprints(tmp_path, seed=1)

    assert fingerprints(tmp_path, seed=2) == first
    assert len(set(first)) == len(first)


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("# nothing", "# nothing", 0),
        ('    "What it does."', '    "What it does now."', 0),
        ("LIMIT = 5", "# a comment\n\nLIMIT = 5", 0),
        ("for y in range(x)", "for z in range(x)", 3),  # of plain, and of what has it
        ("y=2", "y=3", 3),
        ("ATTRIBUTE = 1", "ATTRIBUTE = 2", 0),  # not what x.ATTRIBUTE reads
        ("return x + k", "return x - k", 3),
        ("return self.k * x", "return self.k + x", 7),  # the class, its objects and its method
        ("LIMIT = 5", "LIMIT = 6", 10),
        # In modules of the user.
        ("x * FACTOR", "x / FACTOR", 4),
        ("FACTOR = 2", "FACTOR = 3", 4),
        ("FACTOR = 2", "def other():\n    pass\nFACTOR = 2", 0),
    ],
)
def test_what_changed_has_another_fingerprint(
    tmp_path: Path, before: str, after: str, changed: int
) -> None:
    first = fingerprints(tmp_path)
    texts = SCRIPT.replace(before, after), HELPERS.replace(before, after)
    second = fingerprints(tmp_path, *texts)

    assert sum(one != other for one, other in zip(first, second, strict=True)) == changed


class Called:
    def __init__(self, factor: int) -> None:
        functools.update_wrapper(self, len)
        self.factor = factor

    def __call__(self) -> int:
        return self.factor


def chain(length: int, last: int) -> list[Any]:
    found: list[Any] = [last]
    for _ in range(length):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *((re.compile("a"), re.compile("b")), (np.sin, np.cos), ({1: 1}.keys(), {2: 1}.keys())),
        (MappingProxyType({1: 1}), MappingProxyType({1: 2})),
        (np.zeros(2, [("a", "i4")]), np.zeros(2, [("x", "i4")])),
        (np.array(["2020"], "M8[D]"), np.array(["2021"], "M8[D]")),
        *((Called(1), Called(2)), (property(lambda self: 1), property(lambda self: 2))),
        ([(n,) for n in range(110_000)], [(n,) for n in range(109_999)] + [(0,)]),
        *((chain(300, 1), chain(300, 2)), (FunctionType, MethodType), (b"a", b"b")),
        (zip([1], [2], strict=True), zip([1], [3], strict=True)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_values_that_differ_have_other_fingerprints(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)


def test_a_large_array_that_changed_in_place_has_another_fingerprint() -> None:
    array = np.zeros(1 << 20)
    first = fingerprint(array)
    assert fingerprint(array.copy()) == first == fingerprint(array)

    array[-1] = 1

    assert fingerprint(array) != first
    array[-1] = 0
    assert fingerprint(array) == first
