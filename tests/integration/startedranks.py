"""Ranks of a training as a launcher would start them, with their store held by the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.integration.realrun import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Ranks:
    """Processes that are the ranks of one training."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes

    def ended(self, expected: int = 0) -> list[str]:
        """Wait for all; what each printed to stdout."""
        printed = []
        for process in self.processes:
            out, err = process.communicate()
            assert process.returncode == expected, f"exit code {process.returncode}: {err}"
            printed.append(out)
        return printed


@contextmanager
def ranks(size: int, program: Path, *args: str) -> Iterator[Ranks]:
    """Start ``size`` ranks of a program on this machine; none of them is left afterwards.

    With one rank nobody launches it: it is alone.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not in its __all__

    # The port is the store's own, so that no other test can take it first.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = Ranks([])
    hidden = ("SLURM", "HPCTK", "TORCHELASTIC", "PET_")
    around = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    try:
        for rank in range(size):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            started.processes.append(
                subprocess.Popen(
                    [sys.executable, str(program), *args],
                    env={
                        **around,
                        **(place if size > 1 else {}),
                        "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": str(REPOSITORY),
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield started
    finally:
        for process in started.processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
