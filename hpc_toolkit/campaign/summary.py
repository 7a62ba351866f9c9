"""The outcome of a campaign: the best arm, its uncertainty, and how it compares with others."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit.rewards import WORDS
from hpc_toolkit.campaign.coordinator import arm_of
from hpc_toolkit.campaign.evaluations import Found, searched_of, why_ended
from hpc_toolkit.campaign.settings import METRICS, TASKS, Campaign
from hpc_toolkit.results.gather import gather
from hpc_toolkit.rundir.values import not_finite

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpc_toolkit.bandit import Recommendation
    from hpc_toolkit.campaign.evaluations import Evaluations, Searched
    from hpc_toolkit.queue.view import RunView


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The outcome of a search."""

    policy: str
    scalariser: str
    """How the scores of several tasks became one reward."""
    ended: str | None
    """Why the search has ended; None while it goes on."""
    arms: int
    """Number of arms of the campaign."""
    evaluated: int
    """Arms that the policy chose or that were known before, and that have results, though perhaps
    not of all tasks."""
    evaluations: int
    """Evaluations of an arm on a task that the search made, or that were known before."""
    known: int
    """Evaluations that were known before."""
    all_evaluations: int
    gpu_s: float
    """Duration of these evaluations, in seconds of one worker."""
    best: Found | None
    """The best evaluated arm, by the policy; None if the search ended and no arm has a reward."""
    tasks: list[str]
    """Tasks on which it was compared; fewer than all if the policy needed no more."""
    ties: list[str]
    """Other evaluated arms within the noise of ``best``."""
    baseline: Found | None
    """The best arm of the baseline over the same tasks, among all arms with results of these tasks,
    whether or not the policy chose them."""
    baseline_name: str
    """What people call it."""
    exhaustive: Found | None
    """The best of all arms over all tasks; None unless all were evaluated."""
    exhaustive_ties: list[str]
    """Other arms within the noise of ``exhaustive``."""
    verified: Found | None
    """The reward of ``best`` among all arms over all tasks; None unless all were evaluated."""
    exhaustive_gpu_s: float | None
    """Duration of all evaluations, in seconds of one worker; None unless all were made."""
    sequence: list[str]
    """The policy's arms in the order in which they were first requested."""
    failed_tasks: int
    """Evaluations without a score, of arms that have results of all tasks."""
    failure: str | None
    """What the first of these evaluations returned instead."""
    same_metrics: list[list[str]]
    """Groups of checkpoints whose layers all have exactly equal metrics: probably the same weights,
    which published series have had under two names."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    view: RunView, campaign: Campaign, searched: Searched | None = None
) -> Summary | None:
    """Summarize what is finished so far; None while no arm has a reward and the search goes on.

    ``searched`` is the result of :func:`searched_of`, for callers that have it.
    """
    searched = searched or searched_of(view, campaign)
    campaign, found, best = searched.campaign, searched.found, searched.best
    sealed = view.stages[TASKS].log.sealed
    if best is None and not sealed:
        return None
    over = _compared(best, campaign)
    failures = found.failures()
    known = sum(len(one.scores) for one in found.known)
    return Summary(
        policy=searched.policy,
        scalariser=WORDS[campaign.search.scalariser],
        ended=why_ended(found, searched.decisions, sealed=sealed),
        arms=len(found.arms.arms),
        evaluated=len(searched.arms),
        evaluations=sum(map(len, searched.rows.values())) + known,
        known=known,
        all_evaluations=found.total,
        gpu_s=_seconds(searched.rows.values())
        + math.fsum(second for one in found.known for second in one.seconds.values()),
        best=found.found(best.arm, best) if best else None,
        tasks=over,
        ties=list(best.ties) if best else [],
        baseline=_baseline(found, over),
        baseline_name=campaign.baseline,
        **_exhaustive(found, best),
        sequence=searched.asked,
        failed_tasks=len(failures),
        failure=_said(failures[0]) if failures else None,
        same_metrics=_same_metrics(view, campaign),
    )


def _compared(best: Recommendation | None, campaign: Campaign) -> list[str]:
    names = campaign.tasks.names
    return [name for name in names if best is None or name in {*best.tasks, *best.failed}]


def _baseline(found: Evaluations, over: list[str]) -> Found | None:
    """The best arm of the baseline over these tasks."""
    rewards = found.rewards([arm.id for arm in found.campaign.arms() if arm.baseline], over)
    known = (found.found(*one) for one in rewards.items())
    return max(known, key=attrgetter("reward"), default=None)


def _exhaustive(found: Evaluations, best: Recommendation | None) -> dict[str, Any]:
    """The fields of a summary that are known once all arms have been evaluated on all tasks."""
    everything = found.best() if found.complete else None
    return {
        "exhaustive": found.found(everything.arm, everything) if everything else None,
        "exhaustive_ties": list(everything.ties) if everything else [],
        "verified": _verified(best, found) if everything else None,
        "exhaustive_gpu_s": _seconds(map(dict.values, found.rows.values()))
        if found.complete
        else None,
    }


def _verified(best: Recommendation | None, found: Evaluations) -> Found | None:
    """The reward of ``best`` over all tasks, also if the search compared it by fewer."""
    rewards = found.rewards(found.arms.ids, found.campaign.tasks.names)
    return found.found(best.arm, rewards[best.arm]) if best and best.arm in rewards else None


def _seconds(rows: Iterable[Iterable[dict[str, Any]]]) -> float:
    return math.fsum(row["seconds"] for some in rows for row in some)


def _said(row: dict[str, Any]) -> str:
    """Describe for people what an evaluation returned instead of a score."""
    gave = row["error"] if row["state"] != "done" else json.dumps(row["value"])
    for place, number in not_finite(row.get("types", {})).items():
        gave = f"{place[1:] or 'value'} is {number}"
    return f"{arm_of(row['item'])} on {row['item']['task']}: {str(gave)[:120]}"


def _same_metrics(view: RunView, campaign: Campaign) -> list[list[str]]:
    """Checkpoints of which all arms have the same metrics."""
    if METRICS not in view.stages or campaign.rows is not None:
        return []
    layers: dict[str, dict[int, list[tuple[str, float]]]] = {}
    for row in gather(view, METRICS, partial=True).rows:
        if not isinstance(row["value"], dict):
            continue
        # Whole numbers, such as counts, may agree by chance.
        numbers = sorted(
            (name, value)
            for name, value in row["value"].items()
            if isinstance(value, float) and not value.is_integer()
        )
        if numbers:
            layers.setdefault(row["item"]["checkpoint"], {})[row["item"]["layer"]] = numbers
    alike: dict[str, list[str]] = {}
    for checkpoint, count in Counter(arm.group for arm in campaign.arms()).items():
        found = layers.get(checkpoint, {})
        if len(found) == count:
            alike.setdefault(repr(sorted(found.items())), []).append(checkpoint)
    return [group for group in alike.values() if len(group) > 1]
