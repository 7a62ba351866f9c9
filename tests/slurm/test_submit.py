"""submit, status, logs, cancel and doctor on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hpc_toolkit.lab.daemons import Host, start
from hpc_toolkit.lab.settings import CLUSTER_NAME, LabSettings
from hpc_toolkit.lab.state import read_record
from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.slurm import client as slurm
from hpc_toolkit.worker.slurmliveness import judge
from tests.integration.realrun import HANG_S, lives
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import wait_until
from tests.slurm.templatesite import ODD, Site
from tests.toyrun import ToyRun

T = TypeVar("T")
SMALL = ("--cluster", "lab", "--mem", "1G", "--time", "5", "--cpus-per-task", "1")


def test_a_job_is_submitted_shown_and_cancelled(desk: Site) -> None:
    run = desk.init()
    (job,) = desk.sent(*SMALL, "--run", run, "--sbatch=hold")

    text = desk.call("status", run).stdout

    assert f"  job {job:<9} PENDING (JobHeldUser)\n" in text
    assert f"and job {job} waits: it is held: 'scontrol release {job}' lets it go" in text
    cancelled = desk.call("cancel", run, "--yes")
    assert cancelled.stdout == f"{job}\n"
    assert desk.known_jobs(run)[job]["state"] == "CANCELLED"
    again = desk.call("cancel", run, "--yes", check=False)
    assert again.returncode == 1
    assert again.stderr.startswith(f"error: no job of {run} is in the queue\n")


@pytest.mark.slow
def test_srun_in_an_item_starts_its_step_beside_that_of_the_ranks(desk: Site) -> None:
    command = """timeout 60 srun --nodes=1 --ntasks=1 echo '{{"n": 1}}'"""
    desk.call("init", "runs/a", "--command", command, "--count", "4", "--max-attempts", "1")
    (job,) = desk.sent(*SMALL, "--run", "runs/a", "--nodes", "1", "--gpus-per-node", "2")
    desk.lab.wait_for(job, "COMPLETED")

    rows = desk.call("gather", "runs/a").stdout.splitlines()
    assert [json.loads(row)["value"] for row in rows] == [{"n": 1}] * 4


def test_a_submitted_job_does_the_work_and_its_log_is_found(desk: Site) -> None:
    run = desk.init(8)
    (job,) = desk.sent(*SMALL, "--run", run, "--nodes", "2", "--gpus-per-node", "2")
    desk.lab.wait_for(job, "COMPLETED")

    status = desk.status(run)

    assert (status["complete"], status["stages"]["items"]["done"]) == (True, 8)
    shown = desk.known_jobs(run)[job]
    assert (shown["state"], shown["restarts"]) == ("COMPLETED", 0)
    assert shown["end"] - shown["start"] < 60
    assert re.fullmatch(r"n\[\d-\d\]|n\d,n\d|n\[\d,\d\]", shown["nodes"])
    assert f"work-queue[{job}.0] run={run}" in desk.call("logs", run, "--job", job).stdout
    (copy,) = (desk.cwd / run / "jobs").glob("*.sbatch")
    assert desk.lab.scontrol("show", "job", job).count(str(copy)) >= 1
    refused = desk.call("submit", *SMALL, "--run", run, check=False)
    assert refused.returncode == 1
    assert "is complete: no items are left" in refused.stderr


@pytest.mark.parametrize("runs", [("a",), pytest.param((), marks=pytest.mark.soak), ("a", "b")])
def test_a_rendered_script_goes_to_sbatch_without_a_run(desk: Site, runs: tuple[str, ...]) -> None:
    for name in runs:
        desk.init(8, run=f"runs/{name}")
    words = [sys.executable, "-m", "hpc_toolkit", "render", *SMALL]
    words += ["--nodes", "2", "--gpus-per-node", "2"]

    done = desk.lab.run("sh", "-c", f'sbatch "$({shlex.join(words)})"', cwd=desk.cwd)

    record = desk.lab.wait_for(done.stdout.split()[-1], "COMPLETED", "FAILED")
    if len(runs) == 1:
        assert "note: the script works on runs/a" in done.stderr
        assert json.loads(desk.call("status", "--json").stdout)["complete"]
    else:
        assert "submit it with: sbatch slurm/work-queue.sbatch RUN" in done.stderr
        assert (record.state, record.exit_code) == ("FAILED", 1)
        assert "error: no run directory" in desk.lab.output(record)


def test_a_script_that_names_no_job_is_found_again(desk: Site) -> None:
    run = desk.init()
    own = desk.cwd / "own.sbatch"
    own.write_text("#!/bin/bash\n#SBATCH --mem=100M --output=%x-%j.out\necho hello; sleep 300\n")
    (job,) = desk.sent(own, "--run", run)
    desk.lab.wait_for(job, "RUNNING")
    logs = ("logs", run, "--job", job)
    wait_until(lambda: "hello" in desk.call(*logs, check=False).stdout, "the output")

    assert (desk.cwd / f"own.sbatch-{job}.out").is_file()
    assert desk.known_jobs(run)[job]["state"] == "RUNNING"
    assert desk.call("cancel", run, "--yes").stdout == f"{job}\n"


def test_a_job_submits_a_job_that_inherits_nothing_of_it(desk: Site) -> None:
    # srun ends with an error where both kinds of memory limit are in its environment.
    outer, inner = desk.cwd / "outer.sbatch", desk.cwd / "inner.sbatch"
    hpctk = shlex.join([sys.executable, "-m", "hpc_toolkit", "submit", str(inner)])
    options = "--mem-per-cpu=100M --cpus-per-task=3 --output=outer.out"
    outer.write_text(f"#!/bin/bash\n#SBATCH {options}\n{hpctk} > inner.id\n")
    inner.write_text("#!/bin/bash\n#SBATCH --mem=200M --output=inner.out\nset -e\nsrun env\n")
    (job,) = desk.sent(outer)
    desk.lab.wait_for(job, "COMPLETED")

    inner_job = (desk.cwd / "inner.id").read_text().strip()

    desk.lab.wait_for(inner_job, "COMPLETED")
    seen = (desk.cwd / "inner.out").read_text().splitlines()
    assert f"SLURM_JOB_ID={inner_job}" in seen
    assert not [line for line in seen if line.startswith("SLURM_MEM_PER_CPU=")]


@pytest.mark.slow
def test_a_chain_runs_in_order(desk: Site) -> None:
    record = desk.cwd / "order"
    program = (
        f'echo "begin $SLURM_JOB_ID" >> {record}; sleep 0.3; echo "end $SLURM_JOB_ID" >> {record}'
    )
    words = ("--jobs", "3", "--dependency", "singleton", "--no-requeue")
    jobs = desk.sent("command", *SMALL, *words, "--", "bash", "-c", program)
    for job in jobs:
        desk.lab.wait_for(job, "COMPLETED")

    lines = record.read_text().splitlines()

    assert lines == [f"{what} {job}" for job in jobs for what in ("begin", "end")]


@pytest.mark.slow
def test_a_node_that_failed_is_left_out_of_the_next_submission(desk: Site) -> None:
    run = desk.init()
    own = desk.cwd / "own.sbatch"
    own.write_text(
        "#!/bin/bash\n#SBATCH --mem=1G --nodelist=n3 --no-requeue --output=own.out\n"
        "touch began\nexec sleep 300\n"
    )
    (job,) = desk.sent(own, "--run", run)
    # Slurm may miss what a script starts in the moment in which it is killed.
    wait_until((desk.cwd / "began").exists, lambda: desk.lab.scontrol("show", "job", job))
    desk.lab.scontrol("update", "nodename=n3", "state=down", "reason=test")
    desk.lab.wait_for(job, "NODE_FAIL")

    again = desk.call("submit", *SMALL, "--run", run, "--sbatch=hold")

    note = "note: n3 is left out (--no-exclude-failed takes it): "
    assert f"{note}job {job} ended with NODE_FAIL" in again.stderr
    assert "ExcNodeList=n3\n" in desk.lab.scontrol("show", "job", again.stdout.strip())
    record = desk.cwd / run / "jobs" / f"{again.stdout.strip()}.json"
    assert json.loads(record.read_text())["excluded"] == ["n3"]
    taken = desk.sent(*SMALL, "--run", run, "--sbatch=hold", "--no-exclude-failed")
    assert "ExcNodeList=(null)\n" in desk.lab.scontrol("show", "job", taken[0])

    # A job that is held is not tested by Slurm.
    every = desk.call("submit", *SMALL, "--nodes", "8", "--run", run)

    assert "note: n3 may be allocated after all" in every.stderr
    assert "Requested node configuration is not available" in every.stderr
    assert "ExcNodeList=(null)\n" in desk.lab.scontrol("show", "job", every.stdout.strip())


def test_slurm_says_of_a_suspended_job_that_it_is(
    desk: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = desk.cwd / "own.sbatch"
    own.write_text("#!/bin/bash\n#SBATCH --mem=100M --output=own.out\nsleep 300\n")
    (job,) = desk.sent(own)
    desk.lab.wait_for(job, "RUNNING")
    desk.lab.scontrol("suspend", job)
    monkeypatch.setenv("SLURM_CONF", str(desk.lab.slurm_conf))
    presence = Presence(worker="w", host="n1", boot="b", pid=1, rank=0, job=job)

    (notice,) = judge([presence], slurm.job_states([job]), {})

    assert (notice.explained, notice.final) == ("suspended", False)
    desk.lab.scontrol("resume", job)


@pytest.fixture
def own_lab(lab_directory: Path) -> Iterator[LabUnderTest]:
    """A lab whose controller may be stopped."""
    with LabUnderTest(lab_directory / "own", LabSettings(nodes=1, gpus_per_node=1)) as started:
        yield started


def _controller(lab: LabUnderTest) -> int:
    """The process of slurmctld."""
    (pid_file,) = re.findall(r"SlurmctldPidFile *= *(\S+)", lab.scontrol("show", "config"))
    return int(Path(pid_file).read_text(encoding="ascii"))


def _restart_controller(lab: LabUnderTest) -> None:
    record = read_record(lab.lab.paths)
    assert record is not None
    host = Host(lab.lab.paths, record.start)
    argv = ["slurmctld", "-f", str(lab.slurm_conf)]
    start(host, "slurmctld", argv, log="slurmctld").wait()


def while_away(lab: LabUnderTest, seconds: float | None, *, hangs: bool, act: Callable[[], T]) -> T:
    """Do something in a thread while the controller hangs, or is shut down.

    It is away for ``seconds``; None: until ``act`` has ended.
    """
    if seconds is None or seconds < 10:
        # Otherwise Slurm's programs would wait so long themselves.
        with lab.slurm_conf.open("a") as file:
            file.write("MessageTimeout=2\n")
    controller = _controller(lab)
    os.kill(controller, signal.SIGSTOP if hangs else signal.SIGTERM)
    if not hangs:
        wait_until(lambda: not lives(controller), "the controller to end")
    with ThreadPoolExecutor(1) as pool:
        try:
            doing = pool.submit(act)
            if seconds is None:
                return doing.result(HANG_S)
            time.sleep(seconds)
        finally:
            if hangs:
                os.kill(controller, signal.SIGCONT)
            else:
                _restart_controller(lab)
        return doing.result(HANG_S)


_AWAY = [
    pytest.param(5, id="short"),
    pytest.param(60, id="full", marks=pytest.mark.soak),
]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("seconds", _AWAY)
# The next test has it end instead.
@pytest.mark.parametrize("hangs", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_controller_that_is_away_makes_no_job_twice_and_loses_none(
    own_lab: LabUnderTest, tmp_path: Path, seconds: float, *, hangs: bool
) -> None:
    desk = Site(own_lab, tmp_path, "runs/a")
    run = desk.init()

    def queue() -> list[str]:
        return own_lab.run("squeue", "-h", "--states=all", "-o", "%i %T").stdout.splitlines()

    def act(*words: str, until: float | None = seconds) -> subprocess.CompletedProcess[str]:
        return while_away(own_lab, until, hangs=hangs, act=lambda: desk.call(*words))

    sent = act("submit", *SMALL, "--run", run, "--sbatch=hold")
    job = sent.stdout.strip()
    assert queue() == [f"{job} PENDING"], sent.stderr
    assert "sbatch is tried again" in sent.stderr

    status = json.loads(act("status", run, "--json", until=None).stdout)
    assert [(one["id"], one["state"]) for one in status["jobs"]] == [(job, "unknown")]
    assert desk.known_jobs(run)[job]["state"] == "PENDING"

    cancelled = act("cancel", run, "--yes")
    assert (cancelled.stdout, queue()) == (f"{job}\n", [f"{job} CANCELLED"]), cancelled.stderr


@pytest.mark.soak  # the test above has such a controller
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("seconds", _AWAY)
def test_a_job_starts_again_once_although_the_controller_is_away(
    own_lab: LabUnderTest, tmp_path: Path, seconds: float
) -> None:
    desk = Site(own_lab, tmp_path, "runs/a")
    # The first start requeues the job after its teardown, which waits for the file.
    (tmp_path / "wait.sh").write_text(": > up; until [ -e go ]; do sleep 0.1; done")
    script = "[ -e again ] || { : > again; exit 75; }"
    wait = ("--teardown", "bash wait.sh")
    (job,) = desk.sent("command", *SMALL, *wait, "--", "bash", "-c", script)
    wait_until((tmp_path / "up").exists, "the teardown")

    while_away(own_lab, seconds, hangs=False, act=(tmp_path / "go").touch)

    record = own_lab.wait_for(job, "COMPLETED")
    assert record.restarts == 1, own_lab.output(record)
    assert desk.lab.run("squeue", "-h", "--states=all", "-o", "%i").stdout == f"{job}\n"


_BROKEN_SBATCH = """\
#!/bin/sh
echo >> "$0.calls"
n=$(wc -l < "$0.calls")
case "$n$HOW" in
  1lost) {sbatch} "$@" > "$0.lost" ;;
  [12]timeout) ;;
  *) exec {sbatch} "$@" ;;
esac
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1
"""


@pytest.mark.parametrize(
    ("how", "calls"), [pytest.param("timeout", 3, marks=pytest.mark.soak), ("lost", 1)]
)
def test_an_sbatch_that_fails_makes_one_job(desk: Site, how: str, calls: int) -> None:
    run = desk.init()
    folder = desk.cwd / "bin"
    folder.mkdir()
    wrapper = folder / "sbatch"
    wrapper.write_text(_BROKEN_SBATCH.replace("{sbatch}", str(shutil.which("sbatch"))))
    wrapper.chmod(0o755)
    env = {"PATH": f"{folder}:{desk.lab.env['PATH']}", "HOW": how}

    words = ("submit", *SMALL, "--run", run, "--sbatch=hold", "--sbatch=comment=mine")
    sent = desk.call(*words, env=env)

    job = sent.stdout.strip()
    (line,) = desk.lab.run("squeue", "-h", "--states=PD", "-o", "%i %k").stdout.splitlines()
    assert re.fullmatch(rf"{job} mine hpctk:[0-9a-f]{{12}}", line.rstrip()), sent.stderr
    assert list(desk.known_jobs(run)) == [job]
    assert len((folder / "sbatch.calls").read_text()) == calls


@pytest.mark.slow
@pytest.mark.alone
def test_status_does_not_wait_for_a_controller_that_is_gone_or_hangs(
    own_lab: LabUnderTest, tmp_path: Path
) -> None:
    desk = Site(own_lab, tmp_path, "runs/a")
    run = desk.init()
    (job,) = desk.sent(*SMALL, "--run", run, "--sbatch=hold")
    controller = _controller(own_lab)

    def ask() -> tuple[str, str, float]:
        began = time.monotonic()
        found = desk.known_jobs(run)[job]
        return found["state"], found["reason"], time.monotonic() - began

    os.kill(controller, signal.SIGSTOP)
    try:
        state, reason, seconds = ask()
    finally:
        os.kill(controller, signal.SIGCONT)
    assert state == "unknown"
    # status has 5 s for all its requests; an earlier one may have used some of them.
    assert re.fullmatch(r"squeue did not answer within (5|4\.\d) s", reason)
    assert seconds < 8

    os.kill(controller, signal.SIGKILL)
    state, reason, seconds = ask()
    assert state == "unknown"
    assert "squeue" in reason
    assert seconds < 8
    text = desk.call("status", run).stdout
    assert "4 pending" in text
    assert f"  job {job:<9} unknown (squeue" in text


@pytest.mark.soak  # test_slurm_records.py reads such accounts
@pytest.mark.slow
def test_the_accounting_tells_of_restarts_arrays_and_cancelled_jobs(
    lab_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LabSettings(nodes=1, gpus_per_node=1, accounting=True)
    with LabUnderTest(lab_directory / "kept", settings) as kept:
        plain = ("--mem=1G", "--output=/dev/null")
        array = kept.sbatch(*plain, "--array=0-2", "--wrap", "true", cwd=tmp_path)
        gone = kept.sbatch(*plain, "--hold", "--wrap", "true", cwd=tmp_path)
        again = kept.sbatch(*plain, "--requeue", "--wrap", "sleep 3600", cwd=tmp_path)
        kept.run("scancel", gone)
        kept.wait_for(again, "RUNNING")
        kept.scontrol("requeue", again)
        kept.wait_for(array)
        monkeypatch.setenv("SLURM_CONF", str(kept.slurm_conf))
        ids = [array, f"{array}_1", gone, again, "1"]
        settled = {array: "COMPLETED", f"{array}_1": "COMPLETED", gone: "CANCELLED"}

        def states() -> dict[str, str]:
            return {one: record.state for one, record in slurm.sacct(ids).items()}

        # What Slurm tells its accounting of a requeued job may be late on a busy machine.
        wait_until(lambda: states() == {**settled, again: "PENDING"}, lambda: f"not {states()}")
        found = slurm.sacct(ids)
        assert found[array].elements == (("COMPLETED", 3),)
        assert found[again].restarts == 1
        assert slurm.job_states(["1"])["1"].state == "unknown"


@pytest.mark.long
@pytest.mark.slow
def test_status_report_and_plan_say_what_a_finished_job_used(
    lab_directory: Path, tmp_path: Path
) -> None:
    with LabUnderTest(lab_directory / "used", LabSettings(2, 0, accounting=True)) as own:
        site = Site(own, tmp_path)
        site.init(40, 0.8)  # longer than the accounting's interval, 5 s
        job = site.submit(mem="600M", cpus_per_task=2)
        assert site.end_of(job) == ("COMPLETED", 0, 0), site.said(job)

        def used() -> dict[str, Any] | None:
            said: dict[str, Any] = site.status().get("efficiency") or {}
            return said if said.get("memory") else None

        found = wait_until(used, lambda: site.hpctk("status", ODD, "--json"), limit_s=60)
        plain = site.hpctk("status", ODD)
        page = tmp_path / "report.html"
        site.hpctk("report", ODD, "-o", str(page))
        # A complete run has nothing to plan, but its jobs tell what the next one needs.
        done = site.call("plan", ODD, check=False)

    assert found is not None
    # Items that sleep leave the CPUs idle, and each rank is a Python of some megabytes.
    assert 0 < found["cpu"] < 0.9
    assert found["of_memory"] == 600 << 20
    assert 20 << 20 < found["memory"] < 600 << 20
    assert found["cpus_per_task"] == 1
    for text in (plain, page.read_text(encoding="utf-8"), done.stderr):
        assert "of the CPUs, " in text, text
        assert "--cpus-per-task=1" in text


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
