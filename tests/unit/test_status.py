"""How a run stands: counts that agree with a gather, reasons, warnings; and no file is written."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpc_toolkit.cli import load_commands, statusview
from hpc_toolkit.errors import RunError
from hpc_toolkit.planning import Countdown
from hpc_toolkit.queue.control import HealthNotice, give_health_notice
from hpc_toolkit.queue.left import what_is_left
from hpc_toolkit.queue.presence import DRAINING, FINISHED
from hpc_toolkit.results.status import Status, read_status
from hpc_toolkit.results.workers import pause_s, read_hosts
from hpc_toolkit.run import Run
from hpc_toolkit.system.ranks import boot_id, host_name
from hpc_toolkit.system.terminal import columns
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun, ToyWorker, tree
from tests.unit.playedcampaign import Play
from tests.unit.playedcampaign import toy as toy_campaign

NOW = 1_000_000.0


def status(toy: ToyRun) -> Status:
    return read_status(toy.view(), ManualClock(NOW), given="r")


def living(toy: ToyRun, name: str, **changes: Any) -> ToyWorker:
    """A worker whose process is this one."""
    here = {"host": host_name(), "boot": boot_id(), "pid": os.getpid()}
    return toy.worker(name, **{**here, **changes})


def counts(toy: ToyRun) -> dict[str, Any]:
    found = status(toy).stages["items"]
    return {field.name: getattr(found, field.name) for field in fields(found)}


def test_the_json_has_what_the_contract_says(toy: ToyRun) -> None:
    record = json.loads(json.dumps(status(toy).to_json()))

    assert record["run"] == "r"
    counts = "total pending running claimed done failed retried duplicates sealed"
    counts += " coming waiting skipped"
    assert set(record["stages"]["items"]) >= set(counts.split())
    assert set(record["workers"]) >= {"alive", "finished", "dead"}
    assert record.keys() >= {"rate_per_s", "eta_s", "eta_low_s", "eta_high_s", "best", "complete"}


def test_a_living_worker_runs_one_item_and_has_claimed_the_others(toy: ToyRun) -> None:
    worker = living(toy, "w")
    worker.claim(toy.unit_name(0))
    worker.attempt(0)
    worker.attempt(1, "failed")

    found = counts(toy)

    assert (found["done"], found["running"], found["claimed"]) == (1, 1, 2)
    assert (found["pending"], found["failed"]) == (0, 0)
    worker.release()
    worker.claim(toy.unit_name(0), 2)
    worker.attempt(1)
    assert (counts(toy)["done"], counts(toy)["retried"]) == (2, 1)


@pytest.mark.parametrize("published", [False, True])
def test_counts_agree_with_a_gather_made_at_once(toy: ToyRun, published: bool) -> None:
    frozen = living(toy, "frozen")
    frozen.claim(toy.unit_name(0), 1)
    frozen.attempt(0)
    worker = living(toy, "w")
    worker.work(toy.unit_name(0), 2, i1="done", i2="permanent", i3="done")
    if published:
        toy.reopen().results()
    frozen.attempt(1)
    frozen.attempt(2)
    rows = toy.reopen().results(partial=not published)
    states = [row["state"] for row in rows]

    found = counts(toy)

    assert (found["done"], found["failed"]) == (states.count("done"), states.count("failed"))
    assert found["duplicates"] == 1
    assert status(toy).left == 4 - len(rows)


def test_workers_are_counted_by_what_is_known_of_them(toy: ToyRun) -> None:
    living(toy, "alive")
    living(toy, "draining", state=DRAINING)
    toy.worker("finished", state=FINISHED)
    toy.worker("dead", host=host_name(), boot=boot_id())
    living(toy, "reused", ticks=1)  # another process has its id now
    toy.worker("silent", host="elsewhere", at=NOW - 10_000)
    toy.worker("fresh", host="elsewhere", at=NOW - 10)
    toy.worker("slow", host="elsewhere", at=NOW - 1_000, interval_s=500.0)

    found = status(toy)

    assert (found.workers.alive, found.workers.finished, found.workers.dead) == (4, 1, 3)
    assert found.draining == 1
    assert found.workers.unreadable == 0


def test_a_worker_whose_file_cannot_be_read_is_not_called_alive(toy: ToyRun) -> None:
    torn = toy.worker("torn", host="elsewhere", at=NOW)
    torn.claim(toy.unit_name(0))
    toy.paths.worker("torn").write_text("torn")

    found = status(toy)

    assert asdict(found.workers) == {"alive": 0, "finished": 0, "dead": 0, "unreadable": 1}
    assert found.alive == []
    # Its claim stands until its lease ends.
    assert (found.stages["items"].running, found.stages["items"].claimed) == (0, 4)
    path = toy.paths.worker("torn")
    assert found.warnings == [f"{path} cannot be read: its worker may be running or not"]
    assert found.reason.startswith("no worker is alive")
    torn.attempt(0, at=NOW - 1)
    assert status(toy).reason == ""
    for name in ("torn2", "torn3"):
        toy.paths.worker(name).write_text("torn")
    (warning,) = status(toy).warnings
    assert warning.endswith("and 2 more files cannot be read: their workers may be running or not")


def test_a_file_of_a_worker_that_was_read_too_early_is_no_warning(toy: ToyRun) -> None:
    """Its first content came between the listing and the report."""
    living(toy, "w")

    found = read_status(toy.view(), ManualClock(NOW), given="r", seen={"w": None})

    assert found.warnings == []


def test_rate_and_time_left_come_from_the_living(toy: ToyRun) -> None:
    worker = living(toy, "w")
    worker.claim(toy.unit_name(0))
    worker.attempt(0, seconds=2.0, at=NOW - 3.0)
    worker.attempt(1, seconds=2.0, at=NOW - 1.0)
    gone = toy.worker("gone")
    gone.begin(toy.unit_name(0), 1)
    gone.attempt(0, seconds=0.001)

    found = status(toy)

    assert found.rate_per_s == 0.5
    assert found.eta_s is None
    view, clock = toy.view(), ManualClock(NOW)
    left = Countdown(view, clock, given="r").read
    found = read_status(view, clock, given="r", forecast=left)
    assert found.eta_low_s is not None
    assert found.eta_high_s is not None
    assert found.eta_low_s < 3.0 < found.eta_high_s < 60.0


def test_the_time_of_a_run_counts_from_its_first_attempt_to_its_last_one(toy: ToyRun) -> None:
    clock = ManualClock(NOW)
    worker = living(toy, "w", started=NOW - 60, at=NOW)

    def elapsed_s() -> float:
        return read_status(toy.view(), clock, given="r").elapsed_s

    worker.claim(toy.unit_name(0))
    assert elapsed_s() == 60
    worker.attempt(0, at=NOW - 5, seconds=15.0)
    assert elapsed_s() == 20
    for item, kind in ((1, "done"), (2, "done"), (3, "permanent")):
        worker.attempt(item, kind, at=NOW - 1)
    assert elapsed_s() == 19


def test_an_open_stage_without_work_waits_for_more(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "my run", 1, unit=1, sealed=False)
    living(toy, "w").work(toy.unit_name(0), i0="done")

    found = toy.reopen().status()
    run = f"'{toy.root}'"

    assert not found.complete
    assert found.reason == (
        "all items added so far are finished, the list is open: "
        f"'hpctk add {run} --items FILE' adds items, 'hpctk add {run} --seal' ends it"
    )


def old_copy(toy: ToyRun, worker: ToyWorker, *, lines: int) -> bytes:
    """Let this host show that many lines of what a worker told of; all of them are returned."""
    path = toy.paths.journal(worker.name)
    whole = path.read_bytes()
    worker.presence.update(journal=len(whole))
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:lines]))
    return whole


def test_results_that_are_not_shown_yet_are_told_of(toy: ToyRun) -> None:
    worker = toy.worker("w", state=FINISHED)
    worker.work(toy.unit_name(0), i0="done", i1="done", i2="done", i3="done")
    whole = old_copy(toy, worker, lines=2)

    found = status(toy)

    assert (found.stages["items"].pending, found.old_copies) == (2, 1)
    assert found.reason == (
        "no worker is alive: this host does not show all that w wrote; look again in a minute, "
        "else start some with 'hpctk work' or 'hpctk submit'"
    )

    toy.paths.journal("w").write_bytes(whole)
    found = status(toy)

    assert (found.complete, found.old_copies, found.reason) == (True, 0, "")


def test_without_a_run_all_runs_below_runs_are_compared_in_a_table(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    toy, _ = ToyRun(fast_dir / "runs/a", 1200, unit=256), ToyRun(fast_dir / "runs/\x1b[31m日本", 1)
    toy.worker("w", state=FINISHED).work(toy.unit_name(0), i0="done", i1="permanent")
    search = {"policy": "random", "budget": 2, "pending": 2}
    played = play(toy_campaign(search), name="runs/search")
    played.coordinate()
    monkeypatch.chdir(fast_dir)
    monkeypatch.delenv("HPCTK_RUN", raising=False)

    shown = CliRunner().invoke(load_commands("status"), ["status"]).stdout.splitlines()

    cells = [re.split("  +", line) for line in shown]
    assert cells[0] == ["run", "done", "failed", "workers", "best", "state", "arm"]
    best = Run.open(played.root).status().best
    assert best is not None
    assert cells[1] == ["runs/\\x1b[31m日本", "0 of 1", "0", "0", "nothing moves"]
    assert cells[2] == ["runs/a", "1 of 1,200", "1", "0", "nothing moves"]
    assert cells[3][:3] == ["runs/search", "26 of 26", "0"]
    assert cells[3][4] == f"{best['reward']:.4f}"
    assert cells[3][-1] == best["arm"]
    states = [columns(line[: line.index("nothing")]) for line in shown[1:3]]
    assert set(states) == {shown[0].index("state")}


def test_no_hint_rests_on_an_old_copy_alone(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 30, unit=30)
    worker = toy.worker("w")
    worker.claim(toy.unit_name(0))
    for item in range(30):
        worker.attempt(item, "failed" if item < 25 else "done")
    worker.release()
    whole = old_copy(toy, worker, lines=25)
    late = "this host does not show all that w wrote; look again in a minute, else "

    paused = status(toy).reason
    living(toy, "idle")
    idle = status(toy).reason

    assert paused.startswith("paused: the first 25 items of stage 'items' all failed; " + late)
    assert "hpctk retry" in paused
    assert idle.startswith("workers are alive but hold nothing: " + late)

    toy.paths.journal("w").write_bytes(whole)
    assert late not in status(toy).reason


def test_errors_that_differ_in_numbers_and_paths_are_one_kind(toy: ToyRun) -> None:
    worker = living(toy, "w")
    worker.claim(toy.unit_name(0))
    for item, step in enumerate(("7", "-1.5e-3", "0x1f")):
        where = f"'/data/u{item}/x-{item}.pt' at 0xdead{item}"
        error = f"OSError: code 3, step {step} of layer12: {where}"
        worker.attempt(item, "permanent", error=error)

    (found,) = status(toy).failures

    assert (found["items"], found["retrying"]) == (3, 0)
    assert found["error"] == "OSError: code 3, step # of layer12: 'PATH' at #"
    assert found["message"] == "OSError: code 3, step 0x1f of layer12: '/data/u2/x-2.pt' at 0xdead2"


def sick(toy: ToyRun, at: float, **changes: Any) -> None:
    fields: dict[str, Any] = {"host": "n3", "worker": "w", "whole": True, "sure": True}
    text = "host n3 is sick: 8 items"
    give_health_notice(toy.paths, HealthNotice(**{**fields, "at": at, "reason": text, **changes}))


def test_a_sick_host_is_warned_of_once(toy: ToyRun) -> None:
    sick(toy, 1.0, sure=False, reason="8 items failed on host n3")
    sick(toy, 2.0, worker="v")
    sick(toy, 3.0)

    assert status(toy).warnings == [
        "host n3 is sick: 8 items; 'hpctk submit' leaves it out for a day"
    ]


@pytest.mark.parametrize("lives", [False, True])
def test_i8_damaged_and_torn_lines_are_reported(toy: ToyRun, lives: bool) -> None:
    """A living worker may be in the middle of its line."""
    worker = living(toy, "w") if lives else toy.worker("w")
    worker.claim(toy.unit_name(0))
    worker.attempt(0)
    worker.journal.append(b'{"type":"done"\n')
    worker.attempt(1)
    worker.journal.append(b'{"type":"do')

    found = status(toy)

    damaged, *torn = found.warnings
    assert "is skipped: wrong checksum" in damaged
    assert ["torn last line (11 bytes, no newline) is skipped" in one for one in torn] == (
        [] if lives else [True]
    )
    assert found.stages["items"].done == 2


def messy(toy: ToyRun) -> None:
    """Every kind of file that a run can have."""
    worker = living(toy, "w")
    worker.work(toy.unit_name(0), i0="done", i1="failed", i2="permanent", i3="done")
    toy.worker("dead").claim(toy.unit_name(0), 2)
    toy.worker("torn").journal.append(b'{"type":"do')
    toy.reopen().retry()
    toy.paths.worker("torn").write_bytes(b"")


def test_i7_status_writes_nothing(toy: ToyRun) -> None:
    messy(toy)
    before = tree(toy.root)

    status(toy)
    toy.reopen().status()

    assert tree(toy.root) == before


def test_i7_status_of_a_run_whose_files_are_missing_makes_none(toy: ToyRun) -> None:
    toy.stage_paths.head.unlink()
    for directory in (toy.paths.journals, toy.paths.workers, toy.stage_paths.claims):
        directory.rmdir()
    before = tree(toy.root)

    assert status(toy).stages["items"].pending == 4

    assert tree(toy.root) == before


def test_i7_status_asks_for_no_lock_no_process_and_no_network(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl
    import subprocess

    messy(toy)

    def refuse(*_: object, **__: object) -> None:
        message = "status must not"
        raise AssertionError(message)

    for module, name in (
        *((fcntl, name) for name in ("flock", "lockf", "fcntl")),
        *((os, name) for name in ("fork", "posix_spawn", "kill", "system")),
        (subprocess, "Popen"),
        (socket, "socket"),
    ):
        monkeypatch.setattr(module, name, refuse)

    assert status(toy).stages["items"].done == 2


@pytest.mark.parametrize(
    ("beats", "watch_s", "count"), [(True, 60.0, 4), (False, 60.0, 0), (True, 0.0, 0)]
)
@pytest.mark.parametrize("ahead_s", [-1e6, 1e6])
def test_i4_what_another_job_holds_is_told_by_heartbeats_and_by_no_other_clock(
    toy: ToyRun, ahead_s: float, beats: bool, watch_s: float, count: int
) -> None:
    """A dead worker whose clock ran ahead once kept its items from being started again."""
    clock = ManualClock(NOW)
    owner = toy.worker("owner", host="there", job="18", at=NOW + ahead_s)
    owner.claim(toy.unit_name(0))

    def pause(seconds: float) -> None:
        clock.advance(seconds)
        if beats and clock.now > NOW + owner.presence.presence.interval_s:
            owner.presence.update(at=clock.now + ahead_s)

    def held(job: str) -> int:
        left = what_is_left(toy.view(), clock, job=job, watch_s=watch_s, pause=pause)
        assert left.items == 4
        return left.elsewhere

    assert held("17") == count
    assert clock.now <= NOW + 1.5 * owner.presence.presence.interval_s
    assert held("18") == 0, "it is of this job"


@pytest.mark.parametrize(("has", "beyond"), [(1, 2), (2, 1), (4, 0)])
def test_a_job_whose_workers_cannot_hold_what_is_left_is_not_started_again(
    fast_dir: Path, has: int, beyond: int
) -> None:
    retry = {"on": "oom", "memory": "x2", "up_to": 4}
    toy = ToyRun(fast_dir / "run", 3, unit=3, needs={"memory": 1}, retry=retry)
    worker = toy.worker("w", job="17", place={"has": {"memory": has}})
    worker.work(toy.unit_name(0), 1, i0="short", i1="short")
    worker.work(toy.unit_name(0), 2, i1="short")

    left = what_is_left(toy.view(), ManualClock(), job="17", watch_s=0.0, pause=lambda _: None)
    found = toy.reopen().status()

    assert (left.items, left.beyond) == (3, beyond)
    assert [one["items"] for one in found.unmet] == [1] * beyond
    assert [(one["needs"]["memory"], one["most"]) for one in found.grown] == [(2, False), (4, True)]


def test_a_host_whose_clock_is_ahead_is_named_and_not_in_the_elapsed_time(
    fast_dir: Path,
) -> None:
    toy = ToyRun(fast_dir / "run", 2, unit=1)
    now, day_s = time.time(), 86_400.0
    for number, late in enumerate((0.0, day_s)):
        worker = toy.worker(f"w{number}", host=f"n{number}", started=now - 20 + late, at=now + late)
        worker.claim(toy.unit_name(number))
        worker.attempt(number, at=now - 1 + late)
        worker.release(at=now + late)

    found = toy.reopen().status()

    assert found.elapsed_s == pytest.approx(20.0, abs=15)
    assert (found.silent_s, found.throughput) == (0.0, {})
    assert any(one.startswith("the clock of host n1 is ahead") for one in found.warnings)


def test_hosts_with_dead_and_idle_workers_come_first(fast_dir: Path) -> None:
    toy, clock = ToyRun(fast_dir / "r", 8, unit=2), ManualClock(NOW)
    fine, dead = toy.worker("fine", at=NOW), toy.worker("dead", at=NOW - 3600, host="there")
    fine.work(toy.unit_name(0), i0="done", i1="permanent")
    dead.claim(toy.unit_name(2))
    view = toy.view()
    seen = view.presences()

    now = read_status(view, clock, given="r", seen=seen)

    assert now == read_status(toy.view(), clock, given="r")
    hosts = read_hosts(view, seen, now.alive)
    assert [(one.host, one.alive, one.busy, one.died) for one in hosts] == [
        ("there", 0, 0, 1),
        ("here", 1, 0, 0),
    ]


def test_a_process_that_reads_everything_pauses_longer_with_more_workers(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = ToyRun(fast_dir / "r", 1, unit=1)
    for number in range(200):
        toy.worker(f"h-{number}-a", host="h", at=NOW)
    toy.run.view.poll()

    for filesystem, seconds in (("local", 2.0), ("shared", 10.0)):
        monkeypatch.setenv("HPCTK_FILESYSTEM", filesystem)
        assert pause_s(toy.run.view, 2.0) == pytest.approx(seconds)


def test_a_run_that_is_removed_while_it_is_read_is_not_shown(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ToyRun(fast_dir / "r", 8, unit=2).reopen()
    shown = list[Status]()
    read = Run.status

    def status(self: Run, **facts: Any) -> Status:
        if not shown:
            return read(self, **facts)
        shutil.rmtree(fast_dir / "r")
        raise FileNotFoundError(2, "No such file or directory", "r/stages/items/head")

    monkeypatch.setattr(Run, "status", status)

    with pytest.raises(RunError, match=r"run\.json is missing"):
        statusview._follow(run, lambda now, *_: shown.append(now), slurm=False, wait=lambda _: None)

    assert len(shown) == 1
