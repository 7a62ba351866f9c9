"""Checkpoints that the kernel should have in memory before they are loaded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.workloads import prefetch
from hpc_toolkit.workloads.prefetch import prefetch_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def test_files_of_a_checkpoint_are_read_to_their_end(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own readahead stops early in a large file."""
    directory = fast_dir / "step1"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(3 * 2**20 + 5))
    (directory / "optimizer.pt").write_bytes(bytes(1000))
    monkeypatch.delenv("HPCTK_NODE_CACHE", raising=False)
    sizes: list[int] = []
    real = os.readv

    def readv(fd: int, buffers: Any) -> int:
        sizes.append(real(fd, buffers))
        return sizes[-1]

    monkeypatch.setattr(os, "readv", readv)

    prefetch_checkpoint(fast_dir, "step1")

    assert sum(sizes) == 2 + 3 * 2**20 + 5


@pytest.mark.parametrize("held", [False, True])
def test_a_fifo_in_the_place_of_a_file_is_passed_by(fast_dir: Path, held: bool) -> None:
    """To open one waits for who writes it, for ever; to read one for what is written."""
    path = fast_dir / "model.safetensors"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR) if held else None
    try:
        prefetch._read_ahead(path)
    finally:
        if writer is not None:
            os.close(writer)
