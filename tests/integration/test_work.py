"""Workers and executors on all that items do: succeed, fail, crash, hang, and give odd results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.integration.realrun import Hpctk, journal_lines, rows_by_id, workers_of

ROOT = Path(__file__).parents[2]


_COUNTED = """
import json, sys
from hpc_toolkit.run import Run
from tests.replacedcalls import CountedCalls
with CountedCalls() as counted:
    Run.open(sys.argv[1]).work()
print(json.dumps(counted.opened()))
"""


def test_a_worker_opens_the_segment_and_its_journal_once_for_all_units(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(40, 0.0)

    argv = [sys.executable, "-c", _COUNTED, str(run.root.absolute())]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, check=True)

    opened = json.loads(ended.stdout)
    (journal,) = [path.name for path in run.paths.journals.iterdir()]
    (segment,) = [path.name for path in run.paths.stage("items").root.glob("items/*")]
    assert len(list(run.paths.stage("items").claims.iterdir())) > 20
    assert (opened.count(journal), opened.count(segment)) == (1, 1)


@pytest.mark.parametrize("items", [1, 3])
@pytest.mark.parametrize("words", [[], ["--workers", 1]])
def test_a_run_that_is_removed_while_a_worker_runs_is_an_error(
    hpctk: Hpctk, items: int, words: list[object]
) -> None:
    command = "[ ! -d run ] || mv run moved"
    assert hpctk("init", "run", "--command", command, "--count", items).code == 0

    ended = hpctk("work", "run", *words)

    assert ended.code == 1, ended
    assert "error: run: run.json is missing\nhint: the run was removed or moved" in ended.err


@pytest.mark.parametrize(
    ("how", "evidence"),
    [
        ("segfault", "executor killed by SIGSEGV"),
        ("abort", "executor killed by SIGABRT"),
        ("exit", "executor exit code 3"),
        ("kill", "executor killed by SIGKILL"),
    ],
)
def test_item_that_ends_its_executor_costs_a_death_and_no_attempt(
    hpctk: Hpctk, how: str, evidence: str
) -> None:
    run = hpctk.make([{}, {"how": how, "once": "crashed"}, {}])

    ended = hpctk("work", "run", "--workers", 1)

    rows = rows_by_id(run)
    (death,) = journal_lines(run, "death")
    assert ended.code == 0
    assert [(row["state"], row["attempts"]) for row in rows.values()] == [("done", 1)] * 3
    assert (death["evidence"], death["explained"]) == (evidence, "")
    assert len({row["worker"] for row in rows.values()}) == 1
    assert run.status().deaths == 1


def test_item_that_always_kills_is_failed_after_5_deaths_and_retry_lifts_it(hpctk: Hpctk) -> None:
    run = hpctk.worked([{}, {"how": "abort"}, *[{}] * 198], items_per_claim=4, workers=1)

    before = rows_by_id(run)
    assert [number for number, row in before.items() if row["state"] == "failed"] == [1]
    error = before[1]["error"]
    assert error.startswith("killed its worker 5 times, last: executor killed by SIGABRT on ")
    shown = hpctk("status", "run").out
    assert f"1 x {error}" in shown
    life = hpctk("explain", "run", "--item", "1").out
    assert life.count("this item is suspected") == 5
    assert error in life
    assert len(hpctk.noted("start", "1")) == 5
    assert len(hpctk.noted("start", "0")) == len(hpctk.noted("start", "2")) == 1
    assert hpctk("retry", "run").err.startswith("1 item is pending again")
    assert hpctk("work", "run", "--workers", 1).code == 0
    assert len(hpctk.noted("start", "1")) == 10


def test_timeout_does_not_count_the_time_of_loading(hpctk: Hpctk, tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text(
        "import time\n"
        "def work(item):\n"
        "    return {}\n"
        "class Slow:\n"
        "    def load(self, group): time.sleep(0.5)\n"
        "    def run(self, context, items): return ({} for _ in items)\n"
    )
    run = hpctk.worked([{}], "slow_import:Slow", timeout_s=0.2, max_attempts=1)

    assert rows_by_id(run)[0]["state"] == "done"


def test_permanent_failure_is_not_tried_again(hpctk: Hpctk) -> None:
    run = hpctk.worked([{"permanent": True}, {}], "sample_workloads:fail", max_failures="100%")

    rows = rows_by_id(run)
    assert rows[0]["error"] == "the weights are missing (fetch them)"
    assert [row["attempts"] for row in rows.values()] == [1, 3]
    assert len(hpctk.noted("start", "0")) == 1
    assert len(hpctk.noted("start", "1")) == 3


def test_class_loads_once_per_group_and_executor(hpctk: Hpctk) -> None:
    # The third item ends the executor, whose successor must load the group again.
    items: list[dict[str, Any]] = [{"g": "ab"[i // 3]} for i in range(6)]
    items[2]["once"] = "crashed"
    run = hpctk.worked(items, "sample_workloads:Grouped", group_by="g", workers=1)

    groups = sorted(words[1] for words in hpctk.noted("load"))
    assert groups == ["a", "a", "b"]
    assert [row["value"]["group"] for row in rows_by_id(run).values()] == list("aaabbb")


def test_group_that_cannot_be_loaded_fails_alone(hpctk: Hpctk) -> None:
    items = [{"g": "good"}, {"g": "bad"}, {"g": "bad"}, {"g": "good"}]
    run = hpctk.worked(items, "sample_workloads:Picky", group_by="g", max_attempts=2)

    rows = rows_by_id(run)
    assert [row["state"] for row in rows.values()] == ["done", "failed", "failed", "done"]
    assert rows[1]["error"] == "OSError: cannot load that"
    assert rows[1]["attempts"] == rows[2]["attempts"] == 2


@pytest.mark.parametrize(
    ("workload", "options", "error"),
    [
        ("Miscounting", {"more": -1}, "run() ended without a result for this item"),
        ("Returning", {"value": None}, "run() returned NoneType: yield one result"),
        ("Returning", {"value": {"score": 1}}, "run() returned dict: yield one result"),
        pytest.param("Refusing", {}, "run() took no item", marks=pytest.mark.soak),
    ],
)
def test_workload_that_yields_too_few_results_fails_the_items_without(
    hpctk: Hpctk, workload: str, options: dict[str, Any], error: str
) -> None:
    run = hpctk.worked(
        [{"g": 1}] * 8,
        f"sample_workloads:{workload}",
        group_by="g",
        max_attempts=1,
        max_failures="100%",
        options=options,
        items_per_claim=4,
    )

    rows = rows_by_id(run)
    assert rows[3]["state"] == "failed"
    assert error in rows[3]["error"]
    assert rows[2]["state"] == ("done" if workload == "Miscounting" else "failed")


def test_run_work_in_a_process_with_threads_works_and_ticks(
    hpctk: Hpctk, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hpctk.make_sleeping(10, 0.05)
    for name, value in hpctk.environment().items():
        monkeypatch.setenv(name, value)
    ticks: list[float] = []
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()

    try:
        code = run.work(2, on_tick=lambda: ticks.append(0.0))
    finally:
        ended.set()
        other.join()

    assert code == 0
    assert ticks
    assert os.getpid() not in {worker["pid"] for worker in workers_of(run)}


HUNGRY = "sample_workloads:Hungry"


def test_item_that_runs_out_of_memory_is_run_again_smaller_without_an_attempt(hpctk: Hpctk) -> None:
    run = hpctk.worked([{"fits": 99}, {"fits": 2}, {"fits": 99}], HUNGRY, max_attempts=1)

    rows = rows_by_id(run)
    assert rows[1]["value"] == {"batch": 2}
    assert {row["attempts"] for row in rows.values()} == {1}
    assert [words[2] for words in hpctk.noted("start", "1")] == ["8", "4", "2"]
    assert [words[1:] for words in hpctk.noted("oom")] == [["1"], ["1"]]
    # What fits later is not made smaller again, and the smaller context stays.
    assert {len(hpctk.noted("start", number)) for number in ("0", "2")} == {1}
    assert not journal_lines(run, "failed")
    assert "tried to allocate 8 GiB; again, smaller (1 of 8)" in hpctk("logs", "run").out


def test_group_whose_load_runs_out_of_memory_is_loaded_again_smaller(hpctk: Hpctk) -> None:
    run = hpctk.worked([{"fits": 8}] * 2, HUNGRY, options={"loads": 2}, max_attempts=1)

    assert [row["value"] for row in run.results()] == [{"batch": 2}] * 2
    assert len(hpctk.noted("oom")) == 2


def test_item_that_never_fits_is_a_failed_attempt_that_says_oom(hpctk: Hpctk) -> None:
    run = hpctk.worked([{"fits": 99}, {"fits": -1}, {"fits": 99}], HUNGRY, max_attempts=1)

    (failed,) = journal_lines(run, "failed")
    assert (failed["item"], failed["gpu_oom"], failed["error_type"]) == (
        1,
        True,
        "OutOfMemoryError",
    )
    assert len(hpctk.noted("start", "1")) == 1 + 8
    assert [row["state"] for row in run.results()] == ["done", "failed", "done"]
