"""Workers of a run as jobs: their shape, and what is found again. No Slurm is asked."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import submitit

from hpc_toolkit import notebook
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.run import Run
from hpc_toolkit.slurm import client as slurm
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.records import JobRecord
from hpc_toolkit.submit.jobs import read_jobs
from tests.fakesbatch import KeptJobs
from tests.fakeslurm import Programs, pending_line

SITE = load_cluster("lab")


@pytest.fixture(autouse=True)
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptJobs:
    return KeptJobs(tmp_path, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    items: list[dict[str, Any]] = [{"seconds": 0, "id": number} for number in range(4)]
    return Run.create(
        tmp_path / "run", items, workload="hpc_toolkit.science.workloads.synthetic:Sleep"
    )


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


def test_an_executor_of_another_shape_is_refused(run: Run, folder: Path) -> None:
    executor = notebook.executor(SITE, folder=folder, nodes=2, gpus_per_node=2)

    with pytest.raises(ConfigError, match="n: 3 workers are not 2 nodes x 2 ranks"):
        notebook.submit_workers(run, 3, executor=executor)
    with pytest.raises(ConfigError, match="executor: cannot be combined"):
        notebook.submit_workers(run, 4, executor=executor, gpus_per_node=2)
    others = submitit.AutoExecutor(folder, cluster="slurm")
    with pytest.raises(ConfigError, match="AutoExecutor was not made by hpc_toolkit"):
        notebook.submit_workers(run, 1, executor=others)


def test_what_is_previewed_is_what_is_sent(run: Run, sbatch: KeptJobs, folder: Path) -> None:
    executor = notebook.executor(SITE, folder=folder, nodes=2, gpus_per_node=2, time=30)
    before = notebook.preview(executor)

    shown = notebook.preview(executor, run)
    assert notebook.preview(executor) == before != shown
    notebook.submit_workers(run, 4, executor=executor)

    assert sbatch.script().rstrip() == shown.rstrip()
    assert subprocess.run(["bash", "-n"], input=shown, text=True, check=False).returncode == 0


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
