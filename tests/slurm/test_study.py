"""An Optuna study whose workers are ranks of a Slurm job that is preempted and loses some."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_toolkit import Run
from tests.integration.realrun import workers_of
from tests.integration.test_study import LINE, TUNE, checked, lines
from tests.slurm.conftest import LabUnderTest
from tests.slurm.rehearsal import MEASURED, Rehearsal, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.soak  # integration/test_study.py kills workers
def test_a_study_on_slurm_has_each_trial_once_after_kills_and_preemption(
    lab: LabUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tune.py").write_text(
        TUNE.replace("kill(trial)\n        if", "kill(trial); time.sleep(0.2)\n        if")
    )
    rehearsal = Rehearsal(lab.lab, tmp_path)
    run = rehearsal.run
    words = {"runs/tune": run, "40": 200}
    rehearsal.hpctk(*(words.get(word, word) for word in LINE), "--workers", 0)
    script = rehearsal.render(nodes=8, ntasks_per_node=1, cpus_per_task=1)

    job = rehearsal.sbatch(script, run)
    for number in (20, 120):
        rehearsal.wait_for_done(number)
        rehearsal.preempt("--nodes=8", "--exclusive", "--mem=0")
        wait_until(lambda: rehearsal.state(job) != "RUNNING", "preemption")
    rehearsal.wait_for_end(job)

    assert rehearsal.exit_code(job) == "0:0", rehearsal.log()
    found, _ = checked(str(run), 200)
    assert [n for n, one in enumerate(found) if one.state.name == "FAIL"] == [13, 19]
    assert len(workers_of(Run.open(run))) >= 3 * 8  # the job began three times
    again = sum(len(calls) > 1 for calls in lines("calls.jsonl").values())
    assert again >= 4
    MEASURED.append(f"study: 200 trials on 8 ranks, {again} repeated with their parameters")
