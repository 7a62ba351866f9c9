"""Results of every kind, and workloads that return them."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import fractions
import importlib.util
import math
import pathlib
import threading
import uuid
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Pair(NamedTuple):
    left: int
    right: str


@dataclasses.dataclass
class Point:
    x: int
    when: dt.date


class Plain:
    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return type(other) is Plain and other.x == self.x

    __hash__ = None  # type: ignore[assignment]


class Holder:
    def __init__(self) -> None:
        self.model = {"lock": threading.Lock()}


def _circle() -> list[Any]:
    circle: list[Any] = [1]
    circle.append(circle)
    return circle


def _deep(depth: int) -> list[Any]:
    deep: list[Any] = []
    for _ in range(depth):
        deep = [deep]
    return deep


def _pandas() -> Any:
    pd = importlib.import_module("pandas")
    return pd.DataFrame({"a": [1, 2], "b": ["x", None]}, index=[5, 6])


def _series() -> Any:
    pd = importlib.import_module("pandas")
    return pd.Series([1.5, math.nan], name="s")


def _timestamp() -> Any:
    pd = importlib.import_module("pandas")
    return pd.Timestamp("2026-01-02T03:04:05.000000007")


def _polars() -> Any:
    import polars as pl

    return pl.DataFrame({"a": [1, 2], "b": ["x", None]})


def _arrow() -> Any:
    import pyarrow as pa

    return pa.table({"a": [1, 2]})


def _tensor(*given: Any, **how: Any) -> Callable[[], Any]:
    def make() -> Any:
        import torch

        return torch.tensor(*given, **{k: getattr(torch, v) for k, v in how.items()})

    return make


BIG = 2**70
MOMENT = dt.datetime(2026, 1, 2, 3, 4, 5, 678)
ZONED = dt.datetime(2026, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Paris"))


class Kind(NamedTuple):
    """A result, and what readers get of it; the text formats get its natural form."""

    make: Callable[[], Any]
    json: Any
    csv: str
    parquet: str
    needs: str = ""


def _alike(make: Callable[[], Any], shown: Any, *more: str) -> Kind:
    return Kind(make, shown, str(shown), *more)


KINDS: dict[str, Kind] = {
    "none": Kind(lambda: None, None, "", "null"),
    "true": Kind(lambda: True, True, "True", "bool"),
    "int": Kind(lambda: 3, 3, "3", "int64"),
    "int beyond 2^64": Kind(lambda: BIG, BIG, str(BIG), "string"),
    "int of 6000 digits": Kind(lambda: 10**6000, hex(10**6000), hex(10**6000), "string"),
    "float": Kind(lambda: 0.93, 0.93, "0.93", "double"),
    "nan": Kind(lambda: math.nan, None, "nan", "double"),
    "inf": Kind(lambda: math.inf, None, "inf", "double"),
    "-inf": Kind(lambda: -math.inf, None, "-inf", "double"),
    "-0.0": Kind(lambda: -0.0, -0.0, "-0.0", "double"),
    "complex": Kind(lambda: 1 - 2j, "(1-2j)", "(1-2j)", "string"),
    "text": Kind(lambda: "a,\n\u00e9", "a,\n\u00e9", "a,\n\u00e9", "string"),
    "empty text": Kind(lambda: "", "", "", "string"),
    "lone surrogate": Kind(lambda: "\ud800", "\ud800", "\\ud800", "string"),
    "list": Kind(lambda: [1, 2, 3], [1, 2, 3], "[1, 2, 3]", "list<element: int64>"),
    "empty list": Kind(list, [], "[]", "list<element: null>"),
    "mixed list": Kind(lambda: [1, "a", None], [1, "a", None], '[1, "a", null]', "string"),
    "tuple": Kind(lambda: (1, (2.5,)), [1, [2.5]], "[1, [2.5]]", "string"),
    "set": Kind(lambda: {3, 1}, [1, 3], "[1, 3]", "list<element: int64>"),
    "frozenset": Kind(lambda: frozenset("a"), ["a"], '["a"]', "list<element: string>"),
    "dict": Kind(lambda: {"a": 0.5}, {"a": 0.5}, "0.5", "double"),
    "empty dict": Kind(dict, {}, "", ""),
    "dict with nan": Kind(lambda: {"a": math.nan}, {"a": None}, "nan", "double"),
    "nested dict": Kind(
        lambda: {"a": {"b": (1, math.inf)}}, {"a": {"b": [1, None]}}, '{"b": [1, null]}', "string"
    ),
    "dict with keys that are numbers": Kind(
        lambda: {1: "a", None: "b"}, {"1": "a", "None": "b"}, "a", "string"
    ),
    "dict with keys that are tuples": Kind(lambda: {(1, 2): "a"}, {"(1, 2)": "a"}, "a", "string"),
    "dict with equal names": Kind(
        lambda: {1: "a", "1": "b"}, [[1, "a"], ["1", "b"]], '[[1, "a"], ["1", "b"]]', "string"
    ),
    "dict with a pointer's marks": Kind(
        lambda: {"a/b~1": (1,)}, {"a/b~1": [1]}, "[1]", "list<element: int64>"
    ),
    "ordered dict": Kind(lambda: collections.OrderedDict(a=1), {"a": 1}, "1", "int64"),
    "counter": Kind(lambda: collections.Counter("aab"), {"a": 2, "b": 1}, "2", "int64"),
    "circle": Kind(_circle, "<list, ", "<list, ", "string"),
    "deep": Kind(lambda: [*_deep(50), ()], [*_deep(50), []], "[[[", "string"),
    "too deep": Kind(lambda: [*_deep(150), ()], "<list, ", "<list, ", "string"),
    "bytes": Kind(lambda: b"\0\xff", "AP8=", "AP8=", "binary"),
    "many bytes": Kind(lambda: bytes(10**5), "<bytes, 97.7 KiB>", "<bytes, 97.7 KiB>", "string"),
    "bytearray": Kind(lambda: bytearray(b"a"), "<bytearray, ", "<bytearray, ", "string"),
    "datetime": Kind(lambda: MOMENT, MOMENT.isoformat(), MOMENT.isoformat(), "timestamp[us]"),
    "datetime in utc": _alike(
        lambda: MOMENT.replace(tzinfo=dt.UTC),
        "2026-01-02T03:04:05.000678+00:00",
        "timestamp[us, tz=UTC]",
    ),
    "datetime of a place": _alike(lambda: ZONED, "2026-07-01T12:00:00+02:00", "string"),
    "date": Kind(lambda: dt.date(2026, 1, 2), "2026-01-02", "2026-01-02", "date32[day]"),
    "time": Kind(lambda: dt.time(1, 2, 3), "01:02:03", "01:02:03", "time64[us]"),
    "timedelta": _alike(lambda: dt.timedelta(1, 2, 3), 86402.000003, "duration[us]"),
    "path": Kind(lambda: pathlib.Path("a/b"), "a/b", "a/b", "string"),
    "decimal": Kind(lambda: Decimal("1.10"), "1.10", "1.10", "decimal128(3, 2)"),
    "fraction": Kind(lambda: fractions.Fraction(1, 3), "1/3", "1/3", "string"),
    "uuid": _alike(lambda: uuid.UUID(int=7), str(uuid.UUID(int=7)), "string"),
    "enum": Kind(lambda: Colour.RED, "red", "red", "string"),
    "int enum": Kind(lambda: Level.HIGH, 3, "3", "int64"),
    "named tuple": Kind(lambda: Pair(1, "x"), {"left": 1, "right": "x"}, "1", "int64"),
    "dataclass": Kind(
        lambda: Point(1, dt.date(2026, 1, 2)), {"x": 1, "when": "2026-01-02"}, "1", "int64"
    ),
    "object": Kind(lambda: Plain(4), "<kinds_of_results.Plain, ", "<kinds_of", "string"),
    "exception": Kind(lambda: KeyError("k"), "<KeyError, ", "<KeyError, ", "string"),
    "function": Kind(lambda: _deep, "<function, ", "<function, ", "string"),
    "numpy float32": Kind(
        lambda: np.float32(0.1), 0.10000000149011612, "0.10000000149011612", "float"
    ),
    "numpy float64 in a dict": Kind(lambda: {"a": np.float64(0.5)}, {"a": 0.5}, "0.5", "double"),
    "numpy nan": Kind(lambda: np.float32("nan"), None, "nan", "float"),
    "numpy int8": Kind(lambda: np.int8(3), 3, "3", "int8"),
    "numpy uint64": _alike(lambda: np.uint64(2**64 - 1), 2**64 - 1, "uint64"),
    "numpy bool": Kind(lambda: np.bool_(True), True, "True", "bool"),
    "numpy text": Kind(lambda: np.str_("x"), "x", "x", "string"),
    "numpy datetime": _alike(
        lambda: np.datetime64("2026-01-02T03", "h"), "2026-01-02T03", "string"
    ),
    "numpy long double": _alike(lambda: np.longdouble(1) / 3, "0.333333", "string"),
    "small array": Kind(
        lambda: np.array([[1, 2]], "i2"),
        [[1, 2]],
        "[[1, 2]]",
        "list<element: list<element: int16>>",
    ),
    "small array with nan": Kind(
        lambda: np.array([1, math.nan], "f4"), [1.0, None], "[1.0, null]", "list<element: float>"
    ),
    "empty array": Kind(lambda: np.zeros((0, 3)), [], "[]", "list<element: list<element: double>>"),
    "array without dimensions": Kind(lambda: np.array(0.5), 0.5, "0.5", "double"),
    "large array": _alike(
        lambda: np.arange(1000, dtype="u2"),
        "<numpy.ndarray uint16 (1000,), 2.0 KiB>",
        "list<element: uint16>",
    ),
    "array in Fortran order": _alike(
        lambda: np.asfortranarray(np.arange(2000.0).reshape(2, 1000)),
        "<numpy.ndarray float64 (2, 1000), 15.6 KiB>",
        "list<element: list<element: double>>",
    ),
    "array of complex": Kind(lambda: np.array([1j]), ["1j"], '["1j"]', "list<element: string>"),
    "array of text": Kind(lambda: np.array(["ab"]), ["ab"], '["ab"]', "list<element: string>"),
    "array of objects": Kind(
        lambda: np.array([{"a": 1}], object), "<numpy.ndarray object (1,)", "<numpy", "string"
    ),
    "array of records": Kind(
        lambda: np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]), "<numpy", "<numpy", "string"
    ),
    "masked array": Kind(
        lambda: np.ma.array([1, 2], mask=[False, True]), "<numpy", "<numpy", "string"
    ),
    "list of arrays": Kind(
        lambda: [np.array([1.0]), np.array([2.0])],
        [[1.0], [2.0]],
        "[[1.0], [2.0]]",
        "list<element: list<element: double>>",
    ),
    "list of 2000 tuples": Kind(
        lambda: [(1,)] * 2000, [[1]] * 2000, "[[1], ", "list<element: list<element: int64>>"
    ),
    "tensor": Kind(_tensor([1.5, 2]), [1.5, 2.0], "[1.5, 2.0]", "list<element: float>", "torch"),
    "tensor without dimensions": Kind(_tensor(0.5), 0.5, "0.5", "float", "torch"),
    "tensor of bfloat16": Kind(
        _tensor([0.1], dtype="bfloat16"),
        [0.10009765625],
        "[0.10009765625]",
        "list<element: float>",
        "torch",
    ),
    "large tensor": _alike(
        _tensor([[1] * 1000]),
        "<torch.Tensor torch.int64 (1, 1000), 7.8 KiB>",
        "list<element: list<element: int64>>",
        "torch",
    ),
    "large tensor of bfloat16": Kind(
        _tensor([1.5] * 1000, dtype="bfloat16"),
        "<torch.Tensor torch.bfloat16 (1000,), 2.0 KiB>",
        "<torch.Tensor torch.bfloat16 (1000,), 2.0 KiB>",
        "list<element: float>",
        "torch",
    ),
    "pandas frame": Kind(_pandas, "<pandas.DataFrame (2, 2)", "<pandas", "string", "pandas"),
    "pandas series": Kind(_series, "<pandas.Series float64 (2,)", "<pandas", "string", "pandas"),
    "pandas time": _alike(_timestamp, "2026-01-02 03:04:05.000000007", "string", "pandas"),
    "polars frame": Kind(_polars, "<polars.DataFrame (2, 2)", "<polars", "string", "polars"),
    "arrow table": Kind(_arrow, "<pyarrow.Table (2, 1)", "<pyarrow", "string", "pyarrow"),
}
KINDS = {
    name: kind
    for name, kind in KINDS.items()
    if not kind.needs or importlib.util.find_spec(kind.needs)
}
NOT_STORED = "holder of a lock"


def named(name: str) -> Any:
    print(f"makes {name}")
    return Holder() if name == NOT_STORED else KINDS[name].make()


def give(item: dict[str, Any]) -> Any:
    return named(item["kind"])


def give_large(item: dict[str, Any]) -> Any:
    if "text" in item:
        return "x" * item["text"]
    array = np.zeros(item["bytes"], np.uint8)
    array[-1] = 7
    return array


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, of the same types, with NaN equal to NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return same([*one], [*other]) and same([*one.values()], [*other.values()])
    if isinstance(one, list | tuple) and repr(one) != repr(_circle()):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, int):  # of too many digits for repr()
        return bool(one == other)
    if hasattr(one, "equals"):
        return bool(one.equals(other))
    same_dtype = not hasattr(one, "dtype") or one.dtype == other.dtype
    return same_dtype and (repr(one) == repr(other) or bool(one == other))
