"""Two tasks of one step examine a directory together, and Slurm's settings are read from itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hpc_toolkit.lab.settings import CLUSTER_NAME
from tests.slurm.conftest import LabUnderTest
from tests.toyrun import ToyRun


def test_two_nodes_of_a_step_examine_a_run_and_one_kernel_proves_nothing_of_two(
    lab: LabUnderTest, tmp_path: Path
) -> None:
    toy = ToyRun(tmp_path / "run")

    done = lab.run(
        *("srun", "-N2", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem-per-cpu=100M"),
        *(sys.executable, "-m", "hpc_toolkit", "doctor", toy.root, "--json"),
        env={"OMP_NUM_THREADS": "1"},
    )

    report = json.loads(done.stdout)  # the second task prints nothing
    found = {one["check"]: one for one in report["findings"]}
    assert [side["host"] for side in report["sides"]] == ["n1", "n2"]
    assert (report["apart"], report["locks_proven"]) == (False, False)
    assert found["sides"]["verdict"] == "unknown"
    assert found["sides"]["found"] == "n1 and n2: both sides use one mount of one kernel"
    assert found["exclusive names"]["verdict"] == "fine"
    assert found["locks (flock)"]["verdict"] == "fine"
    assert not toy.paths.doctor.exists(), "what proves nothing is not kept"
    assert found["slurm"]["verdict"] == "fine"
    assert f"of cluster {CLUSTER_NAME} answered" in found["slurm"]["found"]
    assert not list(toy.root.glob(".hpctk-doctor-*"))
