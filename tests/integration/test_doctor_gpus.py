"""What torch is asked for, with the CPU in the place of GPUs; CUDA takes no part."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

# Two GPUs, played by the CPU: the second one has no memory.
GPUS = """
import json, torch
from hpc_toolkit.doctor import node

cpu, ones = torch.device("cpu"), torch.ones

def allocate(size, device):
    if device == 1:
        raise RuntimeError("CUDA error: out of memory\\nCUDA kernel errors might be reported later")
    return ones(size)

torch.version.cuda = "12.4"
torch.device = lambda kind, index: index
torch.ones = allocate
torch.cuda.init = lambda: None
torch.cuda.device_count = lambda: 2
node._be_quiet = lambda: None
print(json.dumps(node.look_by_torch()))
"""


@pytest.mark.torch
def test_a_gpu_that_computes_is_told_apart_from_one_that_errs() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", GPUS], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)

    assert found["cuda"] == "12.4"
    assert found["gpus"] == ["", "CUDA error: out of memory"]
