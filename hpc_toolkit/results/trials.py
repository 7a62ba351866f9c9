"""The trials of an Optuna study's run, from its results alone: Optuna is not imported."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.status import Search
from hpc_toolkit.rundir.valuefiles import value_columns

if TYPE_CHECKING:
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.rundir.layout import Manifest
    from hpc_toolkit.system.clock import Seldom


def search_of(
    view: RunView, manifest: Manifest, kept: Seldom[dict[str, Any]], complete: bool
) -> Search:
    """The search of a study: its best trial so far, and how many trials were pruned."""
    found, _ = kept.read(lambda: _so_far(view, manifest), complete)
    return Search(found["best"], found)


def _so_far(view: RunView, manifest: Manifest) -> dict[str, Any]:
    (stage,) = manifest.stages
    options = stage.workload.options
    sign = -1 if options["directions"] == ["maximize"] else 1
    counts: Counter[str] = Counter()
    best: tuple[float, int, dict[str, Any]] | None = None
    for row in gather(view, stage.name, partial=True, publish=False):
        value = value_columns(row)
        counts[value.get("state", "FAIL")] += 1
        if value.get("state") == "COMPLETE" and "value" in value:
            this = (sign * value["value"], row["item"]["trial"], value)
            best = min(best or this, this, key=lambda one: one[:2])
    shown = None
    if best is not None:
        params = {key.removeprefix("params."): best[2][key] for key in best[2] if "params." in key}
        arm = ",".join(f"{key}={value}" for key, value in params.items())
        shown = {"arm": arm, "reward": best[2]["value"], "trial": best[1], "stderr": None}
    words = [
        one["of"] if isinstance(one, dict) else one
        for one in (options["sampler"], options["pruner"])
        if one != "none"
    ]
    return {"policy": ", ".join(words), "trials": dict(counts), "best": shown}
