"""What ends, pauses or wakes work: deadlines, idleness, failures, a full disk, added items."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.slurm.batch.work import read_left
from tests.integration.realrun import Hpctk, journal_lines, wait_until, workers_of


@pytest.mark.slow
@pytest.mark.alone
def test_deadline_starts_nothing_that_would_not_finish(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(40, 0.4)

    began = time.monotonic()
    ended = hpctk("work", "run", "--deadline", "3s")

    assert ended.code == 75
    assert time.monotonic() - began < 4.5
    started, finished = hpctk.noted("start"), hpctk.noted("end")
    assert 2 <= len(started) == len(finished) < 8
    assert not journal_lines(run, "failed")
    assert "no time for another item" in workers_of(run)[0]["note"]


@pytest.mark.slow
def test_deadline_gives_back_an_item_that_runs_over_it(hpctk: Hpctk, tmp_path: Path) -> None:
    run = hpctk.make([{"once": str(tmp_path / "once")}], "sample_workloads:hang_once")

    assert hpctk("work", "run", "--deadline", "1500ms").code == 75

    assert {line["type"] for line in journal_lines(run)} == {"release"}
    assert run.status().stages["items"].pending == 1


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["--deadline", "@1"], {}),
        ([], {"HPCTK_DEADLINE": "1"}),
        ([], {"SLURM_JOB_END_TIME": str(time.time() + 20)}),
    ],
)
def test_deadline_in_the_past_begins_nothing(
    hpctk: Hpctk, words: list[str], env: dict[str, str]
) -> None:
    hpctk.make_sleeping(3, 0.0)

    assert hpctk("work", "run", *words, env=env).code == 75

    assert not hpctk.noted("start")


def test_idle_exit_leaves_an_open_run_of_which_nothing_is_left_with_75(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(2, 0.0, open_end=True)

    ended = hpctk("work", "run", "--idle-exit", "300ms")

    assert ended.code == 75
    assert "nothing to do for 0.3 s" in workers_of(run)[0]["note"]
    assert run.status().stages["items"].done == 2
    assert read_left(run.root, 1.0) == (0, False, 0, 0)


@pytest.mark.alone
def test_items_that_are_added_wake_a_waiting_worker_and_a_seal_lets_it_leave(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(1, 0.0, open_end=True)
    work = hpctk.start("work", "run")
    wait_until(lambda: run.status().stages["items"].done, "the first item")
    more = json.dumps({"id": 1, "seconds": 0.0, "trace": str(hpctk.trace)})

    added_at = time.time()
    run.add([json.loads(more)])
    wait_until(lambda: hpctk.noted("start", "1"), "the added item")
    woke_s = float(hpctk.noted("start", "1")[0][4]) - added_at

    assert woke_s < 2.0
    assert hpctk("add", "run", "--items", "-", stdin=more).code == 1  # a duplicate
    assert hpctk("seal", "run").code == 0
    assert work.ended().code == 0
    assert "sealed" in hpctk("add", "run", "--items", "-", stdin='{"id": 2}').err


def test_run_whose_first_20_items_all_fail_pauses_until_the_cause_is_mended(
    hpctk: Hpctk, tmp_path: Path
) -> None:
    cure = tmp_path / "cure"
    run = hpctk.make([{"cure": str(cure)}] * 60, "sample_workloads:fail")

    paused = hpctk("work", "run", "--workers", 2)

    assert paused.code == 1
    assert "items of stage 'items' all failed" in paused.err
    assert "hpctk retry" in paused.err
    assert 20 <= len({words[1] for words in hpctk.noted("start")}) < 30
    assert "paused: the first" in hpctk("status", "run").out
    assert hpctk("work", "run").code == 1  # still ill
    cure.touch()
    assert hpctk("retry", "run").code == 0
    assert hpctk("work", "run", "--workers", 2).code == 0
    assert {row["state"] for row in run.results()} == {"done"}


@pytest.mark.parametrize(("limit", "failed"), [("2", 3), ("10%", 3), ("4", None), ("20%", None)])
def test_max_failures_pauses_beyond_a_count_or_a_share(
    hpctk: Hpctk, limit: str, failed: int | None
) -> None:
    items: list[dict[str, Any]] = [{"fail": number < 4} for number in range(20)]
    run = hpctk.make(items, "sample_workloads:fail_some", max_failures=limit, max_attempts=1)

    ended = hpctk("work", "run")

    assert ended.code == (0 if failed is None else 1)
    assert run.status().stages["items"].failed == (failed or 4)
    if failed is not None:
        assert f"{failed} items of stage 'items' failed; the limit is {limit}" in ended.err


def test_full_disk_is_no_bug_of_a_command_that_writes(hpctk: Hpctk, small_disk: Path) -> None:
    """faults/test_full_disk.py has the other commands."""
    items = [{"permanent": True}]
    run = hpctk.worked(items, "sample_workloads:fail", name=str(small_disk / "run"))
    stat = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (stat.f_bavail * stat.f_frsize))

    ended = hpctk("retry", run.root)

    assert ended.code == 75
    assert "error: " in ended.err
    assert "No space left on device" in ended.err
    assert "Traceback" not in ended.err


def test_what_is_beyond_a_job_does_not_hide_that_others_hold_the_rest(
    hpctk: Hpctk, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [{"seconds": 60}, {"seconds": 61, "needs": {"licence": 1}}]
    (hpctk.cwd / "two.jsonl").write_text("\n".join(map(json.dumps, items)))
    sleep = ("--workload", "hpc_toolkit.science.workloads.synthetic:Sleep")
    made = hpctk("init", "two", *sleep, "--items", "two.jsonl", "--needs", "gpus=0")
    assert made.code == 0, made.err
    work = ("work", "two", "--workers", "1", "--lease", "4s")
    other = hpctk.start(*work, env={"SLURM_JOB_ID": "17"})
    claims = hpctk.cwd / "two/stages/items/claims"
    wait_until(lambda: claims.is_dir() and any(claims.iterdir()), "a claim", of=other)

    hpctk(*work, "--idle-exit", "0.1s", env={"SLURM_JOB_ID": "18"})

    monkeypatch.setenv("SLURM_JOB_ID", "18")
    assert read_left(hpctk.cwd / "two", 60.0) == (2, False, 1, 1)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert read_left(hpctk.cwd / "two", 60.0) == (2, False, 0, 1)
    assert hpctk.leftovers(), "the worker is gone"
