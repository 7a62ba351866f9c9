"""Workloads that run out of memory, with real executors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integration.realrun import journal_lines, rows_by_id

if TYPE_CHECKING:
    from tests.integration.realrun import Hpctk

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
