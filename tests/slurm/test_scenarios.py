"""A work queue on 8 nodes of a real Slurm, disturbed in the ways that clusters have.

Every node has its own host name here, so a death is seen by the evidence that a cluster would give,
and each test says by which. All results must be there once, and no attempt may be burnt.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hpc_toolkit import Run
from hpc_toolkit.lab.settings import LabSettings
from hpc_toolkit.lab.state import members
from tests.integration.realrun import workers_of
from tests.integration.test_study import LINE, TUNE, checked, lines
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import (
    FULL,
    MEASURED,
    SMALL,
    CpuClock,
    Measured,
    Rehearsal,
    Size,
    check_whole,
    wait_until,
)
from tests.toyrun import ToyRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIZES = [
    pytest.param(SMALL, id="small"),
    pytest.param(FULL, id="full", marks=pytest.mark.soak),
]
sized = pytest.mark.parametrize("size", SIZES)


def start(rehearsal: Rehearsal, size: Size, **options: str) -> str:
    """A job on 8 nodes that works on a new run; returns when all ranks work."""
    rehearsal.init(size)
    script = rehearsal.render(nodes=8, gpus_per_node=size.gpus_per_node, **options)
    job = rehearsal.sbatch(script, rehearsal.run)
    wait_for_claims(rehearsal, size)
    return job


def wait_for_claims(rehearsal: Rehearsal, size: Size) -> None:
    wait_until(lambda: len(rehearsal.measure().claimed) >= size.ranks, rehearsal.log)


def wait_for_workers(rehearsal: Rehearsal, number: int) -> None:
    wait_until(lambda: len(rehearsal.measure().workers) == number, f"{number} workers")


def report(name: str, size: Size, found: Measured, **facts: object) -> None:
    shown = ", ".join(f"{key} {value}" for key, value in facts.items())
    evidence = {" ".join(key).strip(): number for key, number in found.evidence.items()}
    MEASURED.append(
        f"{name}: {size.items} items of {size.seconds} s, {len(found.workers)} workers,"
        f" first claim to last result {found.span_s:.1f} s, deaths {evidence or 0}, {shown}"
    )


@pytest.mark.alone
@pytest.mark.parametrize("size", [pytest.param(replace(FULL, groups=96), id="small"), SIZES[1]])
def test_32_ranks_on_8_nodes_are_kept_busy_each_with_its_gpu(
    rehearsal: Rehearsal, size: Size
) -> None:
    shutil.copy(Path(__file__).with_name("lab_items.py"), rehearsal.cwd)
    rehearsal.init(size, workload="lab_items:place")
    hpctk = shlex.join(rehearsal.program)
    resources = "--nodes 8 --gpus-per-node 4 --cluster lab --time 30:00"
    cpu = CpuClock()

    job = rehearsal.call(
        "bash", "-c", f'sbatch --parsable "$({hpctk} render {resources})" {rehearsal.run}'
    ).strip()
    rehearsal.wait_for_end(job, limit_s=size.limit_s)

    share = cpu.share()
    found = check_whole(rehearsal, size)
    efficiency = found.efficiency(size.seconds, size.ranks)
    report("32 ranks", size, found, efficiency=f"{efficiency:.3f}", cpu=f"{share:.0%}")
    places = {tuple(row["value"].values()) for row in rehearsal.rows()}
    ranks = list(range(size.ranks))
    assert places == {(f"n{r // 4 + 1}", f"n{r // 4 + 1}", r, str(r % 4)) for r in ranks}
    assert sorted(presence["rank"] for presence in found.workers.values()) == ranks
    assert rehearsal.lab.records(job)[0].exit_code == 0
    assert not found.deaths
    # A start of 32 interpreters on 2 cores weighs more in a short run.
    assert efficiency >= (0.90 if size is FULL else 0.6)


@pytest.mark.long
@sized
def test_preempted_twice_drains_and_comes_back(rehearsal: Rehearsal, size: Size) -> None:
    job = start(rehearsal, size)
    gaps = []
    for part in (0.3, 0.6):
        rehearsal.wait_for_done(int(part * size.items))
        before = set(rehearsal.measure().workers)
        preempted = time.time()
        rehearsal.lab.preempt()
        wait_for_workers(rehearsal, len(before) + size.ranks)
        gaps.append((preempted, before))
    rehearsal.wait_for_end(job, limit_s=size.limit_s)

    found = check_whole(rehearsal, size)
    later = [
        min(end for end, worker in found.ended if worker not in before) - at for at, before in gaps
    ]
    report("preempted twice", size, found, back_after_s=[round(gap, 1) for gap in later])
    assert rehearsal.log().count("DUE TO PREEMPTION") >= 2
    # Slurm sends SIGTERM first, so every rank gives its unit back: nobody's death has to be seen.
    assert not found.deaths
    assert {p["restart"] for p in found.workers.values()} == {0, 1, 2}
    assert {p["state"] for p in found.workers.values()} == {"finished"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "pause_s"),
    [
        # Slurm takes 25 s at least to see it. On a busy machine an item may take some of them.
        pytest.param(Size(32, 1.5), 15.0, id="small"),
        pytest.param(
            replace(FULL, seconds=0.5), 2.5, id="full", marks=[pytest.mark.soak, pytest.mark.alone]
        ),
    ],
)
def test_lost_node_is_seen_by_slurm_and_the_other_ranks_never_stop(
    rehearsal: Rehearsal, size: Size, pause_s: float
) -> None:
    job = start(rehearsal, size)
    lost_at = time.time()
    rehearsal.lab.lab.crash("n3")
    # Then the job is completing for a minute more: its step waits for the one of the lost node.
    wait_until(
        lambda: rehearsal.lab.state(job) != "RUNNING", "the end of the script", limit_s=size.limit_s
    )

    found = check_whole(rehearsal, size)
    lost = found.workers_of(host="n3")
    last_death = max(line["at"] for line in found.deaths)
    pauses = longest_pauses(found, set(found.workers) - lost)
    report(
        "lost node",
        size,
        found,
        whole_after_s=round(last_death - lost_at, 1),
        longest_pause_s=f"{pauses:.2f}",
    )
    assert found.evidence == {("slurm", "node failure"): size.gpus_per_node}
    assert {line["worker"] for line in found.deaths} == lost
    assert len(found.workers) == size.ranks, "the job went on without a restart"
    assert pauses < pause_s
    assert " ExitCode=0:0 " in rehearsal.lab.scontrol("show", "job", "--oneliner", job)


def longest_pauses(found: Measured, workers: set[str]) -> float:
    """The longest time that one of these workers was without a result, until the last unit."""
    ended: dict[str, list[float]] = {}
    last_claim = max(at for at, _ in found.claimed)
    for at, worker in found.ended:
        if worker in workers and at <= last_claim:
            ended.setdefault(worker, []).append(at)
    return max(b - a for times in ended.values() for a, b in pairwise(times))


@pytest.mark.soak  # test_lab.py loses a slurmd under work as well
def test_lost_slurmd_takes_its_node_down_and_leaves_its_ranks_at_work(
    rehearsal: Rehearsal,
) -> None:
    size = Size(48, 1.5)
    # A node is down when it was silent for so long and two questions went unanswered, which takes
    # 25 s at least. On a busy machine a healthy slurmd may be silent for 5 s.
    rehearsal.lab.configure(SlurmdTimeout=15)
    job = start(rehearsal, size)
    killed_at = time.time()
    rehearsal.lab.lab.crash("n3", daemon_only=True)
    wait_until(
        lambda: rehearsal.node_state("n3") == "down*" or rehearsal.done() == size.items,
        "Slurm to take n3 for down",
    )
    down_at = time.time()
    left = size.items - rehearsal.done()
    rehearsal.wait_for_end(job, limit_s=size.limit_s)

    found = check_whole(rehearsal, size)
    its_ranks = found.workers_of(host="n3")
    after = [worker for at, worker in found.ended if at > down_at and worker in its_ranks]
    report(
        "lost slurmd",
        size,
        found,
        node_down_after_s=round(down_at - killed_at, 1),
        left=left,
        results_of_its_ranks_afterwards=len(after),
    )
    assert left > 0, "the node was never down while there was work"
    assert len(its_ranks) == size.gpus_per_node
    assert set(after) == its_ranks
    assert not found.deaths
    assert len(found.workers) == size.ranks
    assert rehearsal.lab.records(job)[0].exit_code == 0


def test_frozen_node_is_seen_by_the_lease_because_slurm_says_nothing(rehearsal: Rehearsal) -> None:
    size = SMALL
    go = rehearsal.cwd / "go"
    held = f"until [ -e {shlex.quote(str(go))} ]; do sleep 0.1; done; sleep {{seconds}}"
    rehearsal.init(size, command=held)
    work = shlex.join([*rehearsal.program, "work", str(rehearsal.run), "--lease", "12s"])
    ranks = ("--nodes=8", f"--ntasks-per-node={size.gpus_per_node}")
    job = rehearsal.sbatch(
        *(*ranks, "--mem=1G", "--time=30", "--output=job.out"),
        f"--wrap=srun --kill-on-bad-exit=0 --wait=0 {work}",
    )
    wait_for_claims(rehearsal, size)
    frozen = [
        one.pid
        for one in members(rehearsal.lab.lab.paths.token, "n3")
        if one.name.startswith("python") or "hpc_toolkit" in one.name
    ]
    frozen_at = time.time()
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    go.touch()
    try:
        wait_until(rehearsal.complete, "completion", limit_s=size.limit_s)
    finally:
        for pid in frozen:
            with suppress(ProcessLookupError):  # Slurm may have ended it with the job
                os.kill(pid, signal.SIGCONT)
    rehearsal.wait_for_end(job, limit_s=size.limit_s)

    found = rehearsal.measure()
    rows = rehearsal.rows()
    report("frozen node", size, found, whole_after_s=round(found.deaths[-1]["at"] - frozen_at, 1))
    assert found.evidence == {("lease", ""): size.gpus_per_node}
    assert {line["host"] for line in found.deaths} == {"n3"}
    assert {(row["state"], row["attempts"]) for row in rows} == {("done", 1)}
    assert len(rows) == size.items


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "minutes", "jobs"),
    [
        pytest.param(Size(36, 1.5), 1, 2, id="small"),
        pytest.param(
            replace(FULL, seconds=1.6, limit_s=900.0), 2, 3, id="full", marks=pytest.mark.soak
        ),
    ],
)
def test_time_limit_is_met_by_draining_and_requeueing(
    rehearsal: Rehearsal, size: Size, minutes: int, jobs: int
) -> None:
    job = start(rehearsal, size, time=str(minutes))
    rehearsal.wait_for_end(job, limit_s=size.limit_s)

    found = check_whole(rehearsal, size)
    starts = {
        restart: {n for n, p in found.workers.items() if p["restart"] == restart}
        for restart in {p["restart"] for p in found.workers.values()}
    }
    times = {r: [at for at, w in found.ended if w in names] for r, names in starts.items()}
    gaps = [round(min(times[r + 1]) - max(times[r]), 1) for r in range(len(times) - 1)]
    report("time limit", size, found, jobs=len(starts), back_after_s=gaps)
    assert len(starts) >= jobs
    assert not found.deaths, "every rank left before Slurm ended it"
    assert rehearsal.lab.records(job)[0].exit_code == 0
    assert "DUE TO TIME LIMIT" not in rehearsal.log()
    assert rehearsal.log().count("requeueing") == len(starts) - 1


@sized
def test_two_jobs_share_one_run(rehearsal: Rehearsal, size: Size) -> None:
    rehearsal.init(size)
    script = rehearsal.render(nodes=4, gpus_per_node=size.gpus_per_node)

    jobs = [rehearsal.sbatch(script, rehearsal.run) for _ in range(2)]
    rehearsal.wait_for_end(*jobs, limit_s=size.limit_s)

    found = check_whole(rehearsal, size)
    shares = [sum(worker in found.workers_of(job=job) for _, worker in found.ended) for job in jobs]
    report("two jobs", size, found, items_of_each=shares)
    assert min(shares) > size.items / 4
    assert not found.deaths


# The ranks of a node leave when its file appears; the step goes on, as in a job of a work queue.
JOB = """#!/bin/bash
#SBATCH --nodes=4 --no-kill
srun --no-kill --kill-on-bad-exit=0 --wait=0 \\
  bash -c 'touch "$0/$(hostname)"; until test -e "$0/$(hostname).left"; do sleep 0.1; done' "$2" &
exec "$1" -c '
import os
import sys
from pathlib import Path
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.batch.work import shrink_job
from hpc_toolkit.slurm.controller import host_names
from hpc_toolkit.system.ranks import RankInfo

nodes = host_names(os.environ["SLURM_JOB_NODELIST"])
for nodes in shrink_job(RunPaths(Path(sys.argv[1])), RankInfo.from_environ(), nodes, every_s=0.2):
    print("gave back", *nodes, flush=True)
' "$3"
"""


@pytest.fixture
def shrinking(lab: LabUnderTest, lab_directory: Path) -> Iterator[LabUnderTest]:
    """A lab that shrinks a job several times: without slurmdbd, Slurm 22.05 does so only once."""
    if " 22." not in lab.run("sinfo", "--version").stdout:
        yield lab
        return
    with LabUnderTest(lab_directory / "shrinking", LabSettings(4, 0, accounting=True)) as own:
        yield own


@pytest.mark.newslurm
def test_idle_nodes_are_given_back_after_another_node_is_lost(
    shrinking: LabUnderTest, toy: ToyRun, tmp_path: Path
) -> None:
    (tmp_path / "job.sh").write_text(JOB)
    job = shrinking.sbatch(
        *("-o", tmp_path / "log", tmp_path / "job.sh"),
        *(sys.executable, tmp_path, toy.root),
        cwd=tmp_path,
    )

    def nodes() -> str:
        return shrinking.run(
            "squeue", "-h", f"--jobs={job}", "--states=all", "-o", "%N"
        ).stdout.strip()

    wait_until(lambda: all((tmp_path / f"n{n}").exists() for n in range(1, 5)), "four ranks")
    ranks = {f"n{n}": toy.worker(f"on-n{n}", host=f"n{n}", job=job) for n in range(1, 5)}
    shrinking.lab.crash("n2")
    wait_until(lambda: nodes() == "n[1,3-4]", lambda: f"the loss of n2; the job has {nodes()}")

    for node, left in (("n3", "n[1,4]"), ("n4", "n1")):
        (tmp_path / f"{node}.left").touch()
        ranks[node].finish()
        wait_until(
            lambda left=left: nodes() == left,  # type: ignore[misc] # of this turn
            lambda: f"fewer nodes than {nodes()}; log:\n{(tmp_path / 'log').read_text()}",
            limit_s=30,
        )

    wait_until(lambda: shrinking.records(job)[0].ended, "the end of the job")
    said = [line for line in (tmp_path / "log").read_text().splitlines() if "gave back" in line]
    assert said == [f"gave back {node}" for node in ("n3", "n4")]


@pytest.mark.timeout(1800)
@pytest.mark.soak  # integration/test_study.py kills workers
def test_a_study_on_slurm_has_each_trial_once_after_two_preemptions(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rehearsal.cwd)
    slower = ("kill(trial)\n        if", "kill(trial); time.sleep(0.2)\n        if")
    Path("tune.py").write_text(TUNE.replace(*slower))
    run = rehearsal.run
    words = {"runs/tune": run, "40": 200}
    rehearsal.hpctk(*(words.get(word, word) for word in LINE), "--workers", 0)
    script = rehearsal.render(nodes=8, ntasks_per_node=1, cpus_per_task=1)

    job = rehearsal.sbatch(script, run)
    for number in (20, 120):
        rehearsal.wait_for_done(number)
        rehearsal.lab.preempt()
        wait_until(lambda: rehearsal.lab.state(job) != "RUNNING", "preemption")
    rehearsal.wait_for_end(job)

    assert rehearsal.lab.records(job)[0].exit_code == 0, rehearsal.log()
    found, _ = checked(str(run), 200)
    assert [n for n, one in enumerate(found) if one.state.name == "FAIL"] == [13, 19]
    assert len(workers_of(Run.open(run))) >= 3 * 8  # the job began three times
    again = sum(len(calls) > 1 for calls in lines("calls.jsonl").values())
    assert again >= 4
    MEASURED.append(f"study: 200 trials on 8 ranks, {again} repeated with their parameters")
