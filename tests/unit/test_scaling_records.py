"""Records of measurements: what is read of directories, files and logs of pods."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.scaling.analysis import Analysis
from hpc_toolkit.training.scaling.comparison import compare, judge
from hpc_toolkit.training.scaling.records import (
    records_in,
    series_of,
)


def record(world_size: int, rate: float, repeat: int = 0, **changes: Any) -> dict[str, Any]:
    """A record as a recorder writes it, with few of its numbers."""
    plain: dict[str, Any] = {
        "kind": "hpctk.scaling",
        "format": 1,
        "world_size": world_size,
        "nodes": 1,
        "repeat": repeat,
        "settings": {"model": "train.py", "arguments": "", "batch_size": 8, "weak": False},
        "machine": {"device": "cpu", "cpus": 2},
        "samples_per_s": rate,
        "tokens_per_s": 128 * rate,
        "step_s": {"median": 8 / rate, "p90": 9 / rate},
        "memory": {"rss": 1000},
        "at": 1.0,
    }
    return {**plain, **changes}


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(one) + "\n" for one in records)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({}, ""),
        ({"trained_parameters": 1024}, "1,024 parameters are trained"),
        ({"trained_parameters": 10, "parameters": 10}, "10 parameters, all of them trained"),
        (
            {"trained_parameters": 1024, "parameters": 47072},
            "1,024 of 47,072 parameters are trained (2.18%), 46,048 are frozen",
        ),
    ],
)
def test_trained_and_frozen_parameters_are_on_the_page_and_in_the_data(
    counts: dict[str, int], text: str
) -> None:
    (series,) = series_of([record(size, 10.0 * size, **counts) for size in (1, 2)])
    comparison = compare(series)
    analysis = Analysis([(comparison, judge(comparison))])

    shown = [line for line in analysis.as_markdown().splitlines() if "parameters" in line]

    assert shown == [f"- {text}"] * bool(text)
    (found,) = json.loads(analysis.as_json())["series"]
    assert [counts.items() <= row.items() for row in found["rows"]] == [True, True]


def test_repeats_become_one_point_and_their_medians_its_details() -> None:
    odd = {**record(2, 20.0, 1), "memory": {"rss": float("inf")}}
    (series,) = series_of([record(1, 10.0), record(2, 16.0), odd])

    assert [point.rates for point in series.points] == [(10.0,), (16.0, 20.0)]
    assert series.points[1].details["tokens_per_s"] == 128 * 18
    assert series.points[1].details["rss_bytes"] == 1000  # what no float can hold is left out


def test_the_order_of_reading_changes_nothing_and_the_later_of_two_counts() -> None:
    records = [record(size, 10.0 * size, n) for size in (1, 2, 4) for n in range(3)]
    again = record(2, 5.0, 1, at=9.0)
    mixed = [again, *records]
    random.Random(1).shuffle(mixed)

    assert compare(series_of(mixed)[0]) == compare(series_of([*records, again])[0])
    for order in (mixed, [again, *records], [*records, again]):
        assert series_of(order)[0].points[1].rates == (5.0, 20.0, 20.0)


def test_lines_of_a_pods_log_are_found_behind_prefixes_and_among_other_text() -> None:
    text = (
        "Downloading...\n"
        '{"step": 3}\n'
        f"2026-01-01T10:00:00.1Z [pod/scaling-2-0-abcde/train] {json.dumps(record(2, 9.0))}\n"
        f"[rank 0] {json.dumps(record(2, 8.0, 1))} \n"
        f"{json.dumps(record(2, 7.0, 2))[:-40]}\n"
        'hpctk.scaling {"kind": "else"}\n'
        '{"kind": "hpctk.scaling", "a": ' + "[" * 100_000 + "\n"
    )

    assert [one["samples_per_s"] for one in records_in(text, "log")] == [9.0, 8.0]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": 2}, r"log:1: format 2 is not 1"),
        ({"samples_per_s": 0}, "samples_per_s is 0"),
        ({"tokens_per_s": float("nan")}, "tokens_per_s is nan"),
        ({"samples_per_s": 10**400}, "samples_per_s is 1000"),
        ({"world_size": 0}, "world_size is 0"),
        ({"nodes": "2"}, "nodes is '2'"),
        ({"repeat": True}, "repeat is True"),
        ({"memory": []}, r"memory is \[\]"),
        ({"machine": {"cpus": "2"}}, "cpus is '2'"),
    ],
)
def test_a_damaged_record_is_named_by_its_line(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        list(records_in(json.dumps({**record(2, 1.0), **change}), "log"))
