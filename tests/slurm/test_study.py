"""An Optuna study whose workers are ranks of a Slurm job that is preempted and loses some."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.test_study import LINE, TUNE, checked, lines
from tests.slurm.rehearsal import MEASURED, Rehearsal, wait_until

if TYPE_CHECKING:
    from tests.slurm.conftest import LabUnderTest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_study_on_slurm_has_each_trial_once_after_kills_and_preemption(
    lab: LabUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tune.py").write_text(TUNE)
    rehearsal = Rehearsal(lab.lab, tmp_path, {"PAUSE": "0.3"})
    run = rehearsal.run
    rehearsal.hpctk(*(run if word == "runs/tune" else word for word in LINE), "--workers", 0)
    script = rehearsal.render(nodes=3, ntasks_per_node=1, cpus_per_task=1)

    job = rehearsal.sbatch(script, run)
    rehearsal.wait_for_done(8)
    rehearsal.preempt("--nodes=8", "--exclusive", "--mem=0")
    wait_until(lambda: rehearsal.state(job) != "RUNNING", "preemption")
    rehearsal.wait_for_end(job)

    assert rehearsal.exit_code(job) == "0:0", rehearsal.log()
    found, _ = checked(str(run), 40)
    assert [n for n, one in enumerate(found) if one.state.name == "FAIL"] == [13, 19]
    again = sum(len(calls) > 1 for calls in lines("calls.jsonl").values())
    assert again >= 4
    MEASURED.append(f"study: 40 trials on 3 ranks, {again} repeated with their parameters")
