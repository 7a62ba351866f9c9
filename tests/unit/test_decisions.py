"""Decisions in the headers of segments: both shapes, and what is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.bandit import Observation, Pull
from hpc_toolkit.campaign.decisions import SEARCH, Decision, Decisions, read_decisions
from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.items import Segment, encode_segment

TELL = Observation("x", scores={"a": 0.5}, seconds={"a": 2.0}, failed=("b",))


def segment(path: Path, decision: dict[str, Any] | None) -> Segment:
    path.write_bytes(b"".join(encode_segment([{"task": "a"}], group_by=None, decision=decision)))
    return Segment(path, 1)


def test_decisions_are_read_as_they_were_written(tmp_path: Path) -> None:
    whole = Decision(why=SEARCH, number=1, pulls=(Pull("x"), Pull("y")))
    rest: dict[str, Any] = {"wall_s": 12.5, "metrics": {"entropy": [0.5, None]}}
    pulls = (Pull("x", ("c",)), Pull("z"))
    parts = Decision(why=SEARCH, number=2, pulls=pulls, tells=(TELL,), **rest)
    written = [segment(tmp_path / str(n), one.to_json()) for n, one in enumerate([whole, parts])]

    assert read_decisions([segment(tmp_path / "2", None), *written]) == [whole, parts]
    assert "tasks" not in whole.to_json()
    assert parts.to_json()["tasks"] == [["c"], []]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *(({"arms": one}, "'arms' of its decision is ") for one in (None, [1])),
        ({"tells": {}}, "'tells' of its decision is {}"),
        ({"tasks": [["a"], ["b"]]}, "tasks of 2 pulls for 1 arms"),
        ({"tasks": []}, "tasks of 0 pulls for 1 arms"),
        ({"tasks": ["a"]}, "'tasks' of its decision is"),
        ({"number": None}, "'number' of its decision is None"),
        *(({"wall_s": one}, f"'wall_s' of its decision is {one}") for one in (-1, "long")),
        *(({"metrics": one}, "'metrics' of its decision is") for one in ([1], {"m": ["1"]})),
        *(({"tells": [one]}, "a tell .*: not an observation") for one in (3, {"arm": "x"})),
        ({"tells": [{**TELL.to_json(), "scores": {"a": "b"}}]}, "a tell of its decision: arm 'x'"),
    ],
)
def test_damaged_decisions_are_refused_with_their_file(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    decision = {"why": SEARCH, "number": 1, "arms": ["x"], "tells": [], "wall_s": 0.0, **change}

    with pytest.raises(RunError, match=f"000007.jsonl is damaged: line 1: .*{says}"):
        read_decisions([segment(tmp_path / "000007.jsonl", decision)])


def test_what_waits_is_what_was_asked_and_not_told() -> None:
    decisions = Decisions()
    decisions.take(Decision(why=SEARCH, number=1, pulls=(Pull("x", ("a",)), Pull("y"))))
    decisions.told.append(TELL)
    decisions.take(Decision(why=SEARCH, number=2, pulls=(Pull("x", ("c",)),)))

    assert decisions.waiting == [Pull("y"), Pull("x", ("c",))]
    assert decisions.numbers == {Pull("x", ("a",)): 1, Pull("y"): 1, Pull("x", ("c",)): 2}
