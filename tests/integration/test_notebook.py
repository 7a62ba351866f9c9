"""Workers from a notebook on this machine."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hpc_toolkit import notebook
from hpc_toolkit.queue.presence import Presence, read_presence
from hpc_toolkit.run import Run
from tests.documents import REPOSITORY
from tests.integration.realrun import Hpctk, lives, rows_by_id, wait_until, workers_of
from tests.notebooks import EXAMPLE, execute


def working(run: Run, count: int = 1) -> list[Presence]:
    """The workers, once there are so many and an item is done."""

    def busy() -> list[Presence]:
        # A file may be there and still be empty.
        read = (read_presence(path) for path in run.paths.workers.glob("*.json"))
        found = [presence for presence in read if presence is not None]
        return found if len(found) >= count and run.status().stages["items"].done else []

    return wait_until(busy, "workers to work")


@pytest.fixture
def local(hpctk: Hpctk, monkeypatch: pytest.MonkeyPatch) -> Hpctk:
    """Processes that this one starts are looked for at the end, as those of commands are."""
    for name, value in hpctk.environment().items():
        monkeypatch.setenv(name, value)
    return hpctk


@pytest.mark.slow
def test_local_workers_drain_a_run_and_are_found_again(local: Hpctk) -> None:
    run = local.make_sleeping(20, 0.02)

    jobs = notebook.submit_workers(run, 2, cluster="local")

    (job,) = jobs.jobs
    assert jobs.states() == {job.job: "RUNNING"}
    assert jobs.wait(30)
    assert {row["state"] for row in rows_by_id(run).values()} == {"done"}
    assert len(workers_of(run)) == 2
    found = notebook.WorkerJobs.open(run)
    wait_until(lambda: found.states() == {job.job: "FINISHED"}, "the job to end")


SUBMITTER = """
import os, sys, time
from hpc_toolkit import notebook
notebook.submit_workers("run", 1, cluster="local")
while not os.path.exists("enough"):
    time.sleep(0.05)
sys.exit()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["killed", "by itself"])
def test_local_workers_leave_when_the_script_that_submitted_them_ends(
    ends: str, hpctk: Hpctk
) -> None:
    run = hpctk.make_sleeping(4000, 0.05)
    script = hpctk.start(first=SUBMITTER)
    (worker,) = working(run)

    if ends == "killed":
        script.send(signal.SIGKILL)
    else:
        (hpctk.cwd / "enough").touch()
    script.ended()

    wait_until(lambda: not lives(worker.pid), "the worker to leave")
    status = run.status()
    assert (status.workers.finished, status.deaths) == (1, 0)


@pytest.mark.slow
def test_a_local_job_ends_at_its_time_limit(
    local: Hpctk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The notebook itself runs in a step, of which its workers are no ranks.
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "0")
    run = local.make_sleeping(1000, 0.05)

    jobs = notebook.submit_workers(run, 2, cluster="local", time="0:05")

    assert jobs.watch(30) is False
    assert "INTERRUPTED, exit code 75; see " in capsys.readouterr().out.splitlines()[-1]
    assert [worker["state"] for worker in workers_of(run)] == ["finished", "finished"]


INTERRUPTED = """
import os, signal, sys, time
from hpc_toolkit import notebook
from hpc_toolkit.queue.presence import read_presence
jobs = notebook.submit_workers("run", 1, cluster="local")
try:
    print("watching", flush=True)
    notebook.watch("run")
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(jobs.wait(30), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_interrupting_the_notebook_stops_no_local_worker(hpctk: Hpctk) -> None:
    # Open, so that it cannot be complete before the interrupt.
    run = hpctk.make_sleeping(10, 0.05, open_end=True)
    started = hpctk.start(first=INTERRUPTED)
    working(run)
    # An interrupt in the middle of an import can be lost; the first look is behind all of them.
    wait_until(lambda: " of 10 done" in started.printed(), "the notebook to watch")

    # A notebook's interrupt goes to the group of its kernel.
    os.killpg(started.pid, signal.SIGINT)
    wait_until(lambda: "interrupted" in started.printed(), "the interrupt")
    run.seal()
    ended = started.ended()

    assert (ended.code, ended.out.splitlines()[-2:]) == (0, ["interrupted", "True"]), ended.err
    assert len(workers_of(run)) == 1
    assert run.status().deaths == 0


@pytest.mark.soak  # tests/slurm/test_notebook.py runs it
@pytest.mark.slow
def test_the_example_works_on_this_machine(hpctk: Hpctk, tmp_path: Path) -> None:
    environ = hpctk.environment({"HPCTK_CLUSTER": "local", "CUDA_VISIBLE_DEVICES": "5,7"})

    done = execute(EXAMPLE, tmp_path, environ)

    assert "nothing is given to sbatch" in done.text("preview")
    assert "WorkerJobs(" in done.text("submit")
    assert "48 of 48" in done.html("watch")
    assert "complete" in done.html("watch")
    host = os.uname().nodename
    assert done.text("rows") == repr([(host, "5"), (host, "7")])

    again = execute(EXAMPLE, tmp_path, environ)

    assert "WorkerJobs(" in again.text("submit")
    assert again.text("rows") == done.text("rows")


def test_the_example_is_kept_with_outputs_of_no_real_machine() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")

    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["execution_count"] for cell in code)
    assert "48 of 48" in text
    assert not any(word in text for word in ("/root", "/tmp", str(REPOSITORY)))
