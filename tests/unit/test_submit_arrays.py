"""Arrays with more elements than Slurm takes are split, and no index is lost or made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.render.values import parse_array
from hpc_toolkit.submit.submission import Chunk
from hpc_toolkit.submit.submission import split_array as split_parsed


def split_array(array: str, limit: int) -> list[Chunk]:
    """Split what was parsed."""
    return split_parsed(parse_array(array, "--array"), limit)


def indices(array: str) -> list[int]:
    """What sbatch makes of a list, sorted."""
    found: set[int] = set()
    for part in array.partition("%")[0].split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        found |= set(range(int(first), int(last or first) + 1, int(step or 1)))
    return sorted(found)


def test_an_array_that_does_not_fit_is_split() -> None:
    assert split_array("0-2500%50", 1000) == [
        Chunk("0-999%50", 0),
        Chunk("0-999%50", 1000),
        Chunk("0-500%50", 2000),
    ]
    assert split_array("5,4990-5010", 1000) == [
        Chunk("5", 0),
        Chunk("990-999", 4000),
        Chunk("0-10", 5000),
    ]


@given(
    parts=st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 200), st.integers(1, 50)), min_size=1
    ),
    limit=st.integers(1, 120),
)
def test_the_parts_of_an_array_are_the_array(parts: list[tuple[int, int, int]], limit: int) -> None:
    array = ",".join(f"{first}-{first + more}:{step}" for first, more, step in parts)

    chunks = split_array(array, limit)

    found = [index + chunk.offset for chunk in chunks for index in indices(chunk.array)]
    assert sorted(found) == indices(array)
    assert all(max(indices(chunk.array)) < limit for chunk in chunks)


@pytest.mark.parametrize("limit", [1001, 1000])
def test_an_end_that_is_no_index_is_left_out_where_slurm_takes_none_so_high(limit: int) -> None:
    found = split_array("0-1001:2", limit)

    assert [one for part in found for one in indices(part.array)][:500] == list(range(0, 1000, 2))
    assert all(int(chunk.array.partition("-")[2].partition(":")[0] or 0) < limit for chunk in found)


def test_an_array_of_millions_is_refused_with_a_way_out() -> None:
    with pytest.raises(RenderError, match="more than 1000 arrays") as caught:
        split_array("0-4000000", 1000)
    assert "run" in caught.value.hint
