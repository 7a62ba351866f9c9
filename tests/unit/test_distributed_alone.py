"""The package in a process that nobody launched, and which samples each of several ranks takes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import DistributedSampler  # noqa: E402 - only where torch is

from hpc_toolkit.errors import ConfigError, HpcToolkitError  # noqa: E402
from hpc_toolkit.training import distributed  # noqa: E402
from hpc_toolkit.training.distributed import ResumableSampler, group  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_collectives_give_copies_and_name_what_they_cannot_do() -> None:
    own = torch.tensor([1.0, 2.0], requires_grad=True)

    for found in (distributed.all_reduce(own), distributed.all_reduce(own, "average")):
        assert found.tolist() == [1.0, 2.0]
        assert not found.requires_grad
        assert found.data_ptr() != own.data_ptr()
    whole = torch.tensor([1, 2])
    with pytest.raises(HpcToolkitError, match=r"average of torch.int64"):
        distributed.all_reduce(whole, "average")
    with pytest.raises(HpcToolkitError, match="no reduction 'mean'"):
        distributed.all_reduce(whole, "mean")  # type: ignore[arg-type] # what is refused


def test_there_is_no_group_and_the_model_stays_bare() -> None:
    model = torch.nn.Linear(2, 2)

    with distributed.process_group("gloo") as info:
        wrapped = distributed.wrap_model(model)
        with distributed.accumulating(wrapped, 0, 2):
            pass
        with pytest.raises(HpcToolkitError, match="pass 2 is not one of the 2"):
            distributed.accumulating(model, 2, 2)
        assert distributed.get_distributed_info() is info
        assert not torch.distributed.is_initialized()

    assert (info.backend, info.device, info.world_size) == ("", "cpu", 1)
    assert wrapped is model
    assert distributed.unwrapped(wrapped) is model


@pytest.mark.parametrize(
    ("named", "told"), [("glo", "no backend 'glo'"), ("nccl", "torch sees none")]
)
def test_a_backend_that_cannot_be_used_is_refused(
    named: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("HPCTK_BACKEND", named)

    with pytest.raises(ConfigError, match=told), distributed.process_group():
        pass


def test_ranks_that_nobody_tells_where_to_meet_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)

    with (
        pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT") as caught,
        distributed.process_group("gloo"),
    ):
        pass

    assert "hpctk launch" in caught.value.hint


def test_leaving_writes_out_what_was_printed_and_tears_nothing_down() -> None:
    code = (
        "import atexit, threading, time\n"
        "from hpc_toolkit.training.distributed import leave\n"
        "atexit.register(print, 'torn down')\n"
        "threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        "print('said', end='')\n"
        "leave(75)\n"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert (ended.returncode, ended.stdout) == (75, b"said")


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
