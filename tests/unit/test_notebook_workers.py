"""Workers of a run as submitit jobs: shape, pickles, what is found again. No Slurm is asked."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import submitit

from hpc_toolkit import notebook
from hpc_toolkit.errors import ConfigError, HpcToolkitError, RunError
from hpc_toolkit.notebook.executors import LOCAL
from hpc_toolkit.notebook.rank import work_rank
from hpc_toolkit.queue.presence import Presence, PresenceFile
from hpc_toolkit.run import Run
from hpc_toolkit.slurm import client as slurm
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.records import JobRecord
from hpc_toolkit.submit.jobs import own_login, read_jobs
from hpc_toolkit.system.ranks import boot_id, host_name, process_ticks
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


def test_one_function_and_the_path_are_all_that_is_pickled(run: Run) -> None:
    (job,) = notebook.submit_workers(run, 8, cluster=SITE, gpus_per_node=4).jobs

    sent = job.submission()
    assert sent.function is work_rank
    assert (sent.args, sent.kwargs) == ((str(run.root),), {})
    assert job.num_tasks == 8
    names = {path.name for path in (run.root / "submitit").glob("*.pkl")}
    assert names == {"100_submitted.pkl"}


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

    jobs = notebook.submit_workers(run, 6, cluster=site, gpus_per_node=1, array=True)

    assert [script["array"] for script in sbatch.options()] == ["0-3%4", "0-1%2"]
    assert {script["nodes"] + script["ntasks-per-node"] for script in sbatch.options()} == {"11"}
    assert [job.submission().args for job in jobs.jobs] == [(str(run.root),)] * 6


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
    assert not (run.root / "submitit").exists()


def test_an_executor_of_another_shape_is_refused(run: Run, folder: Path) -> None:
    executor = notebook.executor(SITE, folder=folder, nodes=2, gpus_per_node=2)

    with pytest.raises(ConfigError, match="n: 3 workers are not 2 nodes x 2 ranks"):
        notebook.submit_workers(run, 3, executor=executor)
    with pytest.raises(ConfigError, match="executor: cannot be combined"):
        notebook.submit_workers(run, 4, executor=executor, gpus_per_node=2)
    others = submitit.AutoExecutor(folder, cluster="slurm")
    with pytest.raises(ConfigError, match="AutoExecutor was not made by hpc_toolkit"):
        notebook.submit_workers(run, 1, executor=others)


def test_a_complete_run_needs_no_workers(run: Run) -> None:
    assert run.work(1) == 0

    with pytest.raises(RunError, match="is complete"):
        notebook.submit_workers(run, 1, cluster=SITE)


def test_what_is_previewed_is_what_is_sent(run: Run, sbatch: KeptJobs, folder: Path) -> None:
    executor = notebook.executor(SITE, folder=folder, nodes=2, gpus_per_node=2, time=30)
    before = notebook.preview(executor)

    shown = notebook.preview(executor, run)
    assert notebook.preview(executor) == before != shown
    notebook.submit_workers(run, 4, executor=executor)

    assert sbatch.script().rstrip() == shown.rstrip()
    assert subprocess.run(["bash", "-n"], input=shown, text=True, check=False).returncode == 0


AGAIN = ["requeue 9"]


@pytest.mark.parametrize(
    ("step", "left", "environ", "state", "expected"),
    [
        (0, "0", {}, "RUNNING", (0, [])),
        (75, "0", {}, "RUNNING", (0, [])),
        (75, "4", {}, "RUNNING", (0, AGAIN)),
        (137, "4", {}, "RUNNING", (0, AGAIN)),
        (75, "", {}, "RUNNING", (0, AGAIN)),
        (75, "4", {}, "RUNNING 9", (0, AGAIN)),
        (75, "4", {}, "RUNNING 10", (75, [])),
        # Of the job around the one that submitted this one.
        (75, "4", {"SLURM_RESTART_COUNT": "10"}, "RUNNING 0", (0, AGAIN)),
        (75, "4", {}, "CANCELLED", (75, [])),
        (1, "4", {}, "RUNNING", (1, [])),
        (
            *(75, "4", {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}),
            *("RUNNING", (0, ["requeue 7_2"])),
        ),
    ],
)
def test_the_script_requeues_its_job_iff_items_are_left(
    step: int,
    left: str,
    environ: dict[str, str],
    state: str,
    expected: tuple[int, list[str]],
    run: Run,
    folder: Path,
) -> None:
    text = notebook.preview(notebook.executor(SITE, folder=folder), run)
    text, steps = re.subn("^srun .*", f"(exit {step})", text, flags=re.MULTILINE)
    text, counts = re.subn(r"hpctk_left=\$\(.*\) \|\|", f"hpctk_left={left} && false ||", text)
    programs = f"squeue() {{ echo {state}; }}\nscontrol() {{ echo scontrol $*; }}\n"
    if left:
        text = text.replace(" && false", "")

    ended = subprocess.run(
        ["bash", "-c", programs + text],
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "9", **environ},
        capture_output=True,
        text=True,
        check=False,
    )

    said = [line for line in ended.stdout.splitlines() if line.startswith("scontrol")]
    assert (steps, counts) == (1, 1)
    assert (ended.returncode, [line.removeprefix("scontrol ") for line in said]) == expected


@pytest.mark.parametrize(
    ("environ", "asked", "deadline"),
    [
        ({}, "1795250914", "1795250914"),
        ({"SLURM_JOB_END_TIME": "1795250000"}, "1795250914", "1795250000"),
        ({}, "2026-11-21T10:00:00", "none"),
        ({}, "N/A", "none"),
        ({"HPCTK_DEADLINE": "1"}, "", "none"),
    ],
)
def test_the_workers_are_told_when_their_job_ends(
    environ: dict[str, str], asked: str, deadline: str, run: Run, folder: Path
) -> None:
    text = notebook.preview(notebook.executor(SITE, folder=folder), run)
    text = re.sub("^srun .*", 'echo "${HPCTK_DEADLINE-none}"; exit', text, flags=re.MULTILINE)

    ended = subprocess.run(
        ["bash", "-c", f"squeue() {{ echo {asked}; }}\n{text}"],
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "9", **environ},
        capture_output=True,
        text=True,
        check=True,
    )

    assert ended.stdout.strip() == deadline


def test_jobs_are_found_again_by_the_run(run: Run) -> None:
    first = notebook.submit_workers(run, 2, cluster=SITE, gpus_per_node=2)
    notebook.submit_workers(run, 2, cluster=SITE, gpus_per_node=1, array=True)

    found = notebook.WorkerJobs.open(run.root)

    assert [job.job_id for job in found.jobs] == ["100", "101_0", "101_1"]
    assert found.jobs[0].num_tasks == 2
    assert found.jobs[0].paths.folder == first.jobs[0].paths.folder


def test_jobs_are_noted_with_their_name_and_who_submitted_them(
    run: Run, folder: Path, sbatch: KeptJobs
) -> None:
    notebook.submit_workers(run, 1, cluster=SITE, job_name="mine")
    notebook.submit_workers(run, 1, executor=notebook.executor(SITE, folder=folder))

    noted = {job.job: (job.name, job.by) for job in read_jobs(run.paths)}
    names = {number: sbatch.options()[number - 100]["job-name"] for number in (100, 101)}
    assert noted == {str(number): (name, own_login()) for number, name in names.items()}
    assert names[100] == "mine"


def test_a_notebook_cancels_no_job_that_bears_another_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        (tmp_path / "kept").mkdir()
        KeptJobs(tmp_path / "kept", patch)
        jobs = notebook.submit_workers(run, 1, cluster=SITE, job_name="mine")
        jobs.jobs += notebook.submit_workers(run, 2, cluster=SITE, job_name="mine", array=True).jobs
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
    run: Run,
    sbatch: KeptJobs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = notebook.submit_workers(run, 3, cluster=SITE, gpus_per_node=1, array=True)
    monkeypatch.setattr("hpc_toolkit.notebook.jobs._ASK_FIRST_S", 0.0)
    monkeypatch.setattr("hpc_toolkit.notebook.jobs._JOBS_SHOWN", 2)
    ended = {
        "100_0": JobRecord(id="100_0", state="COMPLETED"),
        "100_1": JobRecord(id="100_1", state="FAILED", exit_code=3),
        "100_2": JobRecord(id="100_2", state="CANCELLED"),
    }
    monkeypatch.setattr(slurm, "squeue", lambda _: ended)
    monkeypatch.setattr(
        slurm, "job_states", lambda ids, **_: {one: ended[one] for one in ids if one in ended}
    )
    jobs.jobs[1].paths.stderr.write_text("why")

    assert jobs.watch() is False

    assert capsys.readouterr().out.splitlines()[-3:] == [
        f"job 100_1: FAILED, exit code 3; see {jobs.jobs[1].paths.stderr}",
        "job 100_2: CANCELLED",
        "and 1 more job",
    ]


def test_a_run_without_submissions_says_so(run: Run) -> None:
    with pytest.raises(RunError, match="no workers were submitted"):
        notebook.WorkerJobs.open(run)


def test_a_job_with_a_living_worker_runs_whatever_slurm_says(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = notebook.submit_workers(run, 1, cluster=SITE)
    jobs.jobs += notebook.submit_workers(run, 1, cluster=SITE).jobs
    questions: list[list[str]] = []

    def answer(ids: list[str]) -> dict[str, JobRecord]:
        questions.append(list(ids))
        return {one: JobRecord(id=one, state="PENDING") for one in ids}

    monkeypatch.setattr(slurm, "job_states", answer)
    presence = Presence(
        worker="w",
        host=host_name(),
        boot=boot_id(),
        pid=os.getpid(),
        ticks=process_ticks(os.getpid()),
        rank=0,
        job="100",
    )
    PresenceFile(run.paths.worker("w"), presence)

    assert jobs.states() == {"100": "RUNNING", "101": "PENDING"}
    assert questions == [["101"]]


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
    monkeypatch.setattr("hpc_toolkit.notebook.jobs._ASK_FIRST_S", 0.0)
    state = "RUNNING" if clock else "FAILED"
    monkeypatch.setattr(slurm, "squeue", lambda _: {"100": JobRecord(id="100", state=state)})

    assert jobs.wait(timeout=0.0 if clock else None) is False


def test_silence_of_slurm_is_no_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = notebook.submit_workers(run, 1, cluster=SITE)

    def silent(_: list[str]) -> dict[str, JobRecord]:
        message = "squeue did not answer"
        raise slurm.SlurmError(message)

    monkeypatch.setattr(slurm, "squeue", silent)

    assert jobs._over() is False


def test_interrupts_are_heard_again_after_a_local_submission(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def submit(*_: object) -> Any:
        seen.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    executor: Any = notebook.executor(LOCAL, folder=run.root / "submitit")
    monkeypatch.setattr(executor, "submit", submit)
    before = signal.getsignal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        notebook.submit_workers(run, 1, executor=executor)

    assert seen == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("sbatch")
def test_another_version_of_submitit_is_named_by_its_preview() -> None:
    with pytest.raises(HpcToolkitError, match=r"submitit [\d.]+ does not show"):
        notebook.preview(object())


def test_nothing_is_given_to_sbatch_on_this_machine(folder: Path, run: Run) -> None:
    assert "nothing is given to sbatch" in notebook.preview(
        notebook.executor(LOCAL, folder=folder), run
    )
