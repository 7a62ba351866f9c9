"""A campaign whose items somebody does whenever the coordinator waits."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hpc_toolkit.campaign.coordinator
from hpc_toolkit.campaign.settings import parse_campaign
from hpc_toolkit.cli.campaigns import make_campaign_run
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.run import Run
from tests.faults.cut import Cut
from tests.toyrun import ToyWorker

NOOP = "hpc_toolkit.science.workloads.synthetic:Noop"
CAMPAIGN: dict[str, Any] = {
    "name": "toy",
    "seed": 3,
    "models": [{"name": "s", "layers": 1, "size": 1000, "steps": [0, 1, 4]}],
    "metrics": {"workload": NOOP},
    "tasks": {"workload": NOOP, "names": ["a"]},
    "search": {"policy": "gp-ucb", "budget": 5, "pending": 2, "asks": "window"},
}


def make_campaign(root: Path, campaign: dict[str, Any] = CAMPAIGN) -> None:
    make_campaign_run(root, parse_campaign(campaign, "toy.toml"))


def asked(root: Path) -> list[str]:
    """The arms that were asked for, in order."""
    view = Run.open(root).view
    view.poll()
    segments = view.stages["tasks"].log.segments.values()
    decisions = [segment.decision for segment in segments if segment.decision is not None]
    return [arm for decision in decisions for arm in decision["arms"]]


def table_of(root: Path) -> list[tuple[object, ...]]:
    """What the published table says, but for who did it."""
    table = Run.open(root).table(stage="tasks")
    assert table.published
    return [(row["item"], row["state"], row["value"], row["attempts"]) for row in table.rows]


def play(cut: Cut, root: Path) -> None:
    """Have a worker do all that is there, whenever the coordinator would sleep in this process."""

    def work(_seconds: float) -> None:
        with cut.elsewhere():
            _do_everything(root)

    setattr(hpc_toolkit.campaign.coordinator, "time", SimpleNamespace(sleep=work))  # noqa: B010 - a module's import


def _do_everything(root: Path) -> None:
    run = Run.open(root)
    view = RunView(run.paths, run.manifest)
    view.poll_claims()
    view.poll()
    number = len(list(run.paths.journals.iterdir()))
    worker = ToyWorker(run.paths, f"w{number:03d}-{os.getpid()}")
    for name, stage in view.stages.items():
        for unit in sorted(stage.state.open):
            generation = stage.claims.generation(unit) + 1
            if not stage.claims.create(unit, generation, worker.name):
                continue  # another coordinator waits as well
            worker.begin(unit, generation)
            worker.unit = f"{name}/{unit}"
            segment = stage.log.segments[stage.unit(unit).entry]
            items = [json.loads(line) for line in segment.lines(stage.unit(unit))]
            for item in stage.state.pending(unit):
                value = _value(items[item - stage.unit(unit).first])
                worker.attempt(item, value=value)
            worker.release()
    worker.finish()


def _value(item: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(item, sort_keys=True).encode()
    return {"score": int(hashlib.sha256(text).hexdigest()[:8], 16) / 2**32}
