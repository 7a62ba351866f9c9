"""Checkpoints of a training: whole or not there, and never loaded half."""

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

torch = pytest.importorskip("torch")

from hpc_toolkit.errors import HpcToolkitError  # noqa: E402
from hpc_toolkit.training.distributed import Checkpoints, ResumableSampler  # noqa: E402

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


KILLED = """
import os, signal, sys, torch
from hpc_toolkit.training.distributed import Checkpoints

def half(content, file):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

toy = Checkpoints(sys.argv[1], {"model": torch.nn.Linear(3, 1)})
toy.save(1)
torch.save = half
toy.save(2)
"""


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)

    assert ended.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 2
    toy = Checkpoints(tmp_path, {"model": torch.nn.Linear(3, 1)})
    restored = toy.restore()
    assert restored is not None
    assert restored.step == 1
    toy.save(2)
    assert names(tmp_path) == ["step-000000001.pt", "step-000000002.pt"]
