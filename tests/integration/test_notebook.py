"""Workers from a notebook on this machine, by submitit's local executor; and what a rank does."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_toolkit import notebook
from hpc_toolkit.queue.presence import Presence, read_presence
from hpc_toolkit.run import Run
from tests.documents import REPOSITORY
from tests.integration.realrun import Hpctk, Started, lives, rows_by_id, wait_until, workers_of
from tests.notebooks import EXAMPLE, execute

# What submitit's main does before it calls the function.
RANK = """
import signal, sys
for sig in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
    signal.signal(sig, lambda *_: print("submitit's own handler", flush=True))
from hpc_toolkit.notebook.rank import work_rank
code = work_rank(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
print("gave", code, flush=True)
sys.exit()
"""


def rank(hpctk: Hpctk, run: Run, *workers: int, **env: str) -> Started:
    """A process that is one rank of a job, or a local job with so many workers."""
    step = {} if workers else {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}
    return hpctk.start(run.root.absolute(), *workers, first=RANK, env={**step, **env})


def working(run: Run, count: int = 1) -> list[Presence]:
    """The workers, once there are so many and an item is done."""

    def busy() -> list[Presence]:
        # A file may be there and still be empty.
        read = (read_presence(path) for path in run.paths.workers.glob("*.json"))
        found = [presence for presence in read if presence is not None]
        return found if len(found) >= count and run.status().stages["items"].done else []

    return wait_until(busy, "workers to work")


def rank_of(pid: int) -> int:
    """The process above a worker that submitit started."""
    while b"submitit" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        stat = Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
    return pid


def test_a_rank_is_one_worker_of_its_step(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(3)

    ended = rank(hpctk, run).ended()

    assert (ended.code, ended.out.strip()) == (0, "gave 0")
    (worker,) = workers_of(run)
    assert (worker["rank"], worker["job"], worker["done"]) == (3, "9", 3)


@pytest.mark.parametrize("sig", [signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_all_processes_of_a_step_drains_it(hpctk: Hpctk, sig: signal.Signals) -> None:
    run = hpctk.make_sleeping(100, 0.05)
    started = rank(hpctk, run)
    working(run)

    # As Slurm does: the rank, the worker and its executor get it, each in a group of its own.
    for pid in hpctk._marked():
        with suppress(ProcessLookupError):
            os.kill(pid, sig)
    ended = started.ended()

    assert (ended.code, ended.out) == (75, "")
    status = run.status()
    assert (status.workers.finished, status.workers.dead, status.deaths) == (1, 0, 0)
    assert status.stages["items"].claimed == 0
    assert 0 < status.stages["items"].done < 100


def test_a_time_limit_of_a_local_job_asks_for_another_start(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(100, 0.05)
    # The notebook itself runs in a step, of which its workers are no ranks.
    started = rank(hpctk, run, 2, SLURM_JOB_ID="9", SLURM_STEP_ID="0")
    working(run, 2)

    started.send(signal.SIGUSR2)

    assert started.ended().code == 144  # submitit.local.local.LOCAL_REQUEUE_RETURN_CODE


def test_an_error_of_the_workers_is_the_error_of_the_rank(hpctk: Hpctk) -> None:
    run = hpctk.make([{} for _ in range(30)], "sample_workloads:fail")

    ended = rank(hpctk, run).ended()

    assert ended.code == 1
    assert "HpcToolkitError" in ended.err
    assert "ended with exit code 1" in ended.err
    assert "error: " in ended.err


def test_the_workers_leave_when_their_rank_is_killed(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(2000, 0.05)
    started = rank(hpctk, run)
    (worker,) = working(run)

    started.send(signal.SIGKILL)
    started.ended()

    wait_until(lambda: not lives(worker.pid), "the worker to leave")
    assert run.status().workers.finished == 1


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

    assert jobs.states() == {jobs.jobs[0].job_id: "RUNNING"}
    assert jobs.wait()
    assert jobs.jobs[0].results() == [0]
    assert {row["state"] for row in rows_by_id(run).values()} == {"done"}
    assert len(workers_of(run)) == 2
    found = notebook.WorkerJobs.open(run)
    assert found.states() == {jobs.jobs[0].job_id: "FINISHED"}


@pytest.mark.slow
def test_cancelled_local_workers_give_their_items_back(local: Hpctk) -> None:
    run = local.make_sleeping(1000, 0.05)
    jobs = notebook.submit_workers(run, 2, cluster="local")
    working(run, 2)

    jobs.cancel()

    assert jobs.wait() is False
    status = run.status()
    assert (status.workers.finished, status.deaths, status.stages["items"].claimed) == (2, 0, 0)


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


def test_a_rank_whose_submitter_is_gone_starts_no_worker(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(3)
    # A number that another process has by now.
    other = f"submitter=({os.getpid()}, 1)"
    first = RANK.replace("else None)", f"else None, {other})")

    ended = hpctk.start(run.root.absolute(), 1, first=first).ended()

    assert (ended.code, ended.out) == (75, "")
    assert workers_of(run) == []


REOPENED = """
import json, sys
from hpc_toolkit.notebook import WorkerJobs
jobs = WorkerJobs.open("run")
print(json.dumps(list(jobs.states().values())), flush=True)
if len(sys.argv) > 1:
    jobs.cancel()
sys.exit()
"""


@pytest.mark.slow
def test_another_session_leaves_local_workers_to_a_drain(local: Hpctk) -> None:
    run = local.make_sleeping(1000, 0.05)
    jobs = notebook.submit_workers(run, 1, cluster="local")
    (worker,) = working(run)

    seen = local("cancel", first=REOPENED)

    assert seen.json == ["unknown"]
    said = f"note: job {jobs.jobs[0].job_id} is not ours to end: 'hpctk drain run' asks all workers"
    assert seen.err.startswith(said)
    assert lives(worker.pid)
    jobs.cancel()
    assert jobs.wait() is False


@pytest.mark.slow
def test_a_local_job_starts_again_after_its_time_limit(local: Hpctk) -> None:
    # Open, so that it cannot be complete before the limit, however slowly the workers start.
    run = local.make_sleeping(120, 0.1, open_end=True)
    jobs = notebook.submit_workers(run, 1, cluster="local")
    (worker,) = working(run)

    # What submitit's controller does at the limit. A real limit may come before the rank listens.
    os.kill(rank_of(worker.pid), signal.SIGUSR2)
    working(run, 2)
    run.seal()

    assert jobs.wait()
    jobs.jobs[0].wait()
    assert {worker["state"] for worker in workers_of(run)} == {"finished"}
    assert len(rows_by_id(run)) == 120


NUMPY = """
import sys, time
from hpc_toolkit import notebook
def loaded():
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    return {file for file in files if "numpy" in file and file.endswith(".so")}
notebook.watch("run", 0)
first = loaded()
while notebook.watch("run", 0).eta_s is None:
    time.sleep(0.1)
print(sorted(loaded() - first), flush=True)
sys.exit()
"""


def test_numpy_is_loaded_before_the_first_look(hpctk: Hpctk) -> None:
    # Its compiled modules can be loaded only once in a process, and an interrupt may cut it.
    run = hpctk.make_sleeping(100, 0.05, open_end=True)
    watching = hpctk.start(first=NUMPY)
    wait_until(lambda: "of 100 done" in watching.printed(), "the first look")
    worker = hpctk.start("work", "run")

    seen = watching.ended()

    assert (seen.code, seen.out.splitlines()[-1]) == (0, "[]"), seen.err
    run.seal()
    assert worker.ended().code == 0


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
assert jobs.wait()
print(jobs.jobs[0].result(), flush=True)
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

    assert (ended.code, ended.out.splitlines()[-2:]) == (0, ["interrupted", "0"]), ended.err
    assert len(workers_of(run)) == 1
    assert run.status().deaths == 0


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
