"""Records of steps, their advice, and the pages, files and exit codes of 'hpctk scaling'."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.scaling import Comparison, compare
from hpc_toolkit.training.scaling.recorder import records_in
from tests.unit import jobcommands


def record(world_size: int, rate: float, repeat: int = 0, **changes: Any) -> dict[str, Any]:
    """A record as a recorder writes it."""
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


def compared(rates: dict[int, tuple[float, ...]], minimum: float = 0.85, **more: Any) -> Comparison:
    """One training with these rates of its repeats."""
    records = [record(n, rate, i) for n, some in rates.items() for i, rate in enumerate(some)]
    (found,) = compare(records, minimum=minimum, **more)
    return found


@pytest.mark.parametrize(
    ("rates", "said", "unsaid"),
    [
        ({1: (1.0,), 4: (4.8,)}, "on 4 the efficiency is 120.0%, more than the ranks exp", "%%"),
        ({1: (10.0, 10.0), 2: (16.0, 19.0)}, "differ too much to tell: 80.0% to 95.0%", "%%"),
        ({1: (10.0, 10.0), 2: (12.0, 16.0)}, "on 2 the efficiency is 70.0%", "differ too much"),
    ],
)
def test_what_is_odd_about_the_rates_is_among_the_reasons(
    rates: dict[int, Any], said: str, unsaid: str
) -> None:
    found = " ".join(compared(rates).reasons())

    assert said in found
    assert unsaid not in found


def test_rows_are_what_the_formulas_say() -> None:
    found = compared({1: (9.0, 10.0, 11.0), 4: (30.0, 32.0, 40.0)}, price=2.0)

    first, row = found.rows
    assert (row.speedup, row.efficiency) == (3.2, 0.8)
    assert (row.low, row.high) == (30 / 11 / 4, 40 / 9 / 4)
    assert row.gpu_hours == pytest.approx(4 * 1000 / 32 / 3600)
    assert row.cost_per_1000 == pytest.approx(2 * row.gpu_hours)
    assert row.premium == pytest.approx(0.25)
    assert (first.efficiency, first.low, first.high, first.premium) == (1, 1, 1, 0)
    assert found.headline.startswith("Use 1, not 4, but measure again: repeats do not agree")


@given(st.floats(0.0, 1.0), st.floats(0.1, 1.0))
def test_the_advice_is_a_world_size_all_of_whose_smaller_ones_are_good_enough(
    share: float, minimum: float
) -> None:
    sizes = (1, 2, 4, 8)
    found = compared({n: (1 / (share + (1 - share) / n),) for n in sizes}, minimum)

    enough = [row.world_size for row in found.rows if row.efficiency >= minimum]
    assert found.advised.world_size == max(enough)
    assert found.below == tuple(n for n in sizes if n not in enough)


def test_the_order_of_reading_changes_nothing_and_the_later_of_two_counts() -> None:
    records = [record(size, 10.0 * size, n) for size in (1, 2, 4) for n in range(3)]
    again = record(2, 5.0, 1, at=9.0)
    mixed = [again, *records]
    random.Random(1).shuffle(mixed)

    (found,) = compare(mixed)

    assert compare([*records, again]) == [found]
    assert (found.rows[1].low, found.rows[1].repeats) == (5.0 / 10 / 2, 3)


def test_a_memory_that_no_float_can_hold_is_left_out() -> None:
    odd = {**record(1, 10.0, 1), "memory": {"rss": float("inf")}}

    found = compare([record(1, 10.0), odd, record(2, 20.0)])

    assert found[0].rows[0].rss_bytes == 1000


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
        ({"repeat": True}, "repeat is True"),
        ({"memory": []}, r"memory is \[\]"),
        ({"machine": {"cpus": "2"}}, "cpus is '2'"),
    ],
)
def test_a_damaged_record_is_named_by_its_line(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        list(records_in(json.dumps({**record(2, 1.0), **change}), "log"))


scaling = partial(jobcommands.call, "scaling")


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "v100.jsonl"
    rates = {1: 100 / 480, 2: 100 / 245, 4: 100 / 128, 8: 100 / 68}
    named = {**record(1, 1.0)["settings"], "model": "a\n# b \033[2J", "seq": 1}
    found = [record(size, rate, settings=named) for size, rate in rates.items()]
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    return str(path)


def test_a_page_has_the_numbers_and_the_advice(table: str) -> None:
    found = scaling("analyze", table, "--price-per-gpu-hour", "3.06")

    assert found.exit_code == 0
    lines = found.stdout.splitlines()
    assert "## a # b \\x1b[2J" in lines  # a name does nothing to a terminal
    (row,) = (line for line in lines if line.startswith("| 8 | 1.471 |"))
    assert "| 7.06 | 88.2% | 1.511 | +13.3% | 4.624 |" in row
    assert "**Use 8** (fair on 8: 88.2% efficiency, at least 85% wanted)" in lines


@pytest.mark.parametrize(("wanted", "code"), [("0.88", 0), ("0.89", 1)])
def test_the_exit_code_says_whether_an_efficiency_is_below(
    table: str, wanted: str, code: int
) -> None:
    assert scaling("analyze", table, "--min-efficiency", wanted).exit_code == code
    assert scaling("analyze", table).exit_code == 0


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("run", "-o", "d", "--backend", "mpi"), "one of nccl, gloo"),
        (("analyze", "x.log", "--price-per-gpu-hour", "nan"), "a number from 0 on"),
        (("analyze", "x.log", "--min-efficiency", "inf"), "a number from 0 on"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_a_usage_error(
    words: tuple[str, ...], wanted: str
) -> None:
    found = scaling(*words)

    assert found.exit_code == 2
    assert f"Invalid value for '{words[-2]}': '{words[-1]}' is not {wanted}" in found.output


def test_a_directory_that_cannot_be_written_to_is_refused_before_a_rank_starts(table: str) -> None:
    found = scaling("run", "-o", f"{table}/d", "x.py")

    assert isinstance(found.exception, ConfigError)
    assert "/d: cannot be written to: Not a directory" in str(found.exception)


def test_what_is_missing_is_measured(tmp_path: Path) -> None:
    (tmp_path / "d/records").mkdir(parents=True)
    known = record(2, 1.0, 1, settings={"arguments": "--lr 1"})
    (tmp_path / "d/records/world-2.jsonl").write_text(json.dumps(known))
    words = ("run", "-o", tmp_path / "d", "--world-sizes", "1,2", "--repeats", "2", "--dry-run")

    found = scaling(*words, "--", "train.py", "--lr", "1")

    assert [line.partition(":")[0] for line in found.stdout.splitlines()] == [
        f"world size {size}, repeat {repeat}" for size, repeat in ((1, 0), (2, 0), (1, 1))
    ]
