"""What torch is asked for, with the CPU in the place of GPUs: products, and a sum of two processes.

Neither CUDA nor NCCL takes part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch")

# In a process of its own: a fork of one in which torch has threads may hang.
PROGRAM = """
import json, sys
from pathlib import Path
from hpc_toolkit.doctor.node import gpus, torchprobe
from hpc_toolkit.doctor.channel import make_area, remove_area
from hpc_toolkit.doctor.partner import Helper
from hpc_toolkit.doctor.sides import LEAD, Pair

torchprobe.NUMBERS = 1024
root = Path(sys.argv[1])
area = make_area(root, "t", LEAD)
helper = Helper(root, area)
pair = Pair(area, arrival_s=10)
answers = gpus.sum_over(pair, (1, 1), device="cpu")
print(json.dumps(answers))
pair.close()
helper.end()
remove_area(area)
"""


# Three GPUs, played by the CPU: the second one does not answer, the third one computes wrongly.
GPUS = """
import json, torch
from hpc_toolkit.doctor.node import torchprobe

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
torchprobe.be_quiet = lambda: None
print(json.dumps(torchprobe.look()))
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


@pytest.mark.torch
def test_two_ranks_meet_through_the_directory_and_sum(tmp_path: Path) -> None:
    answers = told(PROGRAM, str(tmp_path))

    assert [(one.get("right"), one.get("library")) for one in answers] == [(True, "Gloo")] * 2, (
        answers
    )
    assert os.listdir(tmp_path) == []
