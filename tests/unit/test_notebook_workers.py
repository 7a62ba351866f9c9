"""Workers of a run as jobs: their shape, and what is found again. No Slurm is asked."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit import notebook
from hpc_toolkit.errors import HpcToolkitError, RunError
from hpc_toolkit.run import Run
from hpc_toolkit.slurm import client as slurm
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.records import JobRecord
from hpc_toolkit.submit.jobs import own_login, read_jobs
from tests.fakesbatch import KeptJobs
from tests.fakeslurm import Programs, pending_line

SITE = load_cluster("lab")


@pytest.fixture(autouse=True)
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptJobs:
    return KeptJobs(tmp_path, monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    items: list[dict[str, Any]] = [{"seconds": 0, "id": number} for number in range(4)]
    return Run.create(
        tmp_path / "run", items, workload="hpc_toolkit.science.workloads.synthetic:Sleep"
    )


@pytest.mark.parametrize(
    ("n", "resources", "shape"),
    [
        (8, {"gpus_per_node": 4}, (2, 4)),
        (3, {}, (1, 3)),
        (6, {"nodes": 3}, (3, 2)),
        (6, {"ntasks_per_node": 2}, (3, 2)),
        (4, {"gpus_per_node": 4, "ntasks_per_node": 2}, (2, 2)),
    ],
)
def test_workers_are_ranks_of_one_job(
    n: int, resources: Any, shape: tuple[int, int], run: Run, sbatch: KeptJobs
) -> None:
    jobs = notebook.submit_workers(run, n, cluster=SITE, **resources)

    (script,) = sbatch.options()
    assert (int(script["nodes"]), int(script["ntasks-per-node"])) == shape
    assert len(jobs.jobs) == 1


def test_an_array_of_workers_is_jobs_of_one_node(run: Run, sbatch: KeptJobs) -> None:
    site = replace(SITE, max_array_size=4)

    notebook.submit_workers(run, 6, cluster=site, gpus_per_node=1, array=True)

    assert [script["array"] for script in sbatch.options()] == ["0-3", "0-1"]
    assert {script["nodes"] + script["ntasks-per-node"] for script in sbatch.options()} == {"11"}


@pytest.mark.parametrize(
    ("n", "how", "match"),
    [
        (6, {"gpus_per_node": 4}, "n: 6 workers are not 1 node x 4 ranks"),
        (8, {"nodes": 1, "ntasks_per_node": 4}, "n: 8 workers are not 1 node x 4 ranks"),
        (3, {"gpus_per_node": 2, "array": True}, "n: 3 workers are not"),
        (0, {}, "n: 0 is not a number"),
        (True, {}, "n: True is not a number"),
        (2, {"nodes": "2"}, "--nodes: '2'"),
    ],
    ids=str,
)
def test_workers_that_fill_no_nodes_are_refused(n: Any, how: Any, match: str, run: Run) -> None:
    with pytest.raises(HpcToolkitError, match=match):
        notebook.submit_workers(run, n, cluster=SITE, **how)
    assert read_jobs(run.paths) == []


def test_a_complete_run_needs_no_workers(run: Run) -> None:
    assert run.work(1) == 0

    with pytest.raises(RunError, match="is complete"):
        notebook.submit_workers(run, 1, cluster=SITE)


def test_jobs_are_found_again_by_the_run(run: Run) -> None:
    notebook.submit_workers(run, 2, cluster=SITE, gpus_per_node=2, job_name="mine")
    notebook.submit_workers(run, 1, cluster=SITE)

    found = notebook.WorkerJobs.open(run.root)

    noted = [(job.job, job.name, job.by) for job in found.jobs]
    assert noted == [("100", "mine", own_login()), ("101", "work-queue", own_login())]


def test_a_notebook_cancels_no_job_that_bears_another_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        (tmp_path / "kept").mkdir()
        KeptJobs(tmp_path / "kept", patch)
        notebook.submit_workers(run, 1, cluster=SITE, job_name="mine")
        notebook.submit_workers(run, 2, cluster=SITE, job_name="mine", array=True)
        jobs = notebook.WorkerJobs.open(run)
    programs = Programs(tmp_path, monkeypatch)
    lines = [
        pending_line("100", Name="somebody\x1b[2Jelses"),
        pending_line("102", ArrayJobID="101", JobArrayID="101_0", Name="mine"),
        pending_line("101", ArrayJobID="101", JobArrayID="101_1", Name="mine"),
    ]
    programs.answer("squeue", "\n".join(lines))
    programs.answer("scancel", "")

    jobs.cancel()

    assert programs.calls("scancel") == ["101"]
    said = r"job 100 was not cancelled: it is called somebody\x1b[2Jelses, not mine"
    assert said in capsys.readouterr().err


@pytest.fixture
def waiting(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> notebook.WorkerJobs:
    """Workers of a run in job 100, which waits."""
    with monkeypatch.context() as patch:
        (tmp_path / "kept").mkdir()
        KeptJobs(tmp_path / "kept", patch)
        jobs = notebook.submit_workers(run, 1, cluster=SITE, job_name="mine")
    programs = Programs(tmp_path, monkeypatch)
    programs.answer("squeue", pending_line("100", Name="mine"))
    return jobs


WAITS = "no worker is alive, and job 100 waits: other jobs have a higher priority"


def test_a_run_without_workers_shows_what_its_job_waits_for(waiting: notebook.WorkerJobs) -> None:
    assert WAITS in waiting._repr_html_()


@pytest.mark.parametrize("by_jobs", [True, False])
def test_watching_a_job_that_waits_says_what_for(
    by_jobs: bool, waiting: notebook.WorkerJobs, capsys: pytest.CaptureFixture[str]
) -> None:
    if by_jobs:
        assert waiting.watch(timeout=0.0) is False
    else:
        notebook.watch(waiting.run.root, timeout=0.0)

    assert capsys.readouterr().out.splitlines() == ["0 of 4 done; 0 workers", WAITS]


def test_watching_jobs_that_are_over_says_how_each_ended(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = notebook.submit_workers(run, 1, cluster=SITE)
    monkeypatch.setattr("hpc_toolkit.notebook.workers._ASK_FIRST_S", 0.0)
    ended = {"100": JobRecord(id="100", state="FAILED", exit_code=3)}
    monkeypatch.setattr(slurm, "squeue", lambda _, **_how: ended)
    log = Path.cwd() / "slurm/logs/work-queue-100.out"
    log.write_text("why")

    assert jobs.watch() is False

    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"job 100: FAILED, exit code 3; see {log}"


def test_a_run_without_submissions_says_so(run: Run) -> None:
    with pytest.raises(RunError, match="no workers were submitted"):
        notebook.WorkerJobs.open(run)


def test_jobs_show_themselves_with_everything_escaped(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = notebook.submit_workers(run, 1, cluster=SITE)
    hostile = "<script>alert(1)</script>"
    record = JobRecord(id="100", state=hostile)
    monkeypatch.setattr(slurm, "job_states", lambda ids, **_: dict.fromkeys(ids, record))

    shown = jobs._repr_html_()

    assert hostile not in shown
    assert "&lt;script&gt;" in shown


@pytest.mark.parametrize("clock", [True, False])
def test_waiting_ends_in_time_or_with_the_last_job(
    clock: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = notebook.submit_workers(run, 1, cluster=SITE)
    monkeypatch.setattr("hpc_toolkit.notebook.workers._ASK_FIRST_S", 0.0)
    record = JobRecord(id="100", state="RUNNING" if clock else "FAILED")
    monkeypatch.setattr(slurm, "squeue", lambda *_, **_how: {"100": record})

    assert jobs.wait(timeout=0.0 if clock else None) is False


def test_silence_of_slurm_is_no_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = notebook.submit_workers(run, 1, cluster=SITE)

    def silent(*_: object, **_how: object) -> dict[str, JobRecord]:
        message = "squeue did not answer"
        raise slurm.SlurmError(message)

    monkeypatch.setattr(slurm, "squeue", silent)

    assert jobs.are_over() is False


def test_what_is_previewed_is_what_is_sent(run: Run, sbatch: KeptJobs) -> None:
    request: Any = {"cluster": SITE, "nodes": 2, "gpus_per_node": 2, "time": 30}

    shown = notebook.preview(run, **request)
    notebook.submit_workers(run, **request)

    assert sbatch.script().rstrip() == shown.rstrip()
    assert subprocess.run(["bash", "-n"], input=shown, text=True, check=False).returncode == 0
