"""Ranks of a training as a launcher would start them, with their store held by the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.integration.realrun import REPOSITORY

HIDDEN = ("SLURM", "HPCTK", "TORCHELASTIC", "PET_")


def run_ranks(size: int, program: Path, *args: str, expected: int = 0) -> list[str]:
    """Run ``size`` ranks of a program on this machine; return what each printed to stdout.

    With one rank nobody launches it: it is alone. All ranks exit with ``expected``.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not in its __all__

    # The port is the store's own, so that no other test can take it first.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    around = {key: value for key, value in os.environ.items() if not key.startswith(HIDDEN)}
    around |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    processes: list[subprocess.Popen[str]] = []
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
            process = subprocess.Popen(
                [sys.executable, str(program), *args],
                env={**around, **(place if size > 1 else {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
        printed = []
        for process in processes:
            out, err = process.communicate()
            assert process.returncode == expected, f"exit code {process.returncode}: {err}"
            printed.append(out)
        return printed
    finally:
        for process in processes:
            process.kill()
            process.wait()
