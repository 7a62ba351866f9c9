"""An all_reduce of two processes that find each other through the directory, by Gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch")

# In a process of its own: a fork of one in which torch has threads may hang.
PROGRAM = """
import json, sys
from pathlib import Path
from hpc_toolkit.doctor import gpus, torchprobe
from hpc_toolkit.doctor.area import make_area, remove_area
from hpc_toolkit.doctor.otherside import Helper
from hpc_toolkit.doctor.pair import LEAD, Pair

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


@pytest.mark.torch
def test_two_ranks_meet_through_the_directory_and_sum(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert [(one.get("right"), one.get("library")) for one in answers] == [(True, "Gloo")] * 2, (
        answers
    )
    assert os.listdir(tmp_path) == []
