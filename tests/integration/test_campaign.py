"""A whole campaign with real processes: stages, the bandit's sequence, kills at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.realrun import wait_until

HERE = Path(__file__).parent
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


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "toy.toml"
    path.write_text(CAMPAIGN)
    (tmp_path / "toy_campaign.py").write_bytes((HERE / "toy_campaign.py").read_bytes())
    yield path
    for pid in processes_in(tmp_path):
        os.kill(pid, signal.SIGKILL)


def command(campaign: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hpc_toolkit", *words],
        cwd=campaign.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    out, err = process.communicate()
    assert process.returncode == code, err
    return out


def run(campaign: Path, *words: str, workers: int = 3) -> dict[str, Any]:
    words = ("campaign", "run", campaign.name, "--workers", str(workers), "--json", *words)
    summary: dict[str, Any] = json.loads(finish(command(campaign, *words)))
    return summary


def processes_in(root: Path) -> list[int]:
    """The processes whose working directory is ``root``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == root:
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def kill_everything(process: subprocess.Popen[str], root: Path) -> None:
    """SIGKILL for the parent, the coordinator, workers and executors at once."""
    for pid in processes_in(root):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate()


def asked(root: Path) -> int:
    log = root / "runs/toy/stages/tasks/log"
    return len(list(log.iterdir())) if log.is_dir() else 0


def test_campaign_runs_all_stages_once_and_is_refused_with_changed_settings(campaign: Path) -> None:
    summary = run(campaign)
    entries = asked(campaign.parent)

    assert summary["arms"] == ARMS
    assert summary["evaluated"] == 14
    assert summary["best"]["arm"] in ("s/step16/layer3", "m/step16/layer3")
    status = json.loads(finish(command(campaign, "status", "--json")))
    assert status["complete"]
    assert status["stages"]["prepare"]["done"] == 2
    assert status["stages"]["metrics"]["done"] == ARMS
    assert status["stages"]["tasks"]["done"] == 14 * 3

    assert run(campaign) == summary
    assert asked(campaign.parent) == entries

    campaign.write_text(CAMPAIGN.replace("seed = 3", "seed = 4").replace('"c"]', '"d"]'))
    changed = command(campaign, "campaign", "run", "toy.toml")
    assert "seed, tasks.names" in changed.communicate()[1]
    assert changed.returncode == 1


@pytest.mark.slow
def test_campaign_sequence_does_not_depend_on_workers_or_kills(
    campaign: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("killed")
    calm = run(campaign, workers=1)
    monkeypatch.setenv("TOY_SLOWEST_S", "0.15")
    check_kills(campaign, other, calm, (0, 1, 3, 4, 7, 10, 13))


@pytest.mark.soak
@pytest.mark.parametrize("search", SEARCHES)
def test_sequence_of_any_search_does_not_depend_on_workers_or_kills(
    search: str,
    campaign: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setenv("TOY_SLOWEST_S", "0.02")
    # A race whose tasks have no durations orders them by those that it measures.
    seconds = 'names = ["a", "b", "c"]\nseconds = { a = 1, b = 2, c = 3 }'
    text = CAMPAIGN.replace(WINDOW, "\n" + SEARCHES[search])
    campaign.write_text(text.replace('names = ["a", "b", "c"]', seconds))
    other = tmp_path_factory.mktemp("killed")
    check_kills(campaign, other, run(campaign, workers=1), (1, 2))


def check_kills(
    campaign: Path, other: Path, calm: dict[str, Any], entries: tuple[int, ...]
) -> None:
    """A campaign whose processes are all killed once its log has so many entries, each time that
    it is begun again, against the same one left alone."""
    for name in ("toy.toml", "toy_campaign.py"):
        (other / name).write_bytes((campaign.parent / name).read_bytes())
    kills = 0
    for number in entries:
        process = command(other / "toy.toml", "campaign", "run", "toy.toml", "--workers", "3")
        while asked(other) < number and process.poll() is None:
            time.sleep(0.01)
        kills += process.poll() is None
        kill_everything(process, other)

    summary = run(other / "toy.toml")

    assert kills >= min(6, len(entries))
    assert asks_in(other) == asks_in(campaign.parent)
    assert summary["sequence"] == calm["sequence"]
    assert summary["best"] == calm["best"]
    assert summary["ended"] == calm["ended"]


def asks_in(root: Path) -> list[dict[str, Any]]:
    """What the policy asked for, of which tasks."""
    lines = (root / "runs/toy/bandit/trials.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["type"] == "ask"]


@pytest.mark.slow
def test_a_coordinator_killed_alone_is_started_again_by_the_run(campaign: Path) -> None:
    calm = run(campaign)
    process = command(
        campaign, "campaign", "run", "toy.toml", "--workers", "2", "--run", "runs/again", "--json"
    )
    log = campaign.parent / "runs/again/stages/tasks/log"
    killed = 0
    while process.poll() is None and killed < 3:
        if log.is_dir() and len(list(log.iterdir())) > 2 * killed:
            for pid in coordinators(campaign.parent):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        time.sleep(0.02)

    summary = json.loads(finish(process))

    assert killed >= 2
    assert summary["sequence"] == calm["sequence"]


def coordinators(root: Path) -> list[int]:
    found = []
    for pid in processes_in(root):
        try:
            if b"\0coordinate\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def test_second_coordinator_ends_or_repeats_nothing(campaign: Path) -> None:
    process = command(campaign, "campaign", "run", "toy.toml", "--workers", "2", "--json")
    wait_until(lambda: asked(campaign.parent) >= 2, "two asks")
    rivals = [command(campaign, "campaign", "coordinate", "runs/toy") for _ in range(2)]

    summary = json.loads(finish(process))
    for rival in rivals:
        rival.communicate()

    assert {rival.returncode for rival in rivals} <= {0, 75}
    assert len(summary["sequence"]) == len(set(summary["sequence"])) == 14


def test_campaign_with_an_unknown_key_names_the_near_miss(campaign: Path) -> None:
    campaign.write_text(CAMPAIGN.replace("budget", "budgett"))

    process = command(campaign, "campaign", "run", "toy.toml")
    _, err = process.communicate()

    assert process.returncode == 1
    assert "toy.toml: search: unknown key 'budgett'" in err
    assert "did you mean 'budget'?" in err
    assert not (campaign.parent / "runs").exists()
