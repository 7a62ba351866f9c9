"""The ranks of a step on one node share the import of packages, whatever else they are given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import REPOSITORY
from tests.slurm.reallab import LabUnderTest

pytestmark = [pytest.mark.slow]

PACKAGE = """
import os
with open("imports", "a") as file: print(os.getpid(), file=file)
"""
SOURCE = """
import heavy
import os, signal, time
def run(item):
    names = "SLURM_PROCID", "SLURM_LOCALID", "CUDA_VISIBLE_DEVICES"
    found = [os.environ.get(name) for name in names]
    open(f"rank-{found[0]}", "w").close()
    while sum(name.startswith("rank-") for name in os.listdir()) < 4: time.sleep(0.02)
    if not os.path.exists(f"died-{item['i']}"):
        open(f"died-{item['i']}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return found
"""


@pytest.mark.parametrize("option", ["--gpus-per-task=1", "--gpus-per-node=4", "--mpi=pmi2"])
def test_ranks_of_a_step_share_one_import_on_slurm(
    lab: LabUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def run(item): pass\n")
    items = [{"i": number} for number in range(8)]
    hpctk = [sys.executable, "-m", "hpc_toolkit"]
    Path("items.jsonl").write_text("".join(f'{{"i": {one["i"]}}}\n' for one in items))
    made = ["run", "--workload", "mine:run", "--items", "items.jsonl", "--items-per-claim", "1"]
    lab.run(*hpctk, "init", *made)
    Path("mine.py").write_text(SOURCE)
    Path("site-packages").mkdir()
    Path("site-packages/heavy.py").write_text(PACKAGE)
    found = f"PYTHONPATH={tmp_path}/site-packages:{REPOSITORY}"

    step: list[str | Path] = ["--dir", lab.directory, "srun", "-N1", "-n4", option]
    done = lab.run(*hpctk, "lab", "exec", *step, "env", found, *hpctk, "work", "run", check=False)

    assert done.returncode == 0, done.stderr
    assert "note: " not in done.stderr
    assert len(Path("imports").read_text().split()) == 1
    values = [row["value"] for row in Run.open("run").results()]
    assert {value[0] for value in values} == {"0", "1", "2", "3"}
    assert all(value[0] == value[1] for value in values)
    gpus = {value[2] for value in values}
    assert len(gpus) == (1 if option == "--mpi=pmi2" else 4)
