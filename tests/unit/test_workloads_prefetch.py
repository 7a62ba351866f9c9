"""Checkpoints that the kernel should have in memory before they are loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.science.workloads import checkpoints
from hpc_toolkit.science.workloads.checkpoints import prefetch_checkpoint


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
        checkpoints._read_ahead(path)
    finally:
        if writer is not None:
            os.close(writer)


_PREFETCH = """
import sys
from hpc_toolkit.science.workloads.checkpoints import prefetch_checkpoint
prefetch_checkpoint(sys.argv[1], "step1")
print({"torch", "transformers", "numpy"} & set(sys.modules))
"""


def test_to_prefetch_a_directory_imports_no_torch(fast_dir: Path) -> None:
    """A second thread must not import it while the first one does."""
    (fast_dir / "step1").mkdir()
    (fast_dir / "step1" / "config.json").write_text("{}")
    (fast_dir / "step1" / "model.safetensors").write_bytes(b"")

    argv = [sys.executable, "-c", _PREFETCH, str(fast_dir)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=True)

    assert ended.stdout == "set()\n"
