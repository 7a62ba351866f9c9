"""hpctk lab runs a real Slurm, keeps it to this machine, and leaves nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.slurm.reallab import LabUnderTest


def test_a_job_sees_its_nodes_names(lab: LabUnderTest, tmp_path: Path) -> None:
    job = lab.sbatch("--nodes=3", f"--output={tmp_path}/log", "--wrap=srun hostname", cwd=tmp_path)

    record = lab.wait_for(job)

    assert record.state == "COMPLETED"
    assert sorted(lab.output(record).split()) == ["n1", "n2", "n3"]
