"""sbatch's small languages: what is read, how it is written, and what is refused."""

from __future__ import annotations

import pytest

from hpc_toolkit.errors import HpcToolkitError, RenderError
from hpc_toolkit.slurm.render.grammar import (
    MAX_INDEX,
    check_dependency,
    parse_array,
    parse_moment,
    parse_switches,
)


@pytest.mark.parametrize(
    ("text", "written", "highest"),
    [
        ("0", "0", 0),
        ("0-99%8", "0-99%8", 99),
        ("1,3,5-9:2", "1,3,5-9:2", 9),
        ("007,012-013", "7,12-13", 13),
        ("5,1", "5,1", 5),
        (f"{MAX_INDEX}", f"{MAX_INDEX}", MAX_INDEX),
    ],
)
def test_an_array_is_written_without_leading_zeros(text: str, written: str, highest: int) -> None:
    found = parse_array(text, "--array")

    assert (found.text, found.highest) == (written, highest)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "-1",
        "3-1",
        "0-9:0",
        "0-9%0",
        "0-9%",
        "0-9%a",
        "1,,2",
        "0 - 9",
        "0-9%1%1",
        "[0-9]",
        "\u0661",
    ],
)
def test_an_array_that_sbatch_refuses_is_refused(text: str) -> None:
    with pytest.raises(RenderError, match=r"--array: .* is not accepted") as caught:
        parse_array(text, "--array")

    assert "0-99" in caught.value.hint


def test_an_index_that_no_slurm_has_is_refused() -> None:
    with pytest.raises(RenderError, match="no Slurm has an index 4000001"):
        parse_array(f"0-{MAX_INDEX + 1}", "--array")


@pytest.mark.parametrize(
    "text",
    [
        *("afterok:1", "afterok:1:2", "afterany:1_3", "afterany:1_*", "after:1", "after:1+5:2+10"),
        *("singleton", "singleton,afterok:2", "afternotok:1?aftercorr:2", "afterburstbuffer:4"),
    ],
)
def test_a_dependency_of_sbatch_is_accepted(text: str) -> None:
    check_dependency(text, "--dependency")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "1",
            "afterok",
            "afterok:",
            "afterok:a",
            "afterok:0",
            "afterok:1+5",
            "after:1+",
            "bogus:1",
        ),
        *("afterok:1,afterany:2?after:3", "afterok:1,", "singleton:1", "afterok:1 ", "AFTEROK:1"),
    ],
)
def test_a_dependency_that_sbatch_refuses_or_guesses_is_refused(text: str) -> None:
    with pytest.raises(RenderError, match=r"--dependency: .* is not accepted"):
        check_dependency(text, "--dependency")


@pytest.mark.parametrize(
    ("text", "written", "kind"),
    [
        ("now", "now", "now"),
        ("now+60", "now+60seconds", "now"),
        ("now+1hour", "now+1hours", "now"),
        ("2030-01-31", "2030-01-31T00:00:00", "date"),
        ("2030-01-31T18:30", "2030-01-31T18:30:00", "date"),
        ("2030-01-31 18:30:15", "2030-01-31T18:30:15", "date"),
        ("18:00", "18:00:00", "clock"),
        ("4:05pm", "16:05:00", "clock"),
        ("12:00 AM", "00:00:00", "clock"),
        ("12:30PM", "12:30:00", "clock"),
        ("teatime", "16:00:00", "clock"),
        ("tomorrow", "tomorrow", "clock"),
        ("tomorrow 9:30", "tomorrow09:30:00", "clock"),
    ],
)
def test_a_moment_is_written_in_full(text: str, written: str, kind: str) -> None:
    found = parse_moment(text, "--begin")

    assert (found.text, found.kind) == (written, kind)


@pytest.mark.parametrize(
    "text",
    [
        *("", "yesterday", "2030-02-30", "2030-13-01", "01/02/30", "010230", "24:00", "9", "9:60"),
        *(
            "13:00PM",
            "0:30am",
            "now-1hour",
            "now+1fortnight",
            "now+1:00",
            "2030-01-31T25:00",
            "todayx",
        ),
    ],
)
def test_a_moment_that_is_none_or_could_be_two_is_refused(text: str) -> None:
    with pytest.raises(RenderError, match=r"--begin: .* is not accepted"):
        parse_moment(text, "--begin")


def test_moments_of_one_kind_can_be_compared() -> None:
    first, second = (parse_moment(text, "x").seconds for text in ("2030-01-31", "2030-02-01"))

    assert second - first == 86400
    assert parse_moment("now+2weeks", "x").seconds == 14 * 86400


@pytest.mark.parametrize(("text", "written"), [("2", "2"), ("1@90", "1@01:30:00")])
def test_switches_have_a_canonical_time(text: str, written: str) -> None:
    assert parse_switches(text, "--switches") == written


@pytest.mark.parametrize("text", ["0", "a", "1@", "1@x", "@5"])
def test_switches_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(HpcToolkitError, match="--switches"):
        parse_switches(text, "--switches")
