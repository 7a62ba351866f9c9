"""Campaigns whose items somebody does whenever the coordinator waits."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hpc_toolkit.campaign.coordinator
from hpc_toolkit.campaign.coordinator import Coordinator
from hpc_toolkit.campaign.decisions import Decision, read_decisions
from hpc_toolkit.campaign.settings import Campaign, parse_campaign, settings_of
from hpc_toolkit.campaign.summary import Summary, searched_of, summarize
from hpc_toolkit.cli.campaigns import make_campaign_run
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.valuefiles import Encoded
from tests.toyrun import ToyWorker

NOOP = "hpc_toolkit.science.workloads.synthetic:Noop"
SECONDS = {"a": 1.0, "b": 2.0, "c": 30.0}
"""The tasks, and what each takes."""

Value = dict[str, Any] | float | None
"""What an item gives; None: it fails."""


def campaign_of(run: Run) -> Campaign:
    return settings_of(run.paths, run.manifest)


def toy(search: dict[str, Any], **more: Any) -> Campaign:
    """Twenty arms of two models on three tasks."""
    table: dict[str, Any] = {
        "name": "toy",
        "seed": 3,
        "models": [
            {"name": "s", "layers": 3, "size": 1000, "steps": [0, 4, 16]},
            {"name": "m", "layers": 3, "size": 3000, "steps": [4, 16]},
        ],
        "metrics": {"workload": NOOP},
        "tasks": {"workload": NOOP, "names": list(SECONDS), **more.pop("tasks", {})},
        "search": search,
    }
    return parse_campaign({**table, **more}, "toy.toml")


def score(item: dict[str, Any]) -> float:
    """Best at layer 2 and the latest step of the larger model."""
    step = int(item["checkpoint"].rpartition("step")[2])
    digest = hashlib.sha256(json.dumps(item, sort_keys=True).encode()).hexdigest()
    noise = int(digest[:8], 16) / 2**32
    larger = bool(item["checkpoint"].startswith("m/"))
    near: float = 1 - (item["layer"] - 2) ** 2 / 20
    return near + 0.05 * math.sqrt(step) + 0.01 * larger + 0.02 * noise


def value_of(item: dict[str, Any]) -> Value:
    """Of items of both stages."""
    if "task" in item:
        return {"score": score(item), "stderr": 0.01}
    step = int(item["checkpoint"].rpartition("step")[2])
    return {"entropy": (item["layer"] - 2) ** 2 / 4, "rank": step / 4, "of": "all"}


def work(root: Path, value: Callable[[dict[str, Any]], Value] = value_of) -> None:
    """Do everything that is there, as one more worker."""
    run = Run.open(root)
    view = run.view
    view.poll_claims()
    view.poll()
    worker = ToyWorker(run.paths, f"w{len(list(run.paths.journals.iterdir())):03d}-{os.getpid()}")
    for name, stage in view.stages.items():
        for unit in sorted(stage.state.open):
            generation = stage.claims.generation(unit) + 1
            assert stage.claims.create(unit, generation, worker.name)
            worker.begin(unit, generation)
            worker.unit = f"{name}/{unit}"
            where = stage.unit(unit)
            lines = stage.log.segments[where.entry].lines(where)
            for position, line in zip(where.items, lines, strict=True):
                item = json.loads(line)
                found = value(item)
                seconds = SECONDS.get(item.get("task"), 1.0)
                if found is None:
                    worker.attempt(position, "permanent", seconds=seconds)
                else:
                    encoded = Encoded(found)
                    fields: dict[str, Any] = {"types": encoded.types} if encoded.types else {}
                    worker.attempt(position, seconds=seconds, **fields, value=encoded.natural)
            worker.release()
    worker.finish()


class Stopped(BaseException):
    """A coordinator that is killed where it waits."""


class Played:
    """One campaign; workers do all that is there each time that the coordinator waits."""

    def __init__(
        self,
        root: Path,
        campaign: Campaign,
        patch: pytest.MonkeyPatch,
        value: Callable[[dict[str, Any]], Value] = value_of,
    ) -> None:
        self.root = root
        self.campaign = campaign
        self._value = value
        self._waits = 0
        self.dies_after: int | None = None
        """Waits that the next coordinator survives."""
        make_campaign_run(root, campaign)
        patch.setattr(hpc_toolkit.campaign.coordinator, "time", SimpleNamespace(sleep=self._sleep))
        patch.setattr(hpc_toolkit.campaign.coordinator, "monotonic", lambda: 0.0)

    def _sleep(self, _seconds: float) -> None:
        self._waits += 1
        if self.dies_after is not None and self._waits > self.dies_after:
            raise Stopped
        work(self.root, self._value)

    def coordinate(self, campaign: Campaign | None = None) -> list[Decision]:
        """Coordinate to the end; all decisions."""
        self._waits = 0
        Coordinator(Run.open(self.root).view, campaign or self.campaign).run()
        return self.decisions()

    def killed(self, after: int) -> bool:
        """Coordinate until it has waited so often; False if it came to its end before."""
        self.dies_after = after
        try:
            self.coordinate()
        except Stopped:
            return True
        finally:
            self.dies_after = None
        return False

    def summary(self) -> Summary:
        run = Run.open(self.root)
        found = summarize(searched_of(run.view, campaign_of(run)))
        assert found is not None
        return found

    def decisions(self) -> list[Decision]:
        stage = Run.open(self.root).view.stages["tasks"]
        stage.poll_log()
        return read_decisions(stage.log.segments.values())


Play = Callable[..., Played]
"""What the fixture ``play`` gives."""
