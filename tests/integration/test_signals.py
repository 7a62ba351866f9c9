"""Workers that are asked to leave, by a signal or a file (rule R16): they finish or give back."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hpc_toolkit.system.processes import WARNINGS
from tests.integration.realrun import Hpctk, journal_lines, rows_by_id, wait_until, workers_of

DRAINS = [signal.SIGTERM, signal.SIGINT, *WARNINGS]


@pytest.mark.parametrize("sig", DRAINS)
def test_drain_finishes_the_running_items_and_another_start_completes(
    hpctk: Hpctk, sig: signal.Signals
) -> None:
    run = hpctk.make_sleeping(200, 0.1)
    work = hpctk.start("work", "run", "--workers", 2)
    wait_until(lambda: len(hpctk.noted("end")) > 2, "some items")

    work.send(sig)

    ended = work.ended()
    started = {words[1] for words in hpctk.noted("start")}
    assert (ended.code, ended.out) == (75, "")
    assert {words[1] for words in hpctk.noted("end")} == started
    assert len(started) < 200
    assert {worker["state"] for worker in workers_of(run)} == {"finished"}
    assert sig.name in workers_of(run)[0]["note"]
    assert not journal_lines(run, "failed")
    assert not journal_lines(run, "death")


def test_drain_gives_back_an_item_that_outlasts_the_grace(hpctk: Hpctk, tmp_path: Path) -> None:
    run = hpctk.make([{"once": str(tmp_path / "once")}], "sample_workloads:hang_once")
    work = hpctk.start("work", "run", "--grace", "200ms")
    wait_until(lambda: hpctk.noted("start"), "the item to start")

    work.send(signal.SIGTERM)

    assert work.ended().code == 75
    assert {line["type"] for line in journal_lines(run)} == {"release"}
    assert run.status().stages["items"].pending == 1
    assert hpctk("work", "run").code == 0
    assert rows_by_id(run)[0]["attempts"] == 1


def test_second_interrupt_gives_the_running_item_back_at_once(hpctk: Hpctk, tmp_path: Path) -> None:
    run = hpctk.make([{"once": str(tmp_path / "once")}], "sample_workloads:hang_once")
    work = hpctk.start("work", "run", "--grace", "1h")
    wait_until(lambda: hpctk.noted("start"), "the item to start")

    work.send(signal.SIGINT)
    wait_until(lambda: workers_of(run)[0]["state"] == "draining", "the first to arrive")
    work.send(signal.SIGINT)

    ended = work.ended()
    assert ended.code == 75
    assert {line["type"] for line in journal_lines(run)} == {"release"}
    first, second = ended.err.splitlines()[:2]
    assert first.startswith(
        "stopping: waiting for 1 worker to finish the current item (at most 1 h"
    )
    assert first.endswith("; press ^C again to stop at once")
    assert second == "stopping at once: waiting for 1 worker to interrupt the running items"


def test_one_interrupt_of_a_terminal_does_not_count_twice(hpctk: Hpctk) -> None:
    """A terminal's ^C goes to the whole foreground group."""
    run = hpctk.make_sleeping(4, 1.0)
    work = hpctk.start("work", "run", "--workers", 2)
    wait_until(lambda: len(hpctk.noted("start")) == 2, "both workers")
    assert all(os.getpgid(worker["pid"]) != work.pid for worker in workers_of(run))

    os.killpg(work.pid, signal.SIGINT)

    assert work.ended().code == 75
    assert len(hpctk.noted("end")) == 2


@pytest.mark.parametrize("first", ["worker", "command"])
def test_slurm_style_signal_to_all_processes_charges_a_running_command_nothing(
    hpctk: Hpctk, first: str
) -> None:
    """Slurm signals every process of a step, the command of an item among them, in any order."""
    run = hpctk.make([{}], None, command="echo start {id} $$ >> {trace}; exec sleep 30")
    work = hpctk.start("work", "run")
    shell = int(wait_until(lambda: hpctk.noted("start"), "the command")[0][2])
    (worker,) = [one["pid"] for one in workers_of(run)]
    with open(f"/proc/{shell}/stat") as stat:
        executor = int(stat.read().split()[3])

    if first == "command":
        os.kill(shell, signal.SIGTERM)
        wait_until(lambda: not os.path.exists(f"/proc/{shell}"), "the end of the command")
    for pid in (work.pid, worker, executor):
        os.kill(pid, signal.SIGTERM)
    if first == "worker":
        os.kill(shell, signal.SIGTERM)

    assert work.ended().code == 75
    assert {line["type"] for line in journal_lines(run)} == {"release"}
    assert run.status().stages["items"].pending == 1


SLOW_START = """
import time
from pathlib import Path
from hpc_toolkit.worker.worker import Worker
make = Worker.__init__
def slowly(self, *words):
    Path("starting").touch()
    time.sleep(0.5)
    make(self, *words)
Worker.__init__ = slowly
"""


@pytest.mark.parametrize("sig", [signal.SIGTERM, *WARNINGS[:1]])
def test_drain_of_a_worker_that_starts_is_not_forgotten(
    hpctk: Hpctk, tmp_path: Path, sig: signal.Signals
) -> None:
    hpctk.make_sleeping(100, 0.05)
    work = hpctk.start("work", "run", "--workers", 2, first=SLOW_START)
    wait_until((tmp_path / "starting").exists, "the start")

    work.send(sig)

    assert work.ended().code == 75
    assert not hpctk.noted("start")


def test_warning_lets_the_running_item_use_the_time_until_the_deadline(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(2, 1.0)
    work = hpctk.start("work", "run", "--grace", "100ms", "--deadline", "30s")
    wait_until(lambda: hpctk.noted("start"), "the item to start")

    work.send(signal.SIGUSR1)

    assert work.ended().code == 75
    assert len(hpctk.noted("end")) == 1
    assert run.status().stages["items"].done == 1


def test_drain_lets_the_workers_of_now_leave_and_later_ones_finish(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(150, 0.1)
    work = hpctk.start("work", "run", "--workers", 2)
    wait_until(lambda: run.status().workers.alive == 2, "both workers")
    wait_until(lambda: run.status().stages["items"].done, "the first item")

    assert run.drain() == 2

    assert work.ended().code == 75
    status = run.status()
    assert 0 < status.stages["items"].done < 150
    assert status.workers.finished == 2
    assert status.deaths == 0
    (request,) = run.paths.control.iterdir()
    assert json.loads(request.read_text())["request"] == "drain"
    assert hpctk("work", "run", "--workers", 8).code == 0
    assert [row["attempts"] for row in run.results()] == [1] * 150
