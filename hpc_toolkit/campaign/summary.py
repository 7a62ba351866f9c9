"""The outcome of a campaign: the best arm, its uncertainty, and how it compares with others."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit import make_policy
from hpc_toolkit.bandit.results import ResultArrays
from hpc_toolkit.bandit.reward import rewards_of
from hpc_toolkit.bandit.scalarise import WORDS
from hpc_toolkit.campaign.conduct import arm_of, observe, score_of
from hpc_toolkit.campaign.decisions import EXHAUSTIVE, read_decisions
from hpc_toolkit.campaign.search import CampaignSearch, as_decided, make_arms, make_tasks, policy_of
from hpc_toolkit.campaign.settings import METRICS, TASKS, Campaign
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.tables import check_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpc_toolkit.bandit import ArmTable, Observation, Pull, Recommendation
    from hpc_toolkit.bandit.reward import Reward
    from hpc_toolkit.campaign.decisions import Decision
    from hpc_toolkit.queue.view import RunView

Rows = dict[str, dict[str, dict[str, Any]]]
"""Finished rows of the tasks stage by arm and task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One arm and its reward."""

    arm: str
    score: float
    """Its reward: what the scalariser makes of its scores, by default their mean."""
    stderr: float | None
    """Standard error of ``score``; None if unknown."""


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
    """Arms that the policy chose and that have results, though perhaps not of all tasks."""
    evaluations: int
    """Evaluations of an arm on a task that the search made."""
    all_evaluations: int
    """Evaluations of all arms on all tasks."""
    gpu_s: float
    """Duration of the search's evaluations, in seconds of one worker."""
    best: Found | None
    """The best evaluated arm, by the policy; None if the search ended and no arm has a reward."""
    tasks: list[str]
    """Tasks on which it was compared; fewer than all if the policy needed no more."""
    ties: list[str]
    """Other evaluated arms within the noise of ``best`` (2 combined standard errors)."""
    last_layer: Found | None
    """The best last layer over the same tasks, among all arms with results of these tasks, whether
    or not the policy chose them."""
    exhaustive: Found | None
    """The best of all arms over all tasks; None unless all were evaluated."""
    exhaustive_ties: list[str]
    """Other arms within the noise of ``exhaustive``."""
    verified: Found | None
    """The reward of ``best`` among all arms over all tasks; None unless all were evaluated."""
    exhaustive_gpu_s: float | None
    """Duration of all evaluations, in seconds of one worker; None unless all were made."""
    sequence: list[str]
    """The policy's arms in the order in which they were first asked for."""
    failed_tasks: int
    """Evaluations without a score, of arms that have results of all tasks."""
    failure: str | None
    """What the first of these evaluations returned instead."""
    same_metrics: list[list[str]]
    """Groups of checkpoints whose layers all have exactly equal metrics: probably the same weights,
    which published series have had under two names."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def summarize(view: RunView, campaign: Campaign) -> Summary | None:
    """Summarize what is finished so far; None while no arm has a reward and the search goes on."""
    stage = view.stages[TASKS]
    rows = _rows(view)
    decisions = read_decisions(stage.log.segments.values())
    campaign = as_decided(campaign, decisions)
    metrics = decisions[0].metrics if decisions else None
    arms = make_arms(campaign, metrics)
    pulls = [pull for one in decisions if one.why != EXHAUSTIVE for pull in one.pulls]
    names = campaign.tasks.names
    searched = {
        pull: [rows[pull.arm][task] for task in pull.tasks or names]
        for pull in pulls
        if rows.get(pull.arm, {}).keys() >= set(pull.tasks or names)
    }
    judge = policy_of(campaign, arms)
    for pull, found in searched.items():
        judge.tell(observe(pull.arm, found))
    best = judge.best()
    if best is None and not stage.log.sealed:
        return None
    compared = {*best.tasks, *best.failed} if best is not None else names
    over = [name for name in names if name in compared]
    last = [arm.id for arm in campaign.arms() if arm.is_last_layer]
    baseline = _rewards(campaign, arms, rows, last, over)
    whole = len(arms.arms) * len(names) == sum(len(found) for found in rows.values())
    everything = _best_of_all(campaign, arms, rows) if whole else None
    verified = (
        _rewards(campaign, arms, rows, arms.ids, names).get(best.arm) if whole and best else None
    )
    failures = [
        row
        for arm in rows.values()
        if len(arm) == len(names)
        for row in arm.values()
        if score_of(row) is None
    ]
    chosen = list(dict.fromkeys(pull.arm for pull in pulls))
    return Summary(
        policy=campaign.search.policy,
        scalariser=WORDS[campaign.search.scalariser],
        ended=_ended(campaign, arms, decisions, rows, sealed=stage.log.sealed),
        arms=len(arms.arms),
        evaluated=len({pull.arm for pull in searched}),
        evaluations=sum(map(len, searched.values())),
        all_evaluations=len(arms.arms) * len(names),
        gpu_s=math.fsum(row["seconds"] for found in searched.values() for row in found),
        best=_found(best) if best is not None else None,
        tasks=over,
        ties=list(best.ties) if best is not None else [],
        last_layer=_highest(baseline),
        exhaustive=_found(everything) if everything is not None else None,
        exhaustive_ties=list(everything.ties) if everything is not None else [],
        verified=_scored(best.arm, verified) if best and verified else None,
        exhaustive_gpu_s=_seconds(rows) if whole else None,
        sequence=chosen,
        failed_tasks=len(failures),
        failure=_said(failures[0]) if failures else None,
        same_metrics=_same_metrics(view, campaign),
    )


def _rows(view: RunView) -> Rows:
    rows = gather(view, TASKS, partial=True).rows
    check_rows(rows)
    found: Rows = {}
    for row in rows:
        found.setdefault(arm_of(row["item"]), {})[row["item"]["task"]] = row
    return found


def _seconds(rows: Rows) -> float:
    return math.fsum(row["seconds"] for found in rows.values() for row in found.values())


def _said(row: dict[str, Any]) -> str:
    """Describe for people what an evaluation returned instead of a score."""
    gave = row["error"] if row["state"] != "done" else json.dumps(row["value"])
    return f"{arm_of(row['item'])} on {row['item']['task']}: {str(gave)[:120]}"


def _best_of_all(campaign: Campaign, arms: ArmTable, rows: Rows) -> Recommendation | None:
    judge = make_policy(
        "random", arms, 0, tasks=make_tasks(campaign), scalariser=campaign.search.scalariser
    )
    for arm, found in rows.items():
        judge.tell(observe(arm, list(found.values())))
    return judge.best()


def _rewards(
    campaign: Campaign, arms: ArmTable, rows: Rows, among: Sequence[str], tasks: Iterable[str]
) -> dict[str, Reward]:
    """The rewards over ``tasks`` of the arms in ``among`` that have a row of each task."""
    results, known, wanted = ResultArrays(len(arms.arms), make_tasks(campaign)), [], set(tasks)
    for arm in among:
        if rows.get(arm, {}).keys() >= wanted:
            results.take(arms.index(arm), observe(arm, list(rows[arm].values())))
            known.append(arms.index(arm))
    columns = [index for index, name in enumerate(campaign.tasks.names) if name in wanted]
    rewards = rewards_of(
        results.results(), known, tasks=columns, scalariser=campaign.search.scalariser
    )
    return {arms.ids[index]: reward for index, reward in rewards.items()}


def _highest(rewards: dict[str, Reward]) -> Found | None:
    if not rewards:
        return None
    arm = max(rewards, key=lambda one: rewards[one].mean)
    return _scored(arm, rewards[arm])


def _scored(arm: str, reward: Reward) -> Found:
    return Found(arm=arm, score=reward.mean, stderr=reward.stderr)


def _found(recommendation: Recommendation) -> Found:
    return Found(arm=recommendation.arm, score=recommendation.mean, stderr=recommendation.stderr)


def _ended(
    campaign: Campaign, arms: ArmTable, decisions: list[Decision], rows: Rows, *, sealed: bool
) -> str | None:
    """Why the search ended, found by the same steps that the coordinator takes."""
    search = CampaignSearch(campaign, arms)
    last_s, over = 0.0, sealed
    for decision in decisions:
        if decision.why == EXHAUSTIVE:
            over = True
            break
        search.tell(decision.tells)
        search.take(decision)
        last_s = decision.wall_s

    def results_of(pulls: Sequence[Pull]) -> list[Observation] | None:
        found = []
        for pull in pulls:
            wanted = pull.tasks or campaign.tasks.names
            if not rows.get(pull.arm, {}).keys() >= set(wanted):
                return None
            found.append(observe(pull.arm, [rows[pull.arm][task] for task in wanted]))
        return found

    search.advance(results_of, lambda: last_s)
    if search.ended is None and over:
        # The time since the last decision is not recorded.
        hours = campaign.search.wall_hours
        end = "its end was decided"
        return end if hours is None else f"{end}: {hours:.4g} hours, or a budget of then"
    return search.ended


def _same_metrics(view: RunView, campaign: Campaign) -> list[list[str]]:
    """Groups of checkpoints that have equal metrics in all their layers."""
    layers: dict[str, dict[int, list[tuple[str, float]]]] = {}
    for row in gather(view, METRICS, partial=True).rows:
        # Whole numbers, such as counts, may agree by chance.
        numbers = sorted(
            (name, value)
            for name, value in (row["value"] or {}).items()
            if isinstance(value, float) and not value.is_integer()
        )
        if numbers:
            layers.setdefault(row["item"]["checkpoint"], {})[row["item"]["layer"]] = numbers
    alike: dict[str, list[str]] = {}
    counts = {arm.checkpoint: arm.model.layers + 1 for arm in campaign.arms()}
    for checkpoint, count in counts.items():
        found = layers.get(checkpoint, {})
        if len(found) == count:
            alike.setdefault(repr(sorted(found.items())), []).append(checkpoint)
    return [group for group in alike.values() if len(group) > 1]
