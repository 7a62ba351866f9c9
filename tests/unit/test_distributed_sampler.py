"""Which samples ranks take, from any position of an epoch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import DistributedSampler  # noqa: E402 - only where torch is

from hpc_toolkit.errors import HpcToolkitError  # noqa: E402
from hpc_toolkit.training.distributed import ResumableSampler, group  # noqa: E402

pytestmark = pytest.mark.torch


def taken_by(rank: int, size: int, samples: ResumableSampler) -> list[int]:
    """What a rank of so many takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "rank_and_size", lambda: (rank, size))
        found = list(samples)
        assert len(samples) == len(found)
    return found


def shares(size: int, samples: ResumableSampler) -> list[list[int]]:
    return [taken_by(rank, size, samples) for rank in range(size)]


@pytest.mark.parametrize("remainder", ["pad", "drop"])
@pytest.mark.parametrize("length", [2, 12, 13])
def test_a_whole_epoch_is_that_of_torchs_sampler(remainder: Any, length: int) -> None:
    own = ResumableSampler(range(length), seed=3, remainder=remainder)
    own.set_epoch(2)

    for rank, found in enumerate(shares(4, own)):
        torchs: Any = DistributedSampler(
            range(length),  # type: ignore[arg-type] # it asks for the length alone
            num_replicas=4,
            rank=rank,
            seed=3,
            drop_last=remainder == "drop",
        )
        torchs.set_epoch(2)
        assert found == list(torchs)


@given(
    length=st.integers(1, 40),
    taken=st.integers(0, 40),
    size=st.integers(1, 5),
    remainder=st.sampled_from(["pad", "drop"]),
)
def test_the_rest_of_an_epoch_is_what_was_not_taken(
    length: int, taken: int, size: int, remainder: Any
) -> None:
    whole = list(ResumableSampler(range(length)))
    own = ResumableSampler(range(length), remainder=remainder)
    own.took(taken)

    found = [sample for share in shares(size, own) for sample in share]

    rest = whole[min(taken, length) :]
    if remainder == "drop":
        assert sorted(found) == sorted(rest[: len(rest) // size * size])
    else:
        assert set(rest) <= set(found)
        assert len(found) == -(-len(rest) // size) * size


@given(before=st.integers(1, 4), after=st.integers(1, 4), steps=st.integers(0, 4))
def test_global_batches_go_on_with_another_number_of_ranks(
    before: int, after: int, steps: int
) -> None:
    def batches(samples: ResumableSampler, size: int) -> list[set[int]]:
        per_rank = 12 // size
        by_rank = shares(size, samples)
        return [
            {s for share in by_rank for s in share[i : i + per_rank]}
            for i in range(0, len(by_rank[0]) // per_rank * per_rank, per_rank)
        ]

    first = ResumableSampler(range(61), remainder="drop")
    undisturbed = batches(first, before)
    first.took(12 * steps)
    second = ResumableSampler(range(61), remainder="drop")
    second.load_state_dict(first.state_dict())

    assert batches(second, after) == undisturbed[steps:]


def test_a_position_holds_for_its_epoch_and_its_samples_alone() -> None:
    own = ResumableSampler(range(10))
    own.took(4)
    state = own.state_dict()

    own.set_epoch(0)
    assert len(own) == 6
    own.set_epoch(1)
    assert len(own) == 10
    with pytest.raises(HpcToolkitError, match="sampler has samples 10, this one 11"):
        ResumableSampler(range(11)).load_state_dict(state)
    with pytest.raises(HpcToolkitError, match="sampler has seed 0, this one 1"):
        ResumableSampler(range(10), seed=1).load_state_dict(state)
    with pytest.raises(HpcToolkitError, match="no remainder 'padded'"):
        ResumableSampler(range(10), remainder="padded")  # type: ignore[arg-type] # what is refused
