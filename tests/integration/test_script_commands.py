"""What job scripts call, and how a campaign's run is made for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_toolkit.slurm.batch.work import read_left
from tests.integration.realrun import Hpctk, wait_until
from tests.integration.test_campaign import CAMPAIGN

TOY = Path(__file__).parent / "toy_campaign.py"


@pytest.fixture
def toy(hpctk: Hpctk) -> Hpctk:
    (hpctk.cwd / "toy.toml").write_text(CAMPAIGN.replace("budget = 14", "budget = 4"))
    (hpctk.cwd / "toy_campaign.py").write_bytes(TOY.read_bytes())
    return hpctk


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


def test_an_open_run_without_pending_items_has_nothing_left_and_is_not_complete(
    hpctk: Hpctk,
) -> None:
    (hpctk.cwd / "one.jsonl").write_text('{"n": 1}\n')
    hpctk("init", "more", "--command", "true", "--items", "one.jsonl", "--open")
    hpctk("work", "more", "--workers", "1", "--idle-exit", "0.1s")

    assert read_left(hpctk.cwd / "more", 1.0) == (0, False, 0, 0)


def test_a_campaigns_run_is_made_and_then_finished_by_run(toy: Hpctk) -> None:
    made = toy("init", "runs/toy", "--campaign", "toy.toml")
    left = read_left(toy.cwd / "runs/toy", 1.0)
    done = toy("campaign", "run", "toy.toml", "--workers", "2")
    after = read_left(toy.cwd / "runs/toy", 1.0)

    assert (made.code, made.out) == (0, "runs/toy\n")
    assert (left, after) == ((0, False, 0, 0), (0, True, 0, 0))
    assert done.code == 0, done.err
    assert "best arm" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--items", "toy.toml"], "--campaign: no other option can be given"),
        (["--max-attempts", "5"], "--campaign: no other option can be given"),
        (["--open"], "--campaign: no other option can be given"),
    ],
)
def test_a_campaigns_run_takes_no_other_option(toy: Hpctk, words: list[str], message: str) -> None:
    ended = toy("init", "runs/toy", "--campaign", "toy.toml", *words)

    assert ended.code == 1
    assert message in ended.err
    assert not (toy.cwd / "runs").exists()
