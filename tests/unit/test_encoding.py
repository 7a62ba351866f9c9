"""Results and arguments as JSON: what a line and an item contain, and what is refused."""

from __future__ import annotations

import enum
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.calls import Caller
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.jsonlines import encode
from hpc_toolkit.worker.attempts import KEPT, PERMANENT, Report
from hpc_toolkit.worker.calls import Calls


class Colour(enum.IntEnum):
    RED = 3


class Loud(float):
    def __repr__(self) -> str:
        return "loud"


class Rude:
    """Everything that an encoder may call raises."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name != "__reduce_ex__":
            return super().__getattribute__(name)
        message = "rude"
        raise RuntimeError(message)


def shown(value: Any) -> str:
    return hex(value) if type(value) is int else repr(value).partition(" at 0x")[0]


def pair(value: Any, other: Any = None) -> tuple[Any, Any]:
    return value, other


def report(value: Any, values: Path | None = None) -> tuple[bytes, dict[str, Any]]:
    """The kind of the message about a result, and its journal line."""
    sent: list[tuple[bytes, bytes]] = []
    request: dict[str, Any] = {"stage": "items", "unit": "000001-0", "generation": 1}
    request |= {"positions": [0], "deadline": None, "expected_s": 0.0, "failures_left": 8}
    request["values"] = None if values is None else str(values)
    Report(request, lambda kind, text: sent.append((kind, text))).result(value)
    ((kind, text),) = sent
    return kind, json.loads(text + b"}")


DEEP: list[Any] = []
for _ in range(2000):
    DEEP = [DEEP]
CLOSE = [
    *((np.int64(-(2**63)), -(2**63)), (np.uint64(2**64 - 1), 2**64 - 1)),
    *((np.float16(0.1), 0.0999755859375), (np.float32(0.1), 0.10000000149011612)),
    *((np.array(0.5), 0.5), (np.array("x"), "x"), (np.bool_(True), True), (np.str_("x"), "x")),
    *((Colour.RED, 3), (Loud(0.5), 0.5), ((1, (2,)), [1, [2]])),
]
FAR = [
    *(math.nan, 1 + 2j, 10**5000, {2}, Path("a"), b"a", {1: "a"}, {1: "a", "1": "b"}, lambda: 1),
    *(np.float64("inf"), np.longdouble(1) / 3, np.ma.masked, np.ma.array(3, mask=True), Loud),
    *(np.datetime64("2020-01-01"), np.timedelta64(5, "ns"), np.bytes_(b"3")),
    *(np.zeros(2), np.zeros(2000), np.array({"a": 1}, dtype=object)),
]


@pytest.mark.parametrize(("value", "kept"), CLOSE, ids=[type(value).__name__ for value, _ in CLOSE])
def test_a_result_that_json_nearly_has_is_shown_as_plain(value: Any, kept: Any) -> None:
    assert report({"x": [value]})[1]["value"] == {"x": [kept]}


@pytest.mark.parametrize(
    "value", [*(one for one, _ in CLOSE), *FAR], ids=lambda one: type(one).__name__
)
def test_an_argument_arrives_as_it_was(tmp_path: Path, value: Any) -> None:
    caller = Caller(tmp_path / "calls")
    call = caller.call(pair, (value,), {"other": [value]})
    caller.store(call)

    ((one, (other,)),) = Calls(str(tmp_path)).run(None, [json.loads(encode(call.item))])

    for found in (one, other):
        assert (type(found), shown(found)) == (type(value), shown(value))


def test_an_argument_that_is_nested_deeply_arrives_or_is_refused(tmp_path: Path) -> None:
    fine: list[Any] = [1]
    caller = Caller(tmp_path / "calls")
    for _ in range(150):
        fine = [fine]
    call = caller.call(pair, (fine,), {})
    caller.store(call)
    ((found, _),) = Calls(str(tmp_path)).run(None, [json.loads(encode(call.item))])
    assert found == fine

    with pytest.raises(ConfigError, match="test_encoding:pair: argument 1 is nested too deeply"):
        caller.store(caller.call(pair, (DEEP,), {}))
    with pytest.raises(ConfigError, match="test_encoding:pair: argument 1 is a Rude, which"):
        caller.store(caller.call(pair, (Rude(),), {}))


def test_a_line_names_the_bytes_of_its_results_in_a_file_that_grows(tmp_path: Path) -> None:
    values = tmp_path / "values"
    values.write_bytes(b"cut off")  # by the death of an executor

    report(Colour.RED, values)
    kind, line = report({"a": Colour.RED, "b": bytes(70000)}, values)

    assert (kind, line["value"]) == (KEPT, {"a": 3, "b": "<bytes, 68.4 KiB>"})
    (a, b) = (line["types"][place] for place in ("/a", "/b"))
    assert (a[0], b[:1], a[1] + a[2]) == ("pickle", ["bytes"], b[1])
    assert b[1] + b[2] == values.stat().st_size


@pytest.mark.parametrize(
    ("value", "problem"), [(Rude(), "rude"), (DEEP, "value is nested too deeply")]
)
def test_a_result_that_cannot_be_stored_fails_for_good(value: Any, problem: str) -> None:
    kind, line = report(value)

    assert (kind, line["error_type"]) == (PERMANENT, "UnstorableError")
    assert problem in line["error"]
