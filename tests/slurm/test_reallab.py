"""What the tests' own lab notices when they clear it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.slurm.conftest import LabUnderTest

pytestmark = [pytest.mark.slow]


def test_a_process_that_a_job_leaves_behind_is_seen_and_ended(
    lab: LabUnderTest, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    # A session of its own, an environment and a parent that Slurm does not know.
    script.write_text("#!/bin/bash\nsetsid sleep 333 </dev/null >/dev/null 2>&1 &\nsleep 0.5\n")
    job = lab.sbatch("--output=/dev/null", "--mem=50M", script, cwd=tmp_path)
    lab.wait_for(job, "COMPLETED")

    with pytest.raises(AssertionError, match=r"left processes behind: sleep \(\d+\) on n1"):
        lab.clear(leaving_s=5.0)

    assert not lab.strays()
