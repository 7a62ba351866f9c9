"""keep on a real Slurm: jobs while there is work for them, and no longer."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_toolkit import Run
from hpc_toolkit.lab.settings import LabSettings
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.submit import kept_jobs, read_jobs
from tests.integration.realrun import journal_lines
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import MEASURED, wait_until
from tests.slurm.templatesite import Site
from tests.slurm.test_submit import SMALL, while_away

A_MINUTE = (*SMALL[:-4], "--time", "1", "--cpus-per-task", "1", "--no-requeue")


def kept(desk: Site, run: str, *words: str) -> tuple[list[str], str]:
    found = desk.call("keep", run, *SMALL, *words, check=False)
    return found.stdout.split(), found.stderr


def start_keeping(
    desk: Site, run: str, *words: str, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """``hpctk keep``, just started."""
    return subprocess.Popen(
        [sys.executable, "-m", "hpc_toolkit", "keep", run, *SMALL, *words],
        cwd=desk.cwd,
        env={**desk.lab.env, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def look_every_second(desk: Site, name: str = "work-queue", run: str = "runs/a") -> None:
    record = desk.cwd / run / f"jobs/keep-{name}.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "every_s": 1.0}))


def wait_for_empty_queue(lab: LabUnderTest) -> None:
    wait_until(lambda: not lab.run("squeue", "--noheader").stdout, "an empty queue")


def test_there_are_as_many_jobs_as_have_work_until_the_run_is_complete(desk: Site) -> None:
    run = desk.init(3, 1.5)

    jobs, said = kept(desk, run, "--jobs", "5", "--every", "1s")

    status = desk.status(run)
    assert status["complete"]
    assert len(jobs) >= 1
    assert set(jobs) == {job["id"] for job in status["jobs"]}
    assert len(jobs) <= 3
    assert "no more jobs are sent: the run is complete" in said


def test_once_fills_the_queue_up_and_cancel_ends_it(desk: Site) -> None:
    run = desk.init(8)
    first, _ = kept(desk, run, "--jobs", "2", "--once", "--sbatch=hold")
    again, _ = kept(desk, run, "--jobs", "2", "--once", "--sbatch=hold")
    more, _ = kept(desk, run, "--jobs", "3", "--once", "--sbatch=hold")
    assert (len(first), again, len(more)) == (2, [], 1)
    assert re.search("  keep +up to 3 of work-queue\n", desk.call("status", run).stdout)

    cancelled = desk.call("cancel", run, "--yes")
    assert sorted(cancelled.stdout.split()) == sorted(first + more)
    none, said = kept(desk, run, "--jobs", "3", "--once", "--sbatch=hold")
    assert none == []
    assert "no more jobs are sent: 'hpctk cancel' ended it" in said
    assert desk.call("cancel", run, "--yes", check=False).returncode == 1

    begun, _ = kept(desk, run, "--jobs", "1", "--once", "--again", "--sbatch=hold")
    assert len(begun) == 1


# No look goes on before all four know which jobs are in the queue.
TOGETHER = """#!/bin/sh
{squeue} "$@"; code=$?
touch {marks}/$PPID
for _ in $(seq 1000); do [ $(ls {marks} | wc -l) -ge 4 ] && break; sleep 0.1; done
exit $code
"""


def test_several_that_look_at_once_submit_no_job_too_many(desk: Site) -> None:
    run = desk.init(8)
    (first,), _ = kept(desk, run, "--jobs", "1", "--once", "--sbatch=hold")
    marks, programs = desk.cwd / "marks", desk.cwd / "bin"
    for directory in (marks, programs):
        directory.mkdir()
    squeue = shutil.which("squeue", path=desk.lab.env["PATH"])
    (programs / "squeue").write_text(TOGETHER.format(squeue=squeue, marks=marks))
    (programs / "squeue").chmod(0o755)
    env = {"PATH": f"{programs}:{desk.lab.env['PATH']}"}
    words = ("--jobs", "3", "--once", "--again", "--sbatch=hold")

    looks = [start_keeping(desk, run, *words, env=env) for _ in range(4)]
    said = [look.communicate() for look in looks]

    assert [look.returncode for look in looks] == [0] * 4, said
    assert len(desk.known_jobs(run)) == 3, said
    assert first in desk.known_jobs(run)


def test_cancel_ends_a_loop_and_what_failed_three_times_is_not_repeated(desk: Site) -> None:
    run = desk.init(8)
    with start_keeping(desk, run, "--jobs", "1", "--every", "1s", "--sbatch=hold") as loop:
        wait_until(lambda: bool(desk.known_jobs(run)), "a job")
        desk.call("cancel", run, "--yes")
        _, said = loop.communicate()
    assert loop.returncode == 1
    assert "no more jobs are sent: 'hpctk cancel' ended it" in said

    jobs, said = kept(desk, run, "--jobs", "1", "--every", "1s", "--partition", "none")
    assert jobs == []
    assert "no more jobs are sent: 3 submissions failed" in said


def test_jobs_that_fail_are_not_sent_again_and_again(desk: Site) -> None:
    run = desk.init(8)

    jobs, said = kept(desk, run, "--jobs", "1", "--every", "1s", "--python", "/no/python")

    assert len(jobs) == 3
    assert f"its last 3 jobs failed; see 'hpctk logs --job {jobs[-1]}'" in said
    assert "no more are sent: its last 3 jobs failed" in desk.call("status", run).stdout


PIPELINE = """
[stages.list]
workload = "parts:several"
count = 1
expand = true

[stages.each]
after = "list"
workload = "parts:one"
"""
PARTS = """
import time

def several(index):
    return [{"n": n} for n in range(12)]

def one(index, n):
    time.sleep(4)
    return n
"""


@pytest.mark.long
def test_jobs_send_others_when_work_comes(desk: Site) -> None:
    (desk.cwd / "pipeline.toml").write_text(PIPELINE)
    (desk.cwd / "parts.py").write_text(PARTS)
    desk.call("init", "runs/a", "--config", "pipeline.toml")

    jobs = desk.sent("--run", "runs/a", *A_MINUTE, "--keep", "3")
    look_every_second(desk)
    assert len(jobs) == 1  # only one item is there
    most = 0

    def complete() -> bool:
        nonlocal most
        states = desk.lab.run("squeue", "--noheader", "--format=%T").stdout.split()
        most = max(most, states.count("RUNNING"))
        return bool(desk.status()["complete"])

    wait_until(complete, "the end of the run")

    status = desk.status()
    assert 2 <= most <= 3
    assert len(status["jobs"]) >= 3


KINDS = """\
PartitionName=cpu Nodes=n[1-2] MaxTime=3-00:00:00 State=UP
PartitionName=gpu Nodes=n[3-4] MaxTime=3-00:00:00 State=UP
"""
SHAPES = {"cpu": ("--mem", "8G"), "gpu": ("--mem", "1G", "--gpus-per-node", "2")}


@pytest.fixture
def wide_lab(lab_directory: Path) -> Iterator[LabUnderTest]:
    """A lab with two kinds of partitions, whose controller may be stopped."""
    settings = LabSettings(nodes=4, gpus_per_node=2)
    with LabUnderTest(lab_directory / "wide", settings, edit=lambda conf: conf + KINDS) as started:
        yield started


def keep_shape(
    desk: Site, name: str, jobs: int, *words: str, run: str = "runs/a"
) -> tuple[list[str], str]:
    """Submit kept jobs of a shape to the partition of its name; they look every second."""
    common = ("submit", "--run", run, "--cluster", "lab", "--cpus-per-task", "1")
    own = ("--keep", str(jobs), "--job-name", name, "--partition", name, *SHAPES[name])
    done = desk.call(*common, *own, *words)
    look_every_second(desk, name, run)
    return done.stdout.split(), done.stderr


def queued(lab: LabUnderTest) -> Counter[tuple[str, str]]:
    """How many jobs of each name run or wait, less those that end or wait for another's end."""
    rows = lab.run("squeue", "--noheader", "--format=%j %T %E", check=False).stdout.splitlines()
    jobs = [row.split() for row in rows]
    there = [one for one in jobs if one[1] != "COMPLETING" and "unfulfilled" not in one[2]]
    return Counter((name, state) for name, state, *_ in there)


def ends(desk: Site) -> dict[str, str]:
    return {
        str(one["name"]): str(one["ended"]) for _, one in kept_jobs(RunPaths(desk.cwd / "runs/a"))
    }


NEEDING = """
[stages.prepare]
workload = "parts:prepare"
count = 2
needs = { memory = "4G" }

[stages.train]
after = "prepare"
workload = "parts:train"
needs = { gpus = 1 }
"""
WAITING = """
import os, time

def prepare(index):
    while index and not os.path.exists("go"):
        time.sleep(0.1)
    return index

def train(index, prepare):
    return index
"""


def test_jobs_of_one_shape_send_those_of_another_which_give_back_what_they_do_not_use(
    wide_lab: LabUnderTest, tmp_path: Path
) -> None:
    desk = Site(wide_lab, tmp_path, "runs/a")
    (desk.cwd / "needing.toml").write_text(NEEDING)
    (desk.cwd / "parts.py").write_text(WAITING)
    desk.call("init", "runs/a", "--config", "needing.toml")

    (desk.cwd / "other").mkdir()
    other = Site(wide_lab, desk.cwd / "other", "runs/a")
    short = ("--time", "5", "--idle-exit", "1s")
    none, said = keep_shape(other, "gpu", 2, *short, run="../runs/a")
    assert none == []
    assert "no job is missing now; the run's other jobs submit some" in said
    first, _ = keep_shape(desk, "cpu", 2, *short)
    assert len(first) == 2

    def done(stage: str) -> int:
        status = desk.status()
        return int(status["stages"][stage]["done"])

    wait_until(lambda: done("train") == 1, "a job with GPUs")
    wait_until(lambda: queued(wide_lab) == {("cpu", "RUNNING"): 1}, "idle jobs to end")
    (desk.cwd / "go").touch()
    wait_until(lambda: done("train") == 2, "another job with GPUs")
    wait_for_empty_queue(wide_lab)

    assert ends(desk) == dict.fromkeys(("cpu", "gpu"), "the run is complete")
    jobs = Counter(job.name for job in read_jobs(RunPaths(desk.cwd / "runs/a")))
    assert (jobs["cpu"], jobs["gpu"]) == (2, 2)
    assert len(list(other.cwd.glob("slurm/logs/gpu-*.out"))) == 2


BOTH = """
[stages.light]
workload = "parts:wait"
count = 2400
needs = { memory = "4G" }

[stages.heavy]
workload = "parts:wait"
count = 600
needs = { gpus = 1 }
"""
WAIT = """
import time

def wait(index):
    time.sleep(0.3)
    return index
"""


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_jobs_of_a_minute_of_two_shapes_go_on_until_all_is_done(
    wide_lab: LabUnderTest, tmp_path: Path
) -> None:
    desk = Site(wide_lab, tmp_path, "runs/a")
    (desk.cwd / "both.toml").write_text(BOTH)
    (desk.cwd / "parts.py").write_text(WAIT)
    desk.call("init", "runs/a", "--config", "both.toml")
    began, rows, most = time.monotonic(), dict[int, str](), Counter[str]()
    for name in SHAPES:
        keep_shape(desk, name, 4, "--time", "1", "--no-requeue", "--ntasks-per-node", "2")

    def complete() -> bool:
        now = queued(wide_lab)
        for name in SHAPES:
            count = sum(number for (of, _), number in now.items() if of == name)
            most[name] = max(most[name], count)
            assert count <= 4, now
        status = desk.status()
        left = sum(stage["total"] - stage["done"] for stage in status["stages"].values())
        each = (f"{now[name, 'RUNNING']} + {now[name, 'PENDING']}" for name in SHAPES)
        rows.setdefault(now_s(began) // 20, f"{now_s(began)} s: {', '.join(each)}, {left} left")
        return bool(status["complete"])

    wait_until(lambda: time.monotonic() > began + 90 or complete(), "90 s")
    while_away(wide_lab, 60.0, hangs=False, act=lambda: None)
    wait_until(complete, "the end of the run")
    ended_s = now_s(began)
    wait_for_empty_queue(wide_lab)

    assert most == dict.fromkeys(SHAPES, 4)
    assert ends(desk) == dict.fromkeys(SHAPES, "the run is complete")
    run = Run.open(desk.cwd / "runs/a")
    done = [(line["unit"], line["item"]) for line in journal_lines(run, "done")]
    assert len(done) == len(set(done)) == 3000
    jobs = Counter(job.name for job in read_jobs(run.paths))
    MEASURED.append(f"kept jobs: {dict(jobs)} in {ended_s} s; running + waiting, cpu, gpu:")
    MEASURED.extend(rows.values())


def test_cancel_ends_the_chain_of_jobs_that_send_each_other(desk: Site) -> None:
    run = desk.init(400, 1.0)
    desk.sent("--run", run, *A_MINUTE, "--keep", "2")
    queue = ("squeue", "--noheader", "--format=%T")
    wait_until(lambda: "RUNNING" in desk.lab.run(*queue).stdout, "a job")

    desk.call("cancel", run, "--yes")

    wait_for_empty_queue(desk.lab)
    assert "no more are sent: 'hpctk cancel' ended it" in desk.call("status", run).stdout
    assert len(desk.status()["jobs"]) == 2


def now_s(began: float) -> int:
    return round(time.monotonic() - began)


@pytest.fixture
def limited(lab_directory: Path, tmp_path: Path) -> Iterator[Site]:
    """A lab whose accounting lets the user have two jobs in the queue."""
    name = pwd.getpwuid(os.getuid()).pw_name
    settings = LabSettings(nodes=2, accounting=True)
    enforced = "AccountingStorageEnforce=associations,limits\n"
    with LabUnderTest(
        lab_directory / "limited", settings, edit=lambda conf: conf + enforced
    ) as lab:
        for words in (
            "add account few",
            f"add user {name} account=few defaultaccount=few MaxSubmitJobs=2",
        ):
            lab.run("sacctmgr", "--immediate", *words.split())
        yield Site(lab, tmp_path, "runs/a")


def test_a_limit_of_the_number_of_jobs_ends_nothing(limited: Site) -> None:
    run = limited.init(4, 0.1)
    (limited.cwd / "other.sh").write_text("#!/bin/sh\nsleep 600\n")
    others = [limited.lab.sbatch("--hold", "--mem=1", limited.cwd / "other.sh") for _ in range(2)]
    with start_keeping(limited, run, "--jobs", "2", "--every", "1s") as loop:
        assert loop.stderr is not None
        refused = [loop.stderr.readline() for _ in range(4)]
        shown = limited.call("status", run).stdout
        limited.lab.run("scancel", others[0])
        sent, said = loop.communicate(timeout=120)

    assert all("error: AssocMaxSubmitJobLimit" in line for line in refused), refused
    held = "Slurm refused the last one: as many jobs are in the queue as a limit allows (Assoc"
    assert held in shown
    assert "no more jobs are sent: the run is complete" in said
    assert loop.returncode == 0
    assert set(sent.split()) == set(limited.known_jobs(run))
    assert limited.status()["complete"]


@pytest.mark.long
@pytest.mark.slow
def test_jobs_that_end_together_at_a_limit_send_a_successor(limited: Site) -> None:
    limited.init_held(8)
    first = limited.call("submit", "--run", limited.run, *A_MINUTE, "--keep", "4")
    jobs = first.stdout.split()
    assert len(jobs) == 2
    assert "AssocMaxSubmitJobLimit" in first.stderr
    look_every_second(limited)
    shown = limited.call("status", limited.run).stdout
    assert "up to 4 of work-queue; Slurm refused the last one: as many jobs" in shown

    wait_until(lambda: limited.status()["stages"]["items"]["running"] == 2, "two items")
    limited.lab.run("scancel", "--batch", "--signal=USR1", *jobs)
    wait_until(lambda: len(limited.known_jobs()) >= 3, "a successor", limit_s=300)
    limited.release()

    wait_until(lambda: limited.status()["complete"], "the end of the run", limit_s=300)
