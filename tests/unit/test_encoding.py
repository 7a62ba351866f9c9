"""Results as JSON: what is kept exactly, and what fails the item with its path."""

from __future__ import annotations

import enum
import json
import re
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.worker.attempts import DONE, FAILED, Report
from hpc_toolkit.worker.calls import as_value, item_of


class Colour(enum.IntEnum):
    RED = 3


class Loud(float):
    def __repr__(self) -> str:
        return "loud"


def report(value: Any) -> tuple[bytes, dict[str, Any]]:
    """The kind of the message about a result, and its journal line."""
    sent: list[tuple[bytes, bytes]] = []
    request = {
        "stage": "items",
        "unit": "000001-0",
        "generation": 1,
        "positions": [0],
        "deadline": None,
        "expected_s": 0.0,
        "failures_left": 8,
    }
    Report(request, lambda kind, text: sent.append((kind, text))).result(value)
    ((kind, text),) = sent
    return kind, json.loads(text + b"}")


KEPT = [
    (np.int64(-(2**63)), -(2**63)),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (np.float16(0.1), 0.0999755859375),
    (np.float32(0.1), 0.10000000149011612),
    (np.array(0.5), 0.5),
    (np.array("x"), "x"),
    (np.bool_(True), True),
    (np.str_("x"), "x"),
    (Colour.RED, 3),
    (Loud(0.5), 0.5),
    ({np.str_("k"): [(1, 2)]}, {"k": [[1, 2]]}),
]
DEEP: list[Any] = []
for _ in range(2000):
    DEEP = [DEEP]
CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
REFUSED = [
    (1 + 2j, "is a complex"),
    (np.complex64(1), "is a complex64"),
    (np.longdouble(1) / 3, "is a longdouble"),
    (np.longdouble(0.5), "is a longdouble"),
    (np.ma.masked, "is a MaskedConstant"),
    (np.ma.array(3, mask=True), "is a MaskedArray"),
    (np.datetime64("2020-01-01T00:00:00.000000001"), "is a datetime64"),
    (np.datetime64("2020-01-01"), "is a datetime64"),
    (np.datetime64("NaT", "s"), "is a datetime64"),
    (np.timedelta64(5, "ns"), "is a timedelta64"),
    (np.bytes_(b"3"), "is a bytes_"),
    (np.array((1, 2.0), dtype=[("a", int), ("b", float)]), "is a ndarray"),
    (np.array({"a": 1}, dtype=object), "is a ndarray"),
    (10**5000, "4300 digits"),
    (DEEP, "nested too deeply"),
    (CIRCLE, "nested too deeply, or contains itself"),
    ({1: "a", "1": "b"}, "has the key 1, which is not text; use str()"),
    ({None: 1}, "has the key None"),
    ({True: 1}, "has the key True"),
    ({0.5: 1}, "has the key 0.5"),
    ({Colour.RED: 1}, "has the key <Colour.RED: 3>"),
]


@pytest.mark.parametrize(("value", "kept"), KEPT, ids=[type(value).__name__ for value, _ in KEPT])
def test_a_number_or_text_of_another_type_is_kept_exactly(value: Any, kept: Any) -> None:
    kind, line = report({"x": [value]})

    assert (kind, line["value"]) == (DONE, {"x": [kept]})
    assert type(line["value"]["x"][0]) is type(kept)
    assert item_of("m:f", (value,), {})["args"] == [kept]


@pytest.mark.parametrize(("value", "problem"), REFUSED, ids=[problem for _, problem in REFUSED])
def test_a_value_that_json_would_change_fails_with_its_path(value: Any, problem: str) -> None:
    kind, line = report(as_value([{"x": value}]))

    assert kind == FAILED
    assert problem in line["error"]
    assert line["error"].startswith(
        ("ValueError: value.result[0].x", "ValueError: value is nested")
    )
    with pytest.raises(ValueError, match=re.escape(problem)):
        item_of("m:f", (), {"x": value})


@pytest.mark.torch
def test_a_tensor_without_dimensions_is_kept_exactly_or_refused() -> None:
    torch = pytest.importorskip("torch")
    numbers = [torch.tensor(0.1, dtype=torch.bfloat16), torch.tensor(True), torch.tensor(2**62)]

    kind, line = report({"x": numbers})
    assert (kind, line["value"]) == (DONE, {"x": [0.10009765625, True, 2**62]})
    kind, line = report({"x": torch.tensor(1 + 2j)})
    assert kind == FAILED
    assert "value.x is a Tensor, which JSON does not have" in line["error"]
