"""What the table says of a run."""

from __future__ import annotations

from typing import Any

from tests.sharedfs.outcome import standstill


def _line(kind: str, unit: str, by: str, at: float) -> dict[str, Any]:
    return {"type": kind, "unit": unit, "by": by, "at": at}


def test_standstill_is_the_longest_gap_of_those_who_had_items() -> None:
    records = [
        _line("done", "1-0", "living", 9.0),
        _line("done", "1-1", "living", 11.0),
        _line("done", "1-2", "hit", 13.0),
        _line("done", "1-3", "living", 15.5),
        _line("done", "1-1", "living", 16.0),
        _line("death", "1-4", "living", 60.0),
        _line("done", "1-4", "living", 61.0),
    ]

    assert standstill(records, {"living"}, since=10.0) == 4.5


def test_standstill_begins_with_the_disturbance() -> None:
    assert standstill([_line("done", "1-0", "living", 17.0)], {"living"}, since=10.0) == 7.0
