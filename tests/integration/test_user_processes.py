"""Processes of the user's code: they answer for nobody, get signals, and do not outlive it."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import (
    Hpctk,
    journal_lines,
    lives,
    rows_by_id,
    wait_until,
    workers_of,
)


def make(hpctk: Hpctk, function: str, items: list[dict[str, Any]], **settings: Any) -> Run:
    return hpctk.make(items, f"process_workloads:{function}", **settings)


def worked(hpctk: Hpctk, *given: Any, **settings: Any) -> Run:
    run = make(hpctk, *given, **settings)
    assert hpctk("work", "run", "--workers", 1).code == 0
    return run


CODES = {
    "return": 0,
    "raise": 1,
    "exec": 1,
    "exit": 3,
    "exit text": 1,
    "interrupt": 1,
    "terminate": -signal.SIGTERM,
}


@pytest.mark.parametrize("workload", ["fork", "Forks"])
def test_forked_child_that_comes_back_ends_and_answers_for_no_item(
    hpctk: Hpctk, workload: str
) -> None:
    run = worked(hpctk, workload, [{"act": act} for act in CODES])

    rows = rows_by_id(run)
    assert [row["value"] for row in rows.values()] == [{"code": code} for code in CODES.values()]
    assert {row["attempts"] for row in rows.values()} == {1}
    assert not journal_lines(run, "death")
    log = next(run.paths.logs.glob("*")).read_text()
    assert log.count("ValueError: wrong in the child") == (1 if workload == "fork" else 2)
    assert "No such file or directory" in log


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_have_the_signals_and_descriptors_of_a_fresh_program(
    hpctk: Hpctk, method: str
) -> None:
    run = worked(hpctk, "look_around", [{"method": method}])

    value = rows_by_id(run)[0]["value"]
    assert len(value["pipes"]) == 2
    fresh = {"mask": 0, "caught": [], "ignored": [], "files": []}
    assert (value["child"], value["program"]) == (fresh, fresh)


def test_broken_pool_and_terminated_process_end_at_once(hpctk: Hpctk) -> None:
    broken = make(hpctk, "broken_pool", [{}] * 2, name="broken")
    terminated = make(hpctk, "terminate", [{}] * 50, name="terminated")
    by_thread = make(hpctk, "fork_in_a_thread", [{}], name="thread")

    for run in (broken, terminated, by_thread):
        assert hpctk("work", run.root, "--workers", 1).code == 0

    assert [row["value"] for row in broken.results()] == [{"broken": True}] * 2
    assert [row["value"] for row in by_thread.results()] == [{"code": -signal.SIGTERM}]
    assert [row["value"] for row in terminated.results()] == [{"code": -signal.SIGTERM}] * 50


@pytest.mark.parametrize("how", ["end", "timeout", "crash", "worker", "executor", "guard"])
def test_process_in_a_session_of_its_own_does_not_outlive_its_executor(
    hpctk: Hpctk, how: str
) -> None:
    then = {"end": None, "timeout": "hang", "crash": "crash"}.get(how, "hang")
    settings: dict[str, Any] = {"timeout_s": 1.0} if how == "timeout" else {}
    run = make(hpctk, "start_and_leave", [{"then": then}], max_attempts=1, **settings)
    work = hpctk.start("work", "run", "--workers", 1, "--grace", "1s")
    left, executor = map(int, wait_until(lambda: hpctk.noted("left"), "the process")[0][2:])

    if how in ("worker", "executor", "guard"):
        (worker,) = [one["pid"] for one in workers_of(run)]
        guard = int(Path(f"/proc/{executor}/stat").read_text().split()[3])
        os.kill({"worker": worker, "executor": executor, "guard": guard}[how], signal.SIGKILL)
    if how != "guard":  # nothing is left that could find the process
        wait_until(lambda: not lives(left), "the end of the process")
    wait_until(lambda: not lives(executor), "the end of the executor")
    if how != "end":
        for pid in {int(words[2]) for words in hpctk.noted("left")}:
            work.send(signal.SIGTERM)
            if how == "guard":
                os.kill(pid, signal.SIGKILL)
    work.ended()
    if how == "timeout":
        (failed,) = journal_lines(run, "failed")
        assert failed["error"] == "took longer than the timeout of 1.0 s"
        assert not journal_lines(run, "death")


TRAP = "code={code}; trap 'echo saved; sleep 0.1; exit $code' TERM; while true; do sleep 0.05; done"


@pytest.mark.parametrize("code", [0, 5])
def test_command_whose_time_is_up_has_time_for_its_trap_and_still_failed(
    hpctk: Hpctk, code: int
) -> None:
    run = hpctk.worked(
        [{"code": code}], None, command=TRAP, timeout_s=0.5, max_attempts=1, workers=1
    )

    row = rows_by_id(run)[0]
    assert (row["state"], row["error"]) == ("failed", "took longer than the timeout of 500 ms")
    assert next(run.paths.logs.glob("*")).read_text().count("saved") == 1


def test_command_that_ignores_sigterm_is_killed_after_kill_after(hpctk: Hpctk) -> None:
    words = ("--count", 3, "--command", "trap '' TERM; sleep 3600 & wait; true {index}")
    limits = ("--timeout", "300ms", "--kill-after", "0.2s", "--max-attempts", 1)
    assert hpctk("init", "run", *words, *limits).code == 0

    assert hpctk("work", "run", "--workers", 1).code == 0

    rows = [json.loads(line) for line in hpctk("gather", "run", "-o", "-").out.splitlines()]
    assert {row["error"] for row in rows} == {"took longer than the timeout of 300 ms"}


def test_items_after_one_that_spoiled_its_process_keep_their_attempts(hpctk: Hpctk) -> None:
    items = [{"poison": number == 5, "once": str(hpctk.cwd / "once")} for number in range(40)]
    run = worked(hpctk, "poison", items, items_per_claim=40)

    rows = rows_by_id(run)
    assert Counter(row["state"] for row in rows.values()) == {"done": 40}
    assert len({row["value"]["pid"] for row in rows.values()}) >= 2


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_each_retry_after_a_failure_runs_in_a_fresh_process(
    hpctk: Hpctk, max_attempts: int
) -> None:
    words = ("--max-failures", "100%", "--max-attempts", max_attempts, "--count", 6)
    workload = ("--workload", "process_workloads:always_fail", "--items-per-claim", 6)
    assert hpctk("init", "run", *workload, *words).code == 0

    assert hpctk("work", "run", "--workers", 1).code == 0

    failed = journal_lines(Run.open("run"), "failed")
    retries = failed if max_attempts == 1 else failed[6:]
    assert len(failed) == 6 * max_attempts
    assert len({line["error"] for line in retries}) == len(retries)


def test_max_items_per_process_and_recycle_at_start_a_fresh_process(hpctk: Hpctk) -> None:
    many = make(hpctk, "leak", [{"mib": 0}] * 7, name="many", max_items_per_process=3)
    large = make(hpctk, "leak", [{"mib": 64}] * 6, name="large", recycle_at_mib=150)

    for name in ("many", "large"):
        assert hpctk("work", name, "--workers", 1).code == 0

    def runs(run: Run) -> list[int]:
        return sorted(Counter(row["value"]["pid"] for row in run.results()).values())

    assert runs(many) == [1, 3, 3]
    assert 2 <= len(runs(large)) <= 6
    assert not journal_lines(many, "death")
    assert {row["attempts"] for row in many.results()} == {1}


def test_function_whose_child_slurm_ended_is_charged_nothing(hpctk: Hpctk) -> None:
    """Slurm signals every process of a step; the child of an item ends first."""
    run = make(hpctk, "wait_for_child", [{}])
    work = hpctk.start("work", "run", "--workers", 1)
    executor, child = map(int, wait_until(lambda: hpctk.noted("start"), "the child")[0][2:])
    (worker,) = [one["pid"] for one in workers_of(run)]

    for pid in (work.pid, worker, executor, child):
        os.kill(pid, signal.SIGTERM)

    assert work.ended().code == 75
    assert {line["type"] for line in journal_lines(run)} == {"release"}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("count", "kills"),
    [
        pytest.param(20, 2, marks=pytest.mark.slow),
        pytest.param(1000, 60, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_items_that_start_processes_come_out_once_through_kills_and_leave_none(
    hpctk: Hpctk, count: int, kills: int
) -> None:
    """The fixture looks for processes that are left, in all sessions."""
    run = make(hpctk, "mixed", [{}] * count, items_per_claim=5)
    work = hpctk.start("work", "run", "--workers", 2)
    chosen = random.Random(1)
    for number in range(1, kills + 1):
        least = number * count // (kills + 1)
        wait_until(partial(lambda least: hpctk.noted("start")[least:], least), "items")
        _, _, executor, worker = hpctk.noted("start")[-1]
        with suppress(ProcessLookupError):
            os.kill(int(chosen.choice([executor, worker])), signal.SIGKILL)

    assert work.ended(limit_s=3000).code == 0

    rows = rows_by_id(run)
    assert [row["value"] for row in rows.values()] == [{"id": number} for number in range(count)]
    assert {row["state"] for row in rows.values()} == {"done"}
    assert len(rows) == count


def test_log_limit_frees_the_oldest_output_and_finds_what_is_left(hpctk: Hpctk) -> None:
    words = ("--count", 12, "--command", "head -c 1048576 /dev/zero | tr '\\0' x; echo end {index}")
    assert hpctk("init", "run", *words, "--log-limit", "3M", "--items-per-claim", 1).code == 0

    assert hpctk("work", "run", "--workers", 1).code == 0

    (log,) = Run.open("run").paths.logs.glob("*.log")
    assert log.stat().st_size > 12 << 20
    assert log.stat().st_blocks * 512 < 6 << 20
    places = {line["item"]: line["log"][0] for line in journal_lines(Run.open("run"), "done")}
    newest, oldest = max(places, key=places.__getitem__), min(places, key=places.__getitem__)
    last, first = hpctk("logs", "run", "--item", newest), hpctk("logs", "run", "--item", oldest)
    assert len(last.out) > 1 << 20
    assert last.out.endswith(f"end {newest}\n")
    assert (first.out, "older output was removed" in first.err) == ("", True)
    whole = hpctk("logs", "run")
    assert whole.out.startswith("x")
    assert whole.out.endswith(f"end {newest}\n")
