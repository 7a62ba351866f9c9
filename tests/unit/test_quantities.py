"""Times and sizes: Slurm's grammar exactly, and nothing that means something else than it says."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system import quantities as q

DURATIONS = [
    ("90s", 90),
    ("250 ms", 0.25),
    ("10min", 600),
    ("10m", 600),
    ("1.5h", 5400),
    ("2d", 172800),
    ("1h30min", 5400),
    ("4 min 10 s", 250),
    ("1:30:00", 5400),
    ("90:00:00", 324000),
    ("1-12", 129600),
    ("1-2:3", 86400 + 7380),
    ("1-00:00:30", 86430),
]
"""Durations that every option reads."""

NOT_TIMES = [
    *("", "x", "-5", "-1s", "+5", "1:2:3:4", "1-", "-1:00", "1-1:1:1:1", "1:", ":1", "s", "1hh"),
    *("UNLIMITED", "nan", "inf", "1e3", " 5", "5 ", "5\n", "5s\n", "\u0665", "5 weeks", "1h x"),
]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [*DURATIONS, ("5", 300), ("90", 5400), ("1:30", 90), ("0-0:1", 60), ("2-00:00:01", 172801)],
)
def test_parse_walltime_reads_durations_and_every_form_of_sbatch(text: str, seconds: float) -> None:
    assert q.parse_walltime(text) == math.ceil(seconds)


@pytest.mark.parametrize(
    ("parse", "texts", "message"),
    [
        (q.parse_walltime, [*NOT_TIMES, "1.5"], "--x: .* is not a time limit"),
        (q.parse_duration, [*NOT_TIMES, "1:30"], "--x: .* is not a duration"),
    ],
)
def test_times_of_another_grammar_are_refused(
    parse: Callable[..., float], texts: list[str], message: str
) -> None:
    for text in texts:
        with pytest.raises(ConfigError, match=message) as caught:
            parse(text, where="--x")
        assert "min" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((zero, "zero") for zero in ("0", "0:0", "00:00:00", "0-0", "0s")),
        *((large, "too large") for large in ("999999999999", "24856-0", "99999999d")),
    ],
)
def test_parse_walltime_of_zero_or_overflow_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"time: '{text}' is {problem}"):
        q.parse_walltime(text)


@given(st.integers(1, q.MAX_WALLTIME_S))
def test_walltime_round_trips(seconds: int) -> None:
    assert q.parse_walltime(q.format_walltime(seconds)) == seconds


@pytest.mark.parametrize(("text", "seconds"), DURATIONS)
def test_parse_duration_reads_units_and_clock(text: str, seconds: float) -> None:
    assert q.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "90", "0.5", "00"])
def test_parse_duration_of_a_bare_number_is_refused_with_the_fix(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--every: '{text}' has no unit") as caught:
        q.parse_duration(text, where="--every")

    assert caught.value.hint == f"write {text}s, {text}min or {text}h"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0321, "32 ms"),
        (0.9996, "1.0 s"),
        (3.21, "3.2 s"),
        (59.97, "1 min 00 s"),
        (250, "4 min 10 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (86399, "1 d 00 h"),
        (100 * 3600, "4 d 04 h"),
        (-3.2, "-3.2 s"),
        (math.nan, "unknown"),
        (math.inf, "unknown"),
    ],
)
def test_format_duration_is_short(seconds: float, text: str) -> None:
    assert q.format_duration(seconds) == text


@given(st.floats(0.001, 1e8))
def test_format_duration_parses_back_within_its_precision(seconds: float) -> None:
    parsed = q.parse_duration(q.format_duration(seconds))

    # Half of the last unit shown: a millisecond, 0.1 s, a second, a minute or an hour.
    steps = ((1, 0.001), (60, 0.1), (3600, 1), (86400, 60), (math.inf, 3600))
    step = next(step for below, step in steps if seconds < below)
    assert abs(parsed - seconds) <= step * 0.51


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1B", 1),
        ("512B", 512),
        ("1K", 1024),
        ("1.5G", 3 * 2**29),
        ("1.5 GiB", 3 * 2**29),
        ("10GB", 10 * 2**30),
        ("64Gi", 2**36),
        ("2t", 2**41),
        ("1P", 2**50),
    ],
)
def test_parse_size_is_binary(text: str, size: int) -> None:
    assert q.parse_size(text) == size


@pytest.mark.parametrize("parse", [q.parse_size, q.parse_mem_mib])
@pytest.mark.parametrize(
    "text", ["", "-1", "nan", "1E", "G", "1 G G", "1e9", "0x10", "1G\n#", "1\u212a"]
)
def test_size_of_something_else_is_refused(parse: Callable[..., int], text: str) -> None:
    with pytest.raises(ConfigError, match=r"here: .* is not a"):
        parse(text, where="here")


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        *(("480G", 491520), ("10GB", 10240), ("1T", 2**20), ("1K", 1), ("2m", 2)),
        *(("1.5G", 1536), ("1P", 2**30), ("512 MiB", 512)),
    ],
)
def test_sizes_in_mib_are_rounded_up(text: str, mib: int) -> None:
    assert q.parse_size_mib(text) == q.parse_mem_mib(text) == mib


@given(st.integers(0, 2**39))
def test_mem_round_trips(mib: int) -> None:
    assert q.parse_mem_mib(q.format_mem(mib), zero=True) == mib


@given(st.integers(1, 2**53))
def test_format_size_parses_back_within_its_precision(size: int) -> None:
    assert q.parse_size(q.format_size(size)) == pytest.approx(size, rel=0.06)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**60, "1024.0 PiB"),
        (-1, "-1 B"),
    ],
)
def test_format_size_is_short(size: int, text: str) -> None:
    assert q.format_size(size) == text
