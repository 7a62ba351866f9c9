"""What a campaign would do, from its file alone: nothing is created, downloaded or run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit.arms import NONE
from hpc_toolkit.bandit.asktell import TASK_RULES
from hpc_toolkit.campaign.search import known_results, try_search
from hpc_toolkit.campaign.settings import checked_stages

if TYPE_CHECKING:
    from hpc_toolkit.campaign.settings import Campaign

GEOMETRY = {"size": "log", "step": "log", "layer": "share of the model's layers"}
"""How the features of [[models]] are computed."""


def dry_run(campaign: Campaign, file: str) -> dict[str, Any]:
    """Check the campaign as its start would, and count; ready for JSON.

    A limit or a duration is None where the file does not state it. Raises what the start of the
    campaign would raise.
    """
    campaign = campaign.with_pending()
    try_search(campaign, file)
    checked_stages(campaign, campaign.path)
    search, tasks = campaign.search, campaign.tasks
    arms = list(campaign.arms())
    known = sum(len(one.scores) + len(one.failed) for one in known_results(campaign))
    everything = len(arms) * len(tasks.names)
    limits = [] if search.budget is None else [search.budget * len(tasks.names)]
    limits += [] if search.evaluations is None else [search.evaluations]
    # Known evaluations count towards the limits.
    most = max(0, min(*limits, everything) - known) if limits else None
    features, unused = GEOMETRY, list[str]()
    if campaign.rows is not None:
        columns = campaign.rows.columns()
        kinds = {one.key: one.kind if isinstance(one.kind, str) else "ordered" for one in columns}
        features = {key: kind for key, kind in kinds.items() if kind != NONE}
        unused = [key for key, kind in kinds.items() if kind == NONE]
    seconds = None
    # A race pays for cheap tasks first, so a mean over all tasks would mislead.
    if tasks.seconds and search.policy not in TASK_RULES:
        evaluations = everything - known if search.exhaustive or most is None else most
        seconds = sum(tasks.seconds.values()) / len(tasks.names) * evaluations
    return {
        "name": campaign.name,
        "policy": search.policy,
        "arms": len(arms),
        "tasks": list(tasks.names),
        "features": features,
        "unused": unused,
        "baseline": sum(arm.baseline for arm in arms),
        "baseline_name": campaign.baseline,
        # Items of the metrics stage.
        "measured": len(arms) if campaign.metrics and campaign.metrics.workload else 0,
        "evaluations": everything,
        "known": known,
        "most_arms": search.budget,
        "most_evaluations": most,
        # Arms that are evaluated at once.
        "pending": len(arms) if search.policy in TASK_RULES else search.most_pending,
        "seconds": seconds,
        # Checkpoints to load, by model.
        "checkpoints": dict(Counter(model.name for model in campaign.models for _ in model.steps)),
        "from_hub": any("@" in model.checkpoint for model in campaign.models),
    }
