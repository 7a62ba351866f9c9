"""Records behave as dataclasses do, and the commands that must start quickly need no others."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.run import Run
from hpc_toolkit.system.record import Record, asdict, fresh, replace


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


def test_only_a_record_that_is_not_frozen_can_be_changed() -> None:
    named, point = Named(at=Point(1)), Point(1)

    named.name = "b"

    assert named == Named(name="b", at=Point(1))
    with pytest.raises(AttributeError, match="Point cannot be changed"):
        point.x = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        named.other = 1


def test_a_changed_copy_is_checked_as_a_new_record() -> None:
    named = Named(name="a", at=Point(1))

    assert replace(named, name="b") == Named(name="b", at=Point(1))
    assert named.name == "a"
    with pytest.raises(ValueError, match="bad name"):
        replace(named, name="bad")


def test_records_inside_of_a_record_become_dicts_as_well() -> None:
    class Many(Record):
        points: tuple[Point, ...]
        by_name: dict[str, Point]

    point = {"x": 1, "y": 2, "tags": {}}

    assert asdict(Many((Point(1),), {"a": Point(1)})) == {
        "points": (point,),
        "by_name": {"a": point},
    }


def test_the_functions_of_dataclasses_take_records() -> None:
    named = Named(name="a", at=Point(1))

    assert [one.name for one in dataclasses.fields(Named)] == ["name", "at"]
    assert dataclasses.asdict(named) == asdict(named)
    assert dataclasses.replace(named, name="b").name == "b"
    assert copy.deepcopy(named) == copy.copy(named) == named


STATUS = """
import sys
from hpc_toolkit.cli import run_plainly
try:
    run_plainly("status", sys.argv[1:])
except SystemExit:
    print(*sys.modules)
"""


def test_status_imports_nothing_that_takes_long(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", [{"a": 1}], command="true")

    asked = [sys.executable, "-c", STATUS, str(run.root)]
    printed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout

    assert "0 of 1" in printed
    assert not set(printed.split()) & {
        *("dataclasses", "inspect", "click", "shutil", "ctypes", "threading", "random", "numpy"),
    }
