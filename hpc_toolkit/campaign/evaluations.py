"""What a search has evaluated, from its decisions and the rows that are finished."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit import make_policy
from hpc_toolkit.bandit.rewards import rewards_of
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
from hpc_toolkit.campaign.settings import TASKS, Campaign
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.tables import check_rows
from hpc_toolkit.system.quantities import HOUR_S, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpc_toolkit.bandit import ArmTable, Observation, Policy, Pull, Recommendation
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
    reward: float
    """What the scalariser makes of its scores, by default their mean."""
    stderr: float | None
    """Standard error of ``reward``; None if unknown."""


@dataclass(frozen=True, slots=True)
class Evaluations:
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

    def lacks(self, arm: str) -> str:
        """Why an arm has no reward over all tasks."""
        done, every = len(self.rows.get(arm, {})), len(self.campaign.tasks.names)
        return (
            "failed" if done == every else f"{done} of {every} tasks" if done else "not evaluated"
        )

    def failures(self) -> list[dict[str, Any]]:
        """The rows without a score, of arms that have results of all tasks."""
        arms = [one for one in self.rows.values() if len(one) == len(self.campaign.tasks.names)]
        return [row for found in arms for row in found.values() if score_of(row) is None]

    def found(self, arm: str, by: Reward | Recommendation) -> Found:
        keys = dict(self.arms.arms[self.arms.index(arm)].keys)
        return Found(arm=arm, keys=keys, reward=by.mean, stderr=by.stderr)

    def policy(self) -> Policy:
        """The policy of the search, which was told what was known before."""
        policy = policy_of(self.campaign, self.arms)
        for observation in self.known:
            policy.tell(observation)
        return policy

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
class Searched:
    """What a search has found, from its decisions and the rows that are finished."""

    policy: str
    campaign: Campaign
    """As it was decided, except that a user's own policy is replaced: its code is not run."""
    decisions: list[Decision]
    found: Evaluations
    rows: dict[Pull, list[Row]]
    """The rows of each pull that is finished."""
    best: Recommendation | None

    @property
    def arms(self) -> set[str]:
        """The arms with results, also those that were known before."""
        return {pull.arm for pull in self.rows} | {one.arm for one in self.found.known}

    @property
    def rounds(self) -> list[Decision]:
        """The decisions of the policy."""
        return [one for one in self.decisions if one.why != EXHAUSTIVE]

    @property
    def pulls(self) -> list[Pull]:
        """All that the policy requested."""
        return [pull for one in self.rounds for pull in one.pulls]

    @property
    def asked(self) -> list[str]:
        """The policy's arms in the order in which they were first requested."""
        return list(dict.fromkeys(pull.arm for pull in self.pulls))


def searched_of(view: RunView, campaign: Campaign) -> Searched:
    # This reads the log, which the decisions are in.
    rows = _rows(view)
    decisions = read_decisions(view.stages[TASKS].log.segments.values())
    campaign = as_decided(campaign, decisions)
    name = campaign.search.policy
    if campaign.search.is_own:
        # The code of the policy is not needed to compare results, and reading a run executes none.
        search = replace(campaign.search, policy="random", options={})
        campaign = replace(campaign, search=search)
    arms = make_arms(campaign, decisions[0].metrics if decisions else None)
    known = decisions[0].known if decisions else ()
    for observation in known:
        keys = arms.arms[arms.index(observation.arm)].keys
        rows.setdefault(observation.arm, {}).update(rows_of(observation, keys))
    found = Evaluations(campaign, arms, rows, known)
    judge = found.policy()
    searched = Searched(name, campaign, decisions, found, {}, None)
    for pull in searched.pulls:
        if (some := found.rows_of(pull)) is not None:
            searched.rows[pull] = some
            judge.tell(observe(pull.arm, some))
    return replace(searched, best=judge.best())


def _rows(view: RunView) -> Rows:
    table = gather(view, TASKS, partial=True).rows
    check_rows(table)
    rows: Rows = {}
    for row in table:
        rows.setdefault(arm_of(row["item"]), {})[row["item"]["task"]] = row
    return rows


def why_ended(found: Evaluations, decisions: list[Decision], *, sealed: bool) -> str | None:
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
