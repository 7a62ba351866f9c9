"""Times and sizes: Slurm's grammar exactly, and nothing that means something else than it says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system import quantities as q

if TYPE_CHECKING:
    from collections.abc import Callable

NOT_WALLTIMES = [
    *("", "90m", "1h", "-5", "+5", "1.5", "1:2:3:4", "1-", "-1:00", "1-1:1:1:1", "1:", ":1"),
    *("UNLIMITED", "nan", "inf", "1e3", " 5", "5 ", "5\n", "\u0665"),
]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300),
        ("90", 5400),
        ("1:30", 90),
        ("01:02:03", 3723),
        ("90:00:00", 324000),
        ("1-12", 129600),
        ("0-0:1", 60),
        ("1-2:3", 86400 + 7380),
        ("2-00:00:01", 172801),
    ],
)
def test_parse_walltime_reads_every_form_of_sbatch(text: str, seconds: int) -> None:
    assert q.parse_walltime(text) == seconds


@pytest.mark.parametrize("text", NOT_WALLTIMES)
def test_parse_walltime_of_another_grammar_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--time: .* is not a Slurm time limit") as caught:
        q.parse_walltime(text, where="--time")

    assert "minutes" in caught.value.hint


@pytest.mark.parametrize("text", ["0", "00:00:00", "0-0", "999999999999", "24856-0"])
def test_parse_walltime_of_zero_or_overflow_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="seconds, outside 1"):
        q.parse_walltime(text)


@given(st.integers(1, q.MAX_WALLTIME_S))
def test_walltime_round_trips(seconds: int) -> None:
    assert q.parse_walltime(q.format_walltime(seconds)) == seconds


@pytest.mark.parametrize("seconds", [0, -1, 2**31])
def test_format_walltime_out_of_range_is_refused(seconds: int) -> None:
    with pytest.raises(ConfigError, match="outside 1"):
        q.format_walltime(seconds)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.5", 0.5),
        ("90s", 90),
        ("250 ms", 0.25),
        ("10min", 600),
        ("10m", 600),
        ("1.5h", 5400),
        ("2d", 172800),
        ("1h30min", 5400),
        ("4 min 10 s", 250),
        ("1:30:00", 5400),
        ("1-00:00:30", 86430),
    ],
)
def test_parse_duration_reads_seconds_units_and_clock(text: str, seconds: float) -> None:
    assert q.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "-1s", "nan", "inf", "1e3", "1:30", "1:60:00", "5 weeks", "s", "1h x", "1hh"],
)
def test_parse_duration_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--lease: .* is not a duration"):
        q.parse_duration(text, where="--lease")


def test_parse_duration_of_zero_needs_leave() -> None:
    assert q.parse_duration("0s", zero=True) == 0
    with pytest.raises(ConfigError, match="'0s' is zero"):
        q.parse_duration("0s")


def test_parse_duration_of_more_than_a_lifetime_is_refused() -> None:
    with pytest.raises(ConfigError, match="is too long"):
        q.parse_duration("99999999d")


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
        ("1", 1),
        ("512B", 512),
        ("1K", 1024),
        ("1.5G", 3 * 2**29),
        ("1.5 GiB", 3 * 2**29),
        ("10GB", 10 * 2**30),
        ("2t", 2**41),
        ("1P", 2**50),
    ],
)
def test_parse_size_is_binary(text: str, size: int) -> None:
    assert q.parse_size(text) == size


@pytest.mark.parametrize("parse", [q.parse_size, q.parse_mem_mib])
@pytest.mark.parametrize("text", ["", "-1", "nan", "1E", "G", "1 G G", "1e9", "0x10", "1G\n#"])
def test_size_of_something_else_is_refused(parse: Callable[..., int], text: str) -> None:
    with pytest.raises(ConfigError, match=r"here: .* is not a"):
        parse(text, where="here")


@pytest.mark.parametrize("text", ["0", "0.1", "9999999999999999999", "99999P"])
def test_parse_size_of_zero_or_overflow_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="outside 1 byte"):
        q.parse_size(text)


@pytest.mark.parametrize(
    ("text", "mib"),
    [("1", 1), ("480G", 491520), ("10GB", 10240), ("1T", 2**20), ("1K", 1), ("2m", 2)],
)
def test_parse_mem_mib_follows_sbatch(text: str, mib: int) -> None:
    assert q.parse_mem_mib(text) == mib


def test_parse_mem_mib_of_a_fraction_is_refused_as_sbatch_does() -> None:
    with pytest.raises(ConfigError, match="not a memory size of Slurm"):
        q.parse_mem_mib("1.5G")


def test_parse_mem_mib_of_zero_needs_leave() -> None:
    assert q.parse_mem_mib("0", zero=True) == 0
    with pytest.raises(ConfigError, match="'0' is zero"):
        q.parse_mem_mib("0")


def test_parse_mem_mib_of_an_absurd_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="is too much"):
        q.parse_mem_mib("999999999999T")


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
