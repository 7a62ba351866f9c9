"""What torch is asked for, with the CPU in the place of GPUs; CUDA takes no part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch")

# Three GPUs, played by the CPU: the second one does not answer, the third one computes wrongly.
GPUS = """
import json, torch
from hpc_toolkit.doctor.node import gpus

asked = []

def memory(device):
    asked.append(device)
    if len(asked) == 2:
        raise RuntimeError("CUDA error: out of memory\\nCUDA kernel errors might be reported later")
    return 1 << 30, 1 << 31

cpu, back = torch.device("cpu"), torch.Tensor.cpu
torch.version.cuda = "12.4"
torch.device = lambda kind, index: cpu
torch.cuda.init = lambda: None
torch.cuda.device_count = lambda: 3
torch.cuda.mem_get_info = memory
torch.cuda.get_device_name = lambda device: "stand-in"
torch.Tensor.cpu = lambda numbers: back(numbers) + (len(asked) == 3)
gpus._be_quiet = lambda: None
print(json.dumps(gpus.look_by_torch()))
"""


def told(program: str, *words: str) -> Any:
    """What a program prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.torch
def test_every_gpu_multiplies_and_is_told_apart_from_one_that_errs() -> None:
    found = told(GPUS)

    first, second, third = found["gpus"]
    assert found["cuda"] == "12.4"
    assert (first["name"], first["right"], first["free"]) == ("stand-in", True, 1 << 30)
    assert second == {"error": "CUDA error: out of memory"}
    assert third["right"] is False
