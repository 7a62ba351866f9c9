"""What a campaign found: the best arm, how sure that is, and how far it is from what is known."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit import make_policy
from hpc_toolkit.campaign import TASKS, Campaign
from hpc_toolkit.conduct import EXHAUSTIVE, arm_of, make_arms, observe, read_decisions
from hpc_toolkit.gather import gather
from hpc_toolkit.tables import check_rows

if TYPE_CHECKING:
    from hpc_toolkit.bandit import Observation, Recommendation
    from hpc_toolkit.queue.view import RunView


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One arm and its reward."""

    arm: str
    score: float
    """Mean over its tasks."""
    stderr: float | None
    """Standard error of ``score``; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The outcome of a search."""

    policy: str
    arms: int
    """All arms of the campaign."""
    evaluated: int
    """Arms that the policy chose and that have results."""
    best: Found
    """The best of those."""
    ties: list[str]
    """Other evaluated arms that noise cannot tell from it (2 combined standard errors)."""
    last_layer: Found | None
    """The best last layer among all arms with results, the policy's or not."""
    exhaustive: Found | None
    """The best of all arms; None unless all were evaluated."""
    exhaustive_ties: list[str]
    """Other arms that noise cannot tell from ``exhaustive``."""
    sequence: list[str]
    """The policy's arms in the order in which they were asked."""
    failed_tasks: int
    """Tasks without a score."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def summarize(view: RunView, campaign: Campaign) -> Summary | None:
    """Sum up what is finished so far; None while no arm has a result."""
    stage = view.stages[TASKS]
    rows = gather(view, TASKS, partial=True).rows
    check_rows(rows)
    decisions = read_decisions(list(stage.log.segments.values()))
    chosen = [arm for one in decisions if one["why"] != EXHAUSTIVE for arm in one["arms"]]
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_arm.setdefault(arm_of(row), []).append(row)
    whole = len(campaign.tasks.names)
    observed = {arm: observe(arm, found) for arm, found in by_arm.items() if len(found) == whole}
    searched = _best(campaign, [observed[arm] for arm in chosen if arm in observed])
    if searched is None:
        return None
    last = {arm.id for arm in campaign.arms() if arm.is_last_layer}
    baseline = _best(campaign, [one for arm, one in observed.items() if arm in last])
    total = sum(1 for _ in campaign.arms())
    everything = _best(campaign, list(observed.values())) if len(observed) == total else None
    return Summary(
        policy=campaign.search.policy,
        arms=total,
        evaluated=sum(arm in observed for arm in chosen),
        best=_found(searched),
        ties=list(searched.ties),
        last_layer=_found(baseline) if baseline is not None else None,
        exhaustive=_found(everything) if everything is not None else None,
        exhaustive_ties=list(everything.ties) if everything is not None else [],
        sequence=chosen,
        failed_tasks=sum(len(one.failed) for one in observed.values()),
    )


def _best(campaign: Campaign, observations: list[Observation]) -> Recommendation | None:
    judge = make_policy("random", make_arms(campaign), 0)
    for observation in observations:
        judge.tell(observation)
    return judge.best()


def _found(recommendation: Recommendation) -> Found:
    return Found(arm=recommendation.arm, score=recommendation.mean, stderr=recommendation.stderr)
