"""sbatch's small languages: what is read, how it is written, and what is refused."""

from __future__ import annotations

import pytest

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.render.values import MAX_INDEX, check_dependency, parse_array


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
        "3-1",
        "0-9:0",
        "0-9%0",
        "0-9%",
        "1,,2",
        "0 - 9",
        "0-9%1%1",
        "\u0661",
    ],
)
def test_an_array_that_sbatch_refuses_is_refused(text: str) -> None:
    with pytest.raises(RenderError, match=r"--array: .* is not accepted") as caught:
        parse_array(text, "--array")

    assert "0-99" in caught.value.hint


def test_an_index_that_no_slurm_has_is_refused() -> None:
    with pytest.raises(RenderError, match="index 4000001 is too high"):
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
