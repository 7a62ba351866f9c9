"""What a campaign would do, from its file alone: nothing is created, downloaded or run."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit.arms import NONE
from hpc_toolkit.bandit.asktell import TASK_RULES
from hpc_toolkit.campaign.search import known_results, try_search
from hpc_toolkit.campaign.settings import checked_stages

if TYPE_CHECKING:
    from hpc_toolkit.campaign.settings import Campaign
    from hpc_toolkit.campaign.tables import Search

GEOMETRY = {"size": "log", "step": "log", "layer": "share of the model's layers"}
"""How the features of [[models]] are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a campaign would request; None where nothing limits or states it."""

    name: str
    policy: str
    arms: int
    tasks: tuple[str, ...]
    features: dict[str, str]
    """How each key of the arms becomes features."""
    unused: tuple[str, ...]
    """Keys that do not."""
    baseline: int
    """Arms of the baseline."""
    baseline_name: str
    measured: int
    """Items of the metrics stage."""
    evaluations: int
    """Evaluations if every arm is evaluated on every task."""
    known: int
    """Evaluations whose results are known."""
    most_arms: int | None
    most_evaluations: int | None
    """Evaluations that the search makes at most."""
    pending: int
    """Arms that are evaluated at once."""
    seconds: float | None
    """Expected duration of these evaluations on one worker."""
    checkpoints: dict[str, int]
    """Checkpoints to load, by model."""
    from_hub: bool
    """Whether checkpoints are names on a hub."""

    @property
    def at_once(self) -> int:
        """Most items that workers find at the same time."""
        return self.pending * len(self.tasks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def dry_run(campaign: Campaign, file: str) -> DryRun:
    """Check the campaign as its start would, and count. Raises what its start would raise."""
    campaign = campaign.with_pending()
    try_search(campaign, file)
    checked_stages(campaign, campaign.path)
    search, tasks = campaign.search, campaign.tasks
    arms = list(campaign.arms())
    known = sum(len(one.scores) + len(one.failed) for one in known_results(campaign))
    most = _most_evaluations(search, len(arms), len(tasks.names), known)
    features, unused = _features(campaign)
    everything = len(arms) * len(tasks.names) - known
    return DryRun(
        name=campaign.name,
        policy=search.policy,
        arms=len(arms),
        tasks=tasks.names,
        features=features,
        unused=unused,
        baseline=sum(arm.baseline for arm in arms),
        baseline_name=campaign.baseline,
        measured=len(arms) if campaign.metrics and campaign.metrics.workload else 0,
        evaluations=len(arms) * len(tasks.names),
        known=known,
        most_arms=search.budget,
        most_evaluations=most,
        pending=len(arms) if search.policy in TASK_RULES else search.most_pending,
        seconds=_seconds(campaign, everything if search.exhaustive or most is None else most),
        checkpoints=dict(Counter(model.name for model in campaign.models for step in model.steps)),
        from_hub=any("@" in model.checkpoint for model in campaign.models),
    )


def _features(campaign: Campaign) -> tuple[dict[str, str], tuple[str, ...]]:
    """How each key becomes features, and the keys that do not."""
    if campaign.rows is None:
        return GEOMETRY, ()
    columns = campaign.rows.columns()
    used = {
        column.key: column.kind if isinstance(column.kind, str) else "ordered"
        for column in columns
        if column.kind != NONE
    }
    return used, tuple(column.key for column in columns if column.kind == NONE)


def _seconds(campaign: Campaign, evaluations: int) -> float | None:
    """Expected duration of evaluations; None if it is not known."""
    tasks = campaign.tasks
    # A race pays for cheap tasks first, so a mean over all tasks would mislead.
    if not tasks.seconds or campaign.search.policy in TASK_RULES:
        return None
    return sum(tasks.seconds.values()) / len(tasks.names) * evaluations


def _most_evaluations(search: Search, arms: int, tasks: int, known: int) -> int | None:
    """Known evaluations count towards the limits."""
    limits = [] if search.budget is None else [search.budget * tasks]
    limits += [] if search.evaluations is None else [search.evaluations]
    return max(0, min(*limits, arms * tasks) - known) if limits else None
