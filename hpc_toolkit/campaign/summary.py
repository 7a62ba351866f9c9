"""The outcome of a campaign: the best arm, its uncertainty, and how it compares with others."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit import make_policy
from hpc_toolkit.bandit.rewards import WORDS, rewards_of
from hpc_toolkit.bandit.rule import TaskResults
from hpc_toolkit.campaign.coordinator import arm_of
from hpc_toolkit.campaign.decisions import EXHAUSTIVE, read_decisions
from hpc_toolkit.campaign.known import rows_of
from hpc_toolkit.campaign.search import (
    CampaignSearch,
    as_decided,
    make_arms,
    make_tasks,
    observe,
    policy_of,
    score_of,
)
from hpc_toolkit.campaign.settings import METRICS, TASKS, Campaign
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.tables import check_rows
from hpc_toolkit.system.quantities import HOUR_S, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpc_toolkit.bandit import ArmTable, Observation, Pull, Recommendation
    from hpc_toolkit.bandit.rewards import Reward
    from hpc_toolkit.campaign.decisions import Decision
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.results.tables import Row

Rows = dict[str, dict[str, dict[str, Any]]]
"""Finished rows of the tasks stage by arm and task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One arm and its reward."""

    arm: str
    keys: dict[str, Any]
    """Keys and values of the arm."""
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
    """Other evaluated arms within the noise of ``best`` (2 combined standard errors)."""
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
    """The policy's arms in the order in which they were first asked for."""
    failed_tasks: int
    """Evaluations without a score, of arms that have results of all tasks."""
    failure: str | None
    """What the first of these evaluations returned instead."""
    same_metrics: list[list[str]]
    """Groups of checkpoints whose layers all have exactly equal metrics: probably the same weights,
    which published series have had under two names."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Evaluations:
    """The finished evaluations of a campaign."""

    campaign: Campaign
    arms: ArmTable
    rows: Rows
    known: tuple[Observation, ...] = ()
    """Results from before the campaign, which are among ``rows`` too."""

    @property
    def total(self) -> int:
        return len(self.arms.arms) * len(self.campaign.tasks.names)

    @property
    def complete(self) -> bool:
        return self.total == sum(len(found) for found in self.rows.values())

    def rows_of(self, pull: Pull) -> list[dict[str, Any]] | None:
        """The row of each task of a pull; None unless all are finished."""
        found, wanted = self.rows.get(pull.arm, {}), pull.tasks or self.campaign.tasks.names
        return [found[task] for task in wanted] if found.keys() >= set(wanted) else None

    def failures(self) -> list[dict[str, Any]]:
        """The rows without a score, of arms that have results of all tasks."""
        arms = [one for one in self.rows.values() if len(one) == len(self.campaign.tasks.names)]
        return [row for found in arms for row in found.values() if score_of(row) is None]

    def found(self, arm: str, by: Reward | Recommendation) -> Found:
        keys = dict(self.arms.arms[self.arms.index(arm)].keys)
        return Found(arm=arm, keys=keys, score=by.mean, stderr=by.stderr)

    def best(self) -> Recommendation | None:
        search = self.campaign.search
        tasks = make_tasks(self.campaign)
        judge = make_policy("random", self.arms, 0, tasks=tasks, scalariser=search.scalariser)
        for arm, found in self.rows.items():
            judge.tell(observe(arm, list(found.values())))
        return judge.best()

    def rewards(self, among: Sequence[str], tasks: Iterable[str]) -> dict[str, Reward]:
        """The rewards over ``tasks`` of the arms in ``among`` that have a row of each task."""
        campaign, arms, wanted = self.campaign, self.arms, set(tasks)
        results, known = TaskResults.empty(len(arms.arms), make_tasks(campaign)), []
        for arm in among:
            if self.rows.get(arm, {}).keys() >= wanted:
                results.take(arms.index(arm), observe(arm, list(self.rows[arm].values())))
                known.append(arms.index(arm))
        columns = [index for index, name in enumerate(campaign.tasks.names) if name in wanted]
        scalariser = campaign.search.scalariser
        rewards = rewards_of(results, known, tasks=columns, scalariser=scalariser)
        return {arms.ids[index]: reward for index, reward in rewards.items()}


@dataclass(frozen=True, slots=True)
class _Searched:
    """What a search has found, from its decisions and the rows that are finished."""

    campaign: Campaign
    decisions: list[Decision]
    found: _Evaluations
    rows: dict[Pull, list[Row]]
    """The rows of each pull that is finished."""
    best: Recommendation | None

    @property
    def arms(self) -> set[str]:
        """The arms with results, also those that were known before."""
        return {pull.arm for pull in self.rows} | {one.arm for one in self.found.known}

    @property
    def pulls(self) -> list[Pull]:
        """All that the policy asked for."""
        return [pull for one in self.decisions if one.why != EXHAUSTIVE for pull in one.pulls]


def _searched(view: RunView, campaign: Campaign) -> _Searched:
    # This reads the log, which the decisions are in.
    rows = _rows(view)
    decisions = read_decisions(view.stages[TASKS].log.segments.values())
    campaign = as_decided(campaign, decisions)
    if campaign.search.is_own:
        # The code of the policy is not needed to compare results, and reading a run executes none.
        search = replace(campaign.search, policy="random", options={})
        campaign = replace(campaign, search=search)
    arms = make_arms(campaign, decisions[0].metrics if decisions else None)
    known = decisions[0].known if decisions else ()
    for observation in known:
        keys = arms.arms[arms.index(observation.arm)].keys
        rows.setdefault(observation.arm, {}).update(rows_of(observation, keys))
    found = _Evaluations(campaign, arms, rows, known)
    judge = policy_of(campaign, arms)
    for observation in known:
        judge.tell(observation)
    searched = _Searched(campaign, decisions, found, {}, None)
    for pull in searched.pulls:
        if (some := found.rows_of(pull)) is not None:
            searched.rows[pull] = some
            judge.tell(observe(pull.arm, some))
    return replace(searched, best=judge.best())


def best_so_far(view: RunView, campaign: Campaign) -> dict[str, Any] | None:
    """The best arm that the search has found; None while no arm has a reward."""
    searched = _searched(view, campaign)
    if searched.best is None:
        return None
    found = searched.found.found(searched.best.arm, searched.best)
    return {**asdict(found), "evaluated": len(searched.arms), "arms": len(searched.found.arms.arms)}


def summarize(view: RunView, campaign: Campaign) -> Summary | None:
    """Summarize what is finished so far; None while no arm has a reward and the search goes on."""
    searched = _searched(view, campaign)
    policy = as_decided(campaign, searched.decisions).search.policy
    campaign, found, best = searched.campaign, searched.found, searched.best
    sealed = view.stages[TASKS].log.sealed
    if best is None and not sealed:
        return None
    over = _compared(best, campaign)
    failures = found.failures()
    known = sum(len(one.scores) for one in found.known)
    return Summary(
        policy=policy,
        scalariser=WORDS[campaign.search.scalariser],
        ended=_ended(found, searched.decisions, sealed=sealed),
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
        sequence=list(dict.fromkeys(pull.arm for pull in searched.pulls)),
        failed_tasks=len(failures),
        failure=_said(failures[0]) if failures else None,
        same_metrics=_same_metrics(view, campaign),
    )


def _rows(view: RunView) -> Rows:
    table = gather(view, TASKS, partial=True).rows
    check_rows(table)
    rows: Rows = {}
    for row in table:
        rows.setdefault(arm_of(row["item"]), {})[row["item"]["task"]] = row
    return rows


def _compared(best: Recommendation | None, campaign: Campaign) -> list[str]:
    names = campaign.tasks.names
    return [name for name in names if best is None or name in {*best.tasks, *best.failed}]


def _baseline(found: _Evaluations, over: list[str]) -> Found | None:
    """The best arm of the baseline over these tasks."""
    rewards = found.rewards([arm.id for arm in found.campaign.arms() if arm.baseline], over)
    known = (found.found(*one) for one in rewards.items())
    return max(known, key=attrgetter("score"), default=None)


def _exhaustive(found: _Evaluations, best: Recommendation | None) -> dict[str, Any]:
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


def _verified(best: Recommendation | None, found: _Evaluations) -> Found | None:
    """The reward of ``best`` over all tasks, also if the search compared it by fewer."""
    rewards = found.rewards(found.arms.ids, found.campaign.tasks.names)
    return found.found(best.arm, rewards[best.arm]) if best and best.arm in rewards else None


def _seconds(rows: Iterable[Iterable[dict[str, Any]]]) -> float:
    return math.fsum(row["seconds"] for some in rows for row in some)


def _said(row: dict[str, Any]) -> str:
    """Describe for people what an evaluation returned instead of a score."""
    gave = row["error"] if row["state"] != "done" else json.dumps(row["value"])
    return f"{arm_of(row['item'])} on {row['item']['task']}: {str(gave)[:120]}"


def _ended(found: _Evaluations, decisions: list[Decision], *, sealed: bool) -> str | None:
    """Why the search ended, found by the same steps that the coordinator takes."""
    search = CampaignSearch(found.campaign, found.arms, found.known)
    last_s, over = 0.0, sealed
    for decision in decisions:
        if decision.why == EXHAUSTIVE:
            over = True
            break
        search.tell(decision.tells)
        search.take(decision)
        last_s = decision.wall_s

    def results_of(pulls: Sequence[Pull]) -> list[Observation] | None:
        rows = [(pull.arm, found.rows_of(pull)) for pull in pulls]
        results = [observe(arm, some) for arm, some in rows if some is not None]
        return results if len(results) == len(rows) else None

    search.advance(results_of, lambda: last_s)
    if search.ended is None and over:
        # The time since the last decision is not recorded.
        hours = found.campaign.search.wall_hours
        end = "its end was decided"
        if hours is None:
            return end
        return f"{end}: {format_duration(hours * HOUR_S)}, or a budget of then"
    return search.ended


def _same_metrics(view: RunView, campaign: Campaign) -> list[list[str]]:
    """Checkpoints of which all arms have the same metrics."""
    if METRICS not in view.stages or campaign.rows is not None:
        return []
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
    for checkpoint, count in Counter(arm.group for arm in campaign.arms()).items():
        found = layers.get(checkpoint, {})
        if len(found) == count:
            alike.setdefault(repr(sorted(found.items())), []).append(checkpoint)
    return [group for group in alike.values() if len(group) > 1]
