"""What job scripts call, and how a campaign's run is made for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.realrun import wait_until
from tests.integration.test_campaign import CAMPAIGN

if TYPE_CHECKING:
    from tests.integration.realrun import Hpctk

TOY = Path(__file__).parent / "toy_campaign.py"


@pytest.fixture
def toy(hpctk: Hpctk) -> Hpctk:
    (hpctk.cwd / "toy.toml").write_text(CAMPAIGN.replace("budget = 14", "budget = 4"))
    (hpctk.cwd / "toy_campaign.py").write_bytes(TOY.read_bytes())
    return hpctk


def test_what_is_left_is_one_line_for_a_script(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(3, 0)

    before = hpctk("left", run.root)
    hpctk("work", run.root, "--workers", "1")
    after = hpctk("left", run.root)

    assert (before.code, before.out) == (0, "3 open 0\n")
    assert (after.code, after.out) == (0, "0 complete 0\n")


def test_what_workers_of_another_job_hold_is_told_apart(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(1, 60)
    own = {"SLURM_JOB_ID": "17"}
    # Its heart beats once a second, which is how long a look at it takes.
    hpctk.start("work", run.root, "--workers", "1", "--lease", "4s", env=own)
    wait_until(lambda: hpctk("left", run.root).out == "1 open 1\n", "a worker with the item")

    assert hpctk("left", run.root, env=own).out == "1 open 0\n"
    assert hpctk("left", run.root, env={"SLURM_JOB_ID": "18"}).out == "1 open 1\n"
    assert hpctk.leftovers(), "the worker is gone"


def test_an_open_run_without_pending_items_has_nothing_left_and_is_not_complete(
    hpctk: Hpctk,
) -> None:
    (hpctk.cwd / "one.jsonl").write_text('{"n": 1}\n')
    hpctk("init", "more", "--command", "true", "--items", "one.jsonl", "--open")
    hpctk("work", "more", "--workers", "1", "--idle-exit", "0.1s")

    assert hpctk("left", "more").out == "0 open 0\n"


def test_a_fit_node_answers_on_stdout_and_an_unfit_one_with_1(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(1, 0)

    fit, unfit = hpctk("preflight", run.root), hpctk("preflight", run.root, "--free", "1P")

    assert (fit.code, fit.err) == (0, "")
    assert ": ready: hpctk" in fit.out
    assert (unfit.code, unfit.out) == (1, "")
    assert " are free for " in unfit.err


def test_a_campaigns_run_is_made_and_then_finished_by_run(toy: Hpctk) -> None:
    made = toy("init", "runs/toy", "--campaign", "toy.toml")
    left = toy("left", "runs/toy")
    done = toy("run", "toy.toml", "--workers", "2")

    assert (made.code, made.out) == (0, "runs/toy\n")
    assert left.out == "0 open 0\n"
    assert done.code == 0, done.err
    assert "best arm" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--items", "toy.toml"], "--campaign: the file says all that a campaign's run needs"),
        (["--max-attempts", "5"], "--campaign: the file says all that a campaign's run needs"),
        (["--open"], "--campaign: the file says all that a campaign's run needs"),
    ],
)
def test_a_campaigns_run_takes_no_other_option(toy: Hpctk, words: list[str], message: str) -> None:
    ended = toy("init", "runs/toy", "--campaign", "toy.toml", *words)

    assert ended.code == 1
    assert message in ended.err
    assert not (toy.cwd / "runs").exists()


def test_a_run_of_nothing_is_refused(hpctk: Hpctk) -> None:
    ended = hpctk("init", "runs/x", "--command", "true")

    assert ended.code == 1
    assert "init needs --items FILE.jsonl, --from SNAPSHOT.json or --campaign" in ended.err


def test_an_existing_run_is_no_place_for_a_campaign(toy: Hpctk) -> None:
    toy("init", "runs/toy", "--campaign", "toy.toml")

    again = toy("init", "runs/toy", "--campaign", "toy.toml")

    assert again.code == 1
    assert "runs/toy" in again.err


def test_conduct_prints_the_outcome_where_it_is_asked_for(toy: Hpctk) -> None:
    toy("init", "runs/toy", "--campaign", "toy.toml")
    workers = toy.start("work", "runs/toy", "--workers", "2")

    ended = toy("conduct", "runs/toy", "--summary")
    quiet = toy("conduct", "runs/toy")

    assert workers.ended().code == 0
    assert ended.code == 0, ended.err
    assert ended.out.startswith("runs/toy: complete\n")
    assert "best arm" in ended.out
    assert (quiet.code, quiet.out) == (0, "")
