"""Workers that are killed, frozen or left alone: what others see, and what it costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import (
    REPOSITORY,
    Hpctk,
    journal_lines,
    lives,
    rows_by_id,
    wait_until,
    workers_of,
)


def benchmark(hpctk: Hpctk, name: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / name), *map(str, words)],
        env=hpctk.environment(),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_kill_storm_loses_repeats_and_charges_nothing(hpctk: Hpctk) -> None:
    ended = benchmark(
        hpctk, "kill_storm.py", "--items", 300, "--kills", 6, "--freezes", 1, "--workers", 4
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.alone
def test_killed_worker_is_replaced_within_2_s(hpctk: Hpctk) -> None:
    ended = benchmark(hpctk, "takeover.py", "--rounds", 3)

    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_late_line_of_a_frozen_worker_is_a_duplicate_and_harms_nothing(hpctk: Hpctk) -> None:
    """Invariant I5."""
    run = hpctk.make_sleeping(6, 0.3)
    frozen = hpctk.start("work", "run", "--lease", "1s", env={"HPCTK_HOST": "node-a"})
    _, item, executor, worker, _ = wait_until(lambda: hpctk.noted("start"), "a start")[0]
    os.kill(int(worker), signal.SIGSTOP)
    wait_until(lambda: hpctk.noted("end", item, executor), "the frozen worker's item to end")

    other = hpctk("work", "run", "--lease", "1s", env={"HPCTK_HOST": "node-b"})
    before = rows_by_id(run)
    os.kill(int(worker), signal.SIGCONT)

    assert other.code == 0
    assert frozen.ended().code == 0
    lines = [line for line in journal_lines(run, "done") if line["item"] == int(item)]
    assert len(lines) == 2
    assert rows_by_id(run) == before
    status = run.status()
    assert (status.stages["items"].duplicates, status.deaths) == (1, 1)
    assert {row["attempts"] for row in before.values()} == {1}
    assert before[int(item)]["worker"].startswith("node-b")


def test_pool_whose_parent_is_killed_drains_and_leaves(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(200, 0.1)
    work = hpctk.start("work", "run", "--workers", 2)
    wait_until(lambda: len(hpctk.noted("end")) > 2, "some items")

    work.send(signal.SIGKILL)

    work.ended()
    wait_until(lambda: all(worker["state"] == "finished" for worker in workers_of(run)), "leaving")
    started = {words[1] for words in hpctk.noted("start")}
    assert {words[1] for words in hpctk.noted("end")} == started
    assert run.status().stages["items"].done == len(started) < 200
    assert not journal_lines(run, "failed")


COMMAND = (
    "(while true; do echo alive >> {beat}; sleep 0.02; done) & "
    "test -e {gate} || {{ echo start {id} $$ >> {trace}; wait; }}; "
    "kill $!; wait; echo '{{\"ok\": 1}}'"
)


def make_command_run(hpctk: Hpctk, **settings: float) -> tuple[Run, Path, Path]:
    """A run of one command with a child that writes until the gate is there."""
    gate, beat = hpctk.cwd / "gate", hpctk.cwd / "beat"
    item = {"gate": str(gate), "beat": str(beat)}
    run = hpctk.make([item], None, command=COMMAND, **settings)
    return run, gate, beat


@pytest.mark.parametrize("alone", [True, False])
def test_deaths_together_with_the_pool_suspect_no_item(hpctk: Hpctk, *, alone: bool) -> None:
    """Rule R15: five deaths of workers fail the item in which they die, unless all were killed."""
    run, gate, _ = make_command_run(hpctk)
    kills, work = 5 if alone else 6, hpctk.start("work", "run", "--workers", 1)
    for count in range(kills):
        wait_until(lambda: len(hpctk.noted("start")) > count, "the item to start", of=work)  # noqa: B023
        if alone:
            (worker,) = [one["pid"] for one in workers_of(run) if lives(one["pid"])]
            os.kill(worker, signal.SIGKILL)
        else:
            hpctk.kill_all()
            work = hpctk.start("work", "run", "--workers", 1)
    gate.touch()

    assert work.ended().code == 0
    row, found = rows_by_id(run)[0], [one["explained"] for one in journal_lines(run, "death")]
    # A worker may still see that its pool has ended, and begin to drain, before it is killed.
    assert len(found) == kills
    assert {one["evidence"] for one in journal_lines(run, "death")} == {"lock"}
    assert not alone or len(workers_of(run)) == 1 + kills  # the pool replaced each
    assert set(found) <= ({""} if alone else {"end of its pool", "drain"})
    assert (row["state"], row["attempts"]) == (("failed", 1) if alone else ("done", 1))
    assert not alone or row["error"].startswith("killed its worker 5 times, last: lock on ")


def assert_still(beat: Path, hpctk: Hpctk) -> None:
    """Nothing writes to ``beat`` any more; other processes had the time to."""
    size = beat.stat().st_size
    subprocess.run(["/bin/sleep", "0.2"], check=True, cwd=hpctk.cwd)
    assert beat.stat().st_size == size


@pytest.mark.parametrize("victim", ["worker", "executor"])
def test_children_of_a_command_die_with_its_worker(hpctk: Hpctk, victim: str) -> None:
    run, gate, beat = make_command_run(hpctk)
    work = hpctk.start("work", "run")
    wait_until(lambda: beat.exists() and hpctk.noted("start"), "the command's child")
    (worker,) = [one["pid"] for one in workers_of(run)]
    shell = int(hpctk.noted("start")[0][2])
    executor = int(Path(f"/proc/{shell}/stat").read_text().split()[3])
    gate.touch()

    os.kill(worker if victim == "worker" else executor, signal.SIGKILL)

    wait_until(lambda: not lives(shell), "the command to be gone")
    assert work.ended().code == 0
    assert_still(beat, hpctk)
    assert rows_by_id(run)[0]["value"] == {"ok": 1}
    assert len(journal_lines(run, "death")) == 1


def test_hanging_command_is_ended_with_its_children_by_the_timeout(hpctk: Hpctk) -> None:
    run, _, beat = make_command_run(hpctk, timeout_s=0.5, max_attempts=1)

    assert hpctk("work", "run").code == 0

    assert_still(beat, hpctk)
    assert "timeout of 500 ms" in rows_by_id(run)[0]["error"]


@pytest.mark.slow
def test_a_killed_worker_is_seen_by_its_node_long_before_the_next_look(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(60, 0.5)  # not over before the kill on a busy machine
    env = {"HPCTK_FILESYSTEM": "shared", "HPCTK_HOST": "node-a"}
    work = hpctk.start("work", "run", "--workers", 3, env=env)
    _, _, _, worker, _ = wait_until(lambda: hpctk.noted("start"), "an item to start")[0]
    watched = wait_until(
        lambda: [one for one in workers_of(run) if one["node"] == 3], "the observer of three"
    )
    killed_at = time.time()
    os.kill(int(worker), signal.SIGKILL)

    assert work.ended().code == 0
    (death,) = journal_lines(run, "death")
    assert (death["evidence"], death["host"]) == ("lock", "node-a")
    assert death["at"] - killed_at < 20, "a look at other workers comes every 30 s"
    assert len(watched) == 1


DAY_S = 86_400.0

# Before anything is imported that could have taken either of them: this host's clock, and its time
# since it was started, are another's.
ELSEWHERE = """
import time
_time, _monotonic = time.time, time.monotonic
time.time = lambda: _time() + {wall}
time.monotonic = lambda: _monotonic() + {since}
"""


@pytest.mark.slow
def test_i4_workers_a_day_apart_leave_each_other_alone_and_see_who_died(
    hpctk: Hpctk, tmp_path: Path
) -> None:
    """Hosts whose clocks are a day apart: of three the one whose clock is ahead dies."""
    held = "echo start {id} >> {trace}; until [ -e go ]; do sleep 0.05; done; sleep 0.2"
    run = hpctk.make([{}] * 24, None, command=held)
    hosts = {"behind": -DAY_S, "ahead": DAY_S, "right": 0.0}
    words = ("work", "run", "--lease", "4s")
    started = {}
    for host, wall in hosts.items():
        first = ELSEWHERE.format(wall=wall, since=abs(wall))
        started[host] = hpctk.start(*words, env={"HPCTK_HOST": host}, first=first)
    wait_until(lambda: len(hpctk.noted("start")) == 3, "an item of each")
    wait_until(lambda: len(workers_of(run)) == 3, "all")
    (victim,) = [one for one in workers_of(run) if one["host"] == "ahead"]

    started["ahead"].send(signal.SIGKILL)  # first, so that nobody replaces the worker
    os.kill(victim["pid"], signal.SIGKILL)
    (tmp_path / "go").touch()

    assert [started[host].ended().code for host in ("behind", "right")] == [0, 0]
    deaths = journal_lines(run, "death")
    assert {one["worker"] for one in deaths} == {victim["worker"]}
    assert {one["evidence"] for one in deaths} == {"lease"}
    rows = rows_by_id(run)
    assert sorted(rows) == list(range(24))
    assert {(row["state"], row["attempts"]) for row in rows.values()} == {("done", 1)}
    assert all(0.1 < row["seconds"] < DAY_S / 2 for row in rows.values()), (
        "durations are of one clock"
    )
    counts = run.status().stages["items"]
    assert (counts.done, counts.duplicates) == (24, 0)
    assert len(hpctk.noted("start")) <= 24 + 1, "nobody alive was taken for dead"


SCENARIOS = {
    "kill-storm": ["benchmarks/kill_storm.py"],
    "takeover": ["benchmarks/takeover.py"],
    "grouped-metrics": ["-m", "benchmarks.grouped_metrics"],
    "simulated-clusters": ["benchmarks/simulate.py"],
    "mutants": ["tests/mutants.py"],
}


@pytest.mark.soak
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_at_full_size_keeps_its_promise(name: str) -> None:
    done = subprocess.run([sys.executable, *SCENARIOS[name]], cwd=REPOSITORY, check=False)

    assert done.returncode == 0
