"""Checkpoints, whole or not there; samples of each rank; the package where nobody launched it."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import DistributedSampler  # noqa: E402 - only where torch is

from hpc_toolkit.errors import ConfigError, HpcToolkitError  # noqa: E402
from hpc_toolkit.training import distributed  # noqa: E402
from hpc_toolkit.training.distributed import Checkpoints, ResumableSampler, group  # noqa: E402

pytestmark = pytest.mark.torch


class Toy:
    """A model with momentum in its optimizer, and a sampler."""

    def __init__(self, directory: Path, *, width: int = 3, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(width, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sampler = ResumableSampler(range(10))
        parts = {"model": self.model, "optimizer": self.optimizer, "sampler": self.sampler}
        self.checkpoints = Checkpoints(directory, parts, **options)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, self.model.in_features)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.sampler.took(1)
        return float(loss.detach())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_training_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    first = Toy(tmp_path)
    first.step()
    first.checkpoints.save(1, note="kept", weight=torch.ones(2))
    expected = [first.step(), first.step(), random.random()]

    second = Toy(tmp_path, seed=9)
    restored = second.checkpoints.restore()

    assert restored is not None
    assert (restored.step, restored.values["note"]) == (1, "kept")
    assert restored.path == tmp_path / "step-000000001.pt"
    assert second.sampler.taken == 1
    assert [second.step(), second.step(), random.random()] == expected


def test_the_latest_are_kept_and_those_that_are_due_are_told(tmp_path: Path) -> None:
    toy = Toy(tmp_path, keep=2, every=5)

    for step in (2, 10, 9):
        toy.checkpoints.save(step)

    assert names(tmp_path) == ["step-000000009.pt", "step-000000010.pt"]
    assert [step for step in range(1, 11) if toy.checkpoints.due(step)] == [5, 10]
    assert toy.checkpoints.saving_s > 0


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    # In the weights themselves, where torch would read on.
    at = data.index(torch.tensor([0.5, 0.25, 0.125]).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)


def encrypted(path: Path) -> None:
    data = bytearray(path.read_bytes())
    # The flags of the first entry of the archive's directory.
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)


def renamed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    # The first letter of that entry's name: no UTF-8, which the flags then promise.
    entry = data.index(b"PK\x01\x02")
    data[entry + 9] |= 8
    data[entry + 46] = 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 200), "not a complete file"),
        (flipped, "damaged in"),
        (encrypted, "not a complete file"),
        (renamed, "not a complete file"),
        (lambda path: path.write_text("not mine"), "not a complete file"),
        (lambda path: torch.save({"format": "another"}, path), "not a checkpoint of format"),
        (lambda path: torch.save(logging.getLogger, path), "cannot load it"),
    ],
)
def test_a_file_that_is_not_whole_or_not_ours_is_skipped_with_its_reason(
    damage: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy = Toy(tmp_path)
    with torch.no_grad():
        toy.model.weight.copy_(torch.tensor([[0.5, 0.25, 0.125]]))
    toy.checkpoints.save(1)
    damage(toy.checkpoints.save(2))

    restored = Toy(tmp_path, seed=1).checkpoints.restore()

    assert restored is not None
    assert restored.step == 1
    [record] = caplog.records
    assert "step-000000002.pt" in record.getMessage()
    assert reason in record.getMessage()


def test_one_that_fits_another_model_or_optimizer_is_an_error_that_names_the_part(
    tmp_path: Path,
) -> None:
    first = Toy(tmp_path)
    first.step()
    first.checkpoints.save(1)
    model = torch.nn.Linear(3, 1)
    parts = {"model": model, "sampler": ResumableSampler(range(10))}

    with pytest.raises(HpcToolkitError, match="does not fit: model"):
        Toy(tmp_path, width=4).checkpoints.restore()
    with pytest.raises(HpcToolkitError, match=r"holds .*'sampler'.* and the training has"):
        Checkpoints(tmp_path, {"model": model}).restore()
    parts["optimizer"] = torch.optim.AdamW(model.parameters())
    with pytest.raises(HpcToolkitError, match="optimizer is SGD there, and AdamW here"):
        Checkpoints(tmp_path, parts).restore()


def test_where_nothing_can_be_written_it_is_an_error_and_the_checkpoints_before_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HpcToolkitError, match="cannot be written"):
        Toy(tmp_path / "file").checkpoints.save(1)
    with pytest.raises(HpcToolkitError, match="keep is 0"):
        Toy(tmp_path, keep=0)
    assert Toy(tmp_path / "absent").checkpoints.restore() is None

    def full(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    toy = Toy(tmp_path / "full")
    toy.checkpoints.save(1)
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(HpcToolkitError, match="No space left on device"):
        toy.checkpoints.save(2)
    assert names(tmp_path / "full") == ["step-000000001.pt"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(content: Any, file: Any) -> None:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    first = Checkpoints(tmp_path, {"model": torch.nn.Linear(3, 1)})
    first.save(1)
    if (child := os.fork()) == 0:
        try:
            monkeypatch.setattr(torch, "save", half)
            first.save(2)
        finally:
            os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(names(tmp_path)) == 2
    toy = Checkpoints(tmp_path, {"model": torch.nn.Linear(3, 1)})
    restored = toy.restore()
    assert restored is not None
    assert restored.step == 1
    toy.save(2)
    assert names(tmp_path) == ["step-000000001.pt", "step-000000002.pt"]


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


def shares(size: int, samples: ResumableSampler) -> list[list[int]]:
    """What each rank of so many takes."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(size):
            patch.setattr(group, "rank_and_size", lambda rank=rank: (rank, size))
            found.append(list(samples))
            assert len(samples) == len(found[-1])
    return found


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
