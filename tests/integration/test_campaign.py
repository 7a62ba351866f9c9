"""A whole campaign with real processes: stages, the bandit's sequence, kills at any moment."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.campaign.coordinator import dry_run
from hpc_toolkit.campaign.settings import read_campaign
from hpc_toolkit.slurm.batch.work import read_left
from hpc_toolkit.worker.loading import load_object
from tests.documents import REPOSITORY
from tests.integration.realrun import Hpctk, wait_until
from tests.unit.jobcommands import refused

CAMPAIGN = """
name = "toy"
seed = 3

[[models]]
name = "s"
layers = 4
size = 1000
steps = [0, 1, 4, 16]

[[models]]
name = "m"
layers = 6
size = 3000
steps = [0, 1, 4, 16]

[prepare]
workload = "toy_campaign:prepare"
items = [{ size = "s" }, { size = "m" }]

[metrics]
workload = "toy_campaign:Metrics"

[tasks]
workload = "toy_campaign:Tasks"
names = ["a", "b", "c"]

[search]
policy = "gp-ucb"
budget = 14
pending = 3
asks = "window"
"""
ARMS = 4 * 5 + 4 * 7
WINDOW = CAMPAIGN.partition("[search]")[2]
SEARCHES = {
    "window": WINDOW,
    "rounds": 'policy = "gp-ucb"\nbudget = 14\npending = 3\n',
    "racing": 'policy = "racing"\noptions = { first = 2 }\n',
    "evaluations": 'policy = "gp-ei"\nevaluations = 40\npending = 4\n',
    "metrics": """
policy = "gp-ei"
budget = 10
pending = 3
metrics = ["entropy"]
options = { features = "all" }
""",
}
"""What stands below ``[search]``."""


def run(hpctk: Hpctk, *words: str, workers: int = 3) -> dict[str, Any]:
    ended = hpctk("campaign", "run", "toy.toml", "--workers", workers, "--json", *words)
    assert ended.code == 0, ended.err
    summary: dict[str, Any] = ended.json
    return summary


@pytest.fixture
def toy(hpctk: Hpctk) -> Hpctk:
    """A directory with the campaign, whose code is beside this module."""
    (hpctk.cwd / "toy.toml").write_text(CAMPAIGN)
    return hpctk


def asked(root: Path) -> int:
    log = root / "runs/toy/stages/tasks/log"
    return len(list(log.iterdir())) if log.is_dir() else 0


def test_campaign_runs_all_stages_once_and_is_refused_with_changed_settings(toy: Hpctk) -> None:
    summary = run(toy)
    entries = asked(toy.cwd)

    assert summary["arms"] == ARMS
    assert summary["evaluated"] == 14
    assert summary["best"]["arm"] in ("s/step16/layer3", "m/step16/layer3")
    status = toy("status", "--json").json
    assert status["complete"]
    assert status["stages"]["prepare"]["done"] == 2
    assert status["stages"]["metrics"]["done"] == ARMS
    assert status["stages"]["tasks"]["done"] == 14 * 3
    optuna = pytest.importorskip("optuna")
    assert toy("export", "--to", "optuna").out == "study.log\n"
    file = optuna.storages.journal.JournalFileBackend(str(toy.cwd / "study.log"))
    found = optuna.load_study(study_name="toy", storage=optuna.storages.JournalStorage(file))
    assert found.best_trial.user_attrs["arm"] == summary["best"]["arm"]
    assert found.best_value == summary["best"]["reward"]
    assert found.trials_dataframe()["state"].tolist() == ["COMPLETE"] * 14

    assert run(toy) == summary
    assert asked(toy.cwd) == entries

    Path("toy.toml").write_text(CAMPAIGN.replace("seed = 3", "seed = 4").replace('"c"]', '"d"]'))
    changed = toy("campaign", "run", "toy.toml")
    assert (changed.code, "seed, tasks.names" in changed.err) == (1, True)


@pytest.mark.slow
def test_campaign_sequence_does_not_depend_on_workers_or_kills(
    toy: Hpctk, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    calm = run(toy, workers=1)
    killed, sequence = kill_coordinators(toy)
    assert killed >= 2
    assert sequence == calm["sequence"]
    monkeypatch.setenv("TOY_SLOWEST_S", "0.15")
    check_kills(toy, tmp_path_factory.mktemp("killed"), calm, (0, 1, 4, 10))


@pytest.mark.soak
@pytest.mark.parametrize("search", SEARCHES)
def test_sequence_of_any_search_does_not_depend_on_workers_or_kills(
    search: str,
    toy: Hpctk,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setenv("TOY_SLOWEST_S", "0.02")
    # A race whose tasks have no durations orders them by those that it measures.
    seconds = 'names = ["a", "b", "c"]\nseconds = { a = 1, b = 2, c = 3 }'
    text = CAMPAIGN.replace(WINDOW, "\n" + SEARCHES[search])
    Path("toy.toml").write_text(text.replace('names = ["a", "b", "c"]', seconds))
    check_kills(toy, tmp_path_factory.mktemp("killed"), run(toy, workers=1), (1, 2))


def check_kills(toy: Hpctk, place: Path, calm: dict[str, Any], entries: tuple[int, ...]) -> None:
    """A campaign whose processes are all killed once its log has so many entries, each time that
    it is begun again, against the same one left alone."""
    other = Hpctk(place)
    (place / "toy.toml").write_bytes((toy.cwd / "toy.toml").read_bytes())
    kills = 0
    for number in entries:
        started = other.start("campaign", "run", "toy.toml", "--workers", "3")
        while asked(place) < number and started.process.poll() is None:
            time.sleep(0.01)
        kills += started.process.poll() is None
        other.kill_all()
        started.process.wait()

    summary = run(other)

    assert kills >= len(entries) - 1
    assert asks_in(place) == asks_in(toy.cwd)
    assert summary["sequence"] == calm["sequence"]
    assert summary["best"] == calm["best"]
    assert summary["ended"] == calm["ended"]


def asks_in(root: Path) -> list[dict[str, Any]]:
    """What the policy asked for, of which tasks."""
    lines = (root / "runs/toy/bandit/trials.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["type"] == "ask"]


def kill_coordinators(toy: Hpctk) -> tuple[int, list[str]]:
    """A campaign whose coordinator alone is killed, which the run starts again: how often, and the
    arms in their order."""
    words = ("campaign", "run", "toy.toml", "--workers", "2", "--run", "runs/again", "--json")
    started = toy.start(*words)
    log = toy.cwd / "runs/again/stages/tasks/log"
    killed = 0
    while started.process.poll() is None and killed < 3:
        if log.is_dir() and len(list(log.iterdir())) > 2 * killed:
            for pid, line in toy.marked().items():
                if "\0coordinate\0" in line:
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        time.sleep(0.02)
    return killed, started.ended().json["sequence"]


def test_second_coordinator_ends_or_repeats_nothing(toy: Hpctk) -> None:
    first = toy.start("campaign", "run", "toy.toml", "--workers", "2", "--json")
    wait_until(lambda: asked(toy.cwd) >= 2, "two asks")
    rivals = [toy.start("campaign", "coordinate", "runs/toy") for _ in range(2)]

    summary = first.ended().json

    assert {rival.ended().code for rival in rivals} <= {0, 75}
    assert len(summary["sequence"]) == len(set(summary["sequence"])) == 14


def test_a_campaigns_run_is_made_and_then_finished_by_run(toy: Hpctk) -> None:
    Path("toy.toml").write_text(CAMPAIGN.replace("budget = 14", "budget = 4"))
    made = toy("init", "runs/toy", "--campaign", "toy.toml")
    left = read_left(toy.cwd / "runs/toy", 1.0)
    done = toy("campaign", "run", "toy.toml", "--workers", "2")
    after = read_left(toy.cwd / "runs/toy", 1.0)

    assert (made.code, made.out) == (0, "runs/toy\n")
    assert (left, after) == ((0, False, 0, 0), (0, True, 0, 0))
    assert done.code == 0, done.err
    assert "best arm" in done.out


@pytest.mark.parametrize("words", [["--items", "toy.toml"], ["--max-attempts", "5"], ["--open"]])
@pytest.mark.usefixtures("toy")
def test_a_campaigns_run_takes_no_other_option(words: list[str]) -> None:
    error = refused("init", "runs/toy", "--campaign", "toy.toml", *words)

    assert "--campaign: no other option can be given" in error.message
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("name", "arms", "tasks"), [("boosting", 720, 5), ("text-pipelines", 420, 3)]
)
def test_an_example_is_a_valid_campaign_whose_code_scores_arms(
    name: str, arms: int, tasks: int
) -> None:
    pytest.importorskip("sklearn", reason="the extra demo is not installed")
    file = REPOSITORY / f"examples/{name}.toml"
    campaign = read_campaign(file)
    found = dry_run(campaign, str(file))
    assert (found["arms"], len(found["tasks"]), found["baseline"]) == (arms, tasks, 1)

    score = load_object(campaign.tasks.workload, campaign.path)
    for arm in list(campaign.arms())[:: arms // 3]:
        assert -1 < score({**arm.keys, "task": campaign.tasks.names[0]})["score"] < 1


def test_the_example_for_pythia_is_5184_arms_in_a_few_lines() -> None:
    file = REPOSITORY / "examples/pythia-l40s.toml"
    lines = [line for line in file.read_text().splitlines() if line and line[0] != "#"]
    found = list(read_campaign(file).arms())

    assert len(found) == 5184
    assert len(lines) <= 25
