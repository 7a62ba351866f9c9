"""Records behave as dataclasses do."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from hpc_toolkit.system.record import Record, asdict, fresh


class Point(Record):
    x: int
    y: int = 2
    tags: dict[str, int] = fresh(factory=dict)


class Named(Record, frozen=False, kw_only=True):
    name: str = ""
    at: Point

    def __post_init__(self) -> None:
        if self.name == "bad":
            message = "bad name"
            raise ValueError(message)


def test_values_come_by_position_by_name_or_from_defaults() -> None:
    assert Point(1) == Point(1, 2, {}) == Point(x=1, y=2)
    assert Point(1) != Point(3)
    assert Point(1) != (1, 2, {})
    assert repr(Named(at=Point(1))) == "Named(name='', at=Point(x=1, y=2, tags={}))"


@pytest.mark.parametrize(
    ("given", "named"),
    [((), {}), ((1, 2, {}, 4), {}), ((1,), {"z": 3}), ((), {"x": 1, "z": 3}), ((), {"y": 1})],
)
def test_a_missing_or_unknown_value_is_refused(given: Any, named: Any) -> None:
    with pytest.raises(TypeError, match="Point takes x, y, tags"):
        Point(*given, **named)
    with pytest.raises(TypeError, match="Named takes name, at"):
        Named("a", Point(1))  # type: ignore[call-arg]


def test_the_functions_of_dataclasses_take_records() -> None:
    named = Named(name="a", at=Point(1))

    assert [one.name for one in dataclasses.fields(Named)] == ["name", "at"]
    assert dataclasses.asdict(named) == asdict(named)
    assert dataclasses.replace(named, name="b").name == "b"
    assert copy.deepcopy(named) == copy.copy(named) == named
