"""What a search has evaluated, from its decisions and the rows that are finished."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_toolkit import bandit
from hpc_toolkit.bandit.rule import Reward, TaskResults, rewards_of
from hpc_toolkit.campaign.coordinator import arm_of
from hpc_toolkit.campaign.decisions import EXHAUSTIVE, Decision, read_decisions, rows_of
from hpc_toolkit.campaign.search import (
    CampaignSearch,
    as_decided,
    make_arms,
    make_tasks,
    observe,
    policy_of,
)
from hpc_toolkit.campaign.settings import TASKS, Campaign
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.tables import Row, check_rows

Rows = dict[str, dict[str, "Row"]]
"""Finished rows of the tasks stage by arm and task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One arm and its reward."""

    arm: str
    keys: dict[str, Any]
    """Keys and values of the arm."""
    reward: float
    """The mean of its scores."""
    stderr: float | None
    """Standard error of ``reward``; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a search has found; its status, summary and page are derived from this alone."""

    policy: str
    campaign: Campaign
    """As it was decided, except that a user's own policy is replaced: its code is not run."""
    sealed: bool
    """Whether nothing can be requested any more."""
    decisions: list[Decision]
    arms: bandit.ArmTable
    rows: Rows
    """All finished rows, also those after the search, and results from before the campaign."""
    done: dict[bandit.Pull, list[Row]]
    """The rows of each pull of the policy that is finished."""
    best: bandit.Recommendation | None
    """The best arm by the policy."""

    @property
    def known(self) -> tuple[bandit.Observation, ...]:
        """Results from before the campaign."""
        return self.decisions[0].known if self.decisions else ()

    @property
    def evaluated(self) -> set[str]:
        """The arms with results, also those that were known before."""
        return {pull.arm for pull in self.done} | {one.arm for one in self.known}

    @property
    def rounds(self) -> list[Decision]:
        """The decisions of the policy."""
        return [one for one in self.decisions if one.why != EXHAUSTIVE]

    @property
    def pulls(self) -> list[bandit.Pull]:
        """All that the policy requested."""
        return [pull for one in self.rounds for pull in one.pulls]

    @property
    def asked(self) -> list[str]:
        """The policy's arms in the order in which they were first requested."""
        return list(dict.fromkeys(pull.arm for pull in self.pulls))

    @property
    def total(self) -> int:
        return len(self.arms.arms) * len(self.campaign.tasks.names)

    @property
    def compared(self) -> list[str]:
        """The tasks by which the policy found its best arm; all if no arm has a reward."""
        names, best = self.campaign.tasks.names, self.best
        return [name for name in names if best is None or name in {*best.tasks, *best.failed}]

    @property
    def complete(self) -> bool:
        """Whether all arms have been evaluated on all tasks."""
        return self.total == sum(map(len, self.rows.values()))

    def lacks(self, arm: str) -> str:
        """Why an arm has no reward over all tasks."""
        done, every = len(self.rows.get(arm, {})), len(self.campaign.tasks.names)
        return (
            "failed" if done == every else f"{done} of {every} tasks" if done else "not evaluated"
        )

    def found(self, arm: str, by: Reward | bandit.Recommendation) -> Found:
        keys = dict(self.arms.arms[self.arms.index(arm)].keys)
        return Found(arm=arm, keys=keys, reward=by.mean, stderr=by.stderr)

    def judge(self) -> bandit.Policy:
        """The policy of the search, which was told what was known before."""
        return _judge(self.campaign, self.arms, self.known)

    def rewards(self, among: Sequence[str], tasks: Iterable[str]) -> dict[str, Reward]:
        """The rewards over ``tasks`` of the arms in ``among`` that have a row of each task."""
        campaign, arms, wanted = self.campaign, self.arms, set(tasks)
        results, known = TaskResults.empty(len(arms.arms), make_tasks(campaign)), []
        for arm in among:
            if self.rows.get(arm, {}).keys() >= wanted:
                results.take(arms.index(arm), observe(arm, list(self.rows[arm].values())))
                known.append(arms.index(arm))
        columns = [index for index, name in enumerate(campaign.tasks.names) if name in wanted]
        rewards = rewards_of(results, known, tasks=columns)
        return {arms.ids[index]: reward for index, reward in rewards.items()}

    def best_of_all(self) -> bandit.Recommendation | None:
        """The best of all arms over all tasks; None unless all were evaluated."""
        if not self.complete:
            return None
        judge = bandit.make_policy("random", self.arms, 0, tasks=make_tasks(self.campaign))
        for arm, found in self.rows.items():
            judge.tell(observe(arm, list(found.values())))
        return judge.best()

    def why_ended(self) -> str | None:
        """Why the search ended, found by the same steps that the coordinator takes."""
        search = CampaignSearch(self.campaign, self.arms, self.known)
        for decision in self.rounds:
            search.tell(decision.tells)
            search.take(decision)

        def results_of(pulls: Sequence[bandit.Pull]) -> list[bandit.Observation] | None:
            if any(pull not in self.done for pull in pulls):
                return None
            return [observe(pull.arm, self.done[pull]) for pull in pulls]

        search.advance(results_of)
        is_over = self.sealed or len(self.rounds) < len(self.decisions)
        return search.ended or ("its end was decided" if is_over else None)


def _judge(
    campaign: Campaign, arms: bandit.ArmTable, known: Iterable[bandit.Observation]
) -> bandit.Policy:
    policy = policy_of(campaign, arms)
    for observation in known:
        policy.tell(observation)
    return policy


def searched_of(view: RunView, campaign: Campaign) -> Searched:
    """Read the log of a search and the finished rows; ``campaign`` are the current settings."""
    table = gather(view, TASKS, partial=True).rows  # this reads the log
    check_rows(table)
    rows: Rows = {}
    for row in table:
        rows.setdefault(arm_of(row["item"]), {})[row["item"]["task"]] = row
    log = view.stages[TASKS].log
    decisions = read_decisions(log.segments.values())
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
    judge, done = _judge(campaign, arms, known), dict[bandit.Pull, list[Row]]()
    for pull in (pull for one in decisions if one.why != EXHAUSTIVE for pull in one.pulls):
        some, wanted = rows.get(pull.arm, {}), pull.tasks or campaign.tasks.names
        if some.keys() >= set(wanted):
            done[pull] = [some[task] for task in wanted]
            judge.tell(observe(pull.arm, done[pull]))
    return Searched(
        policy=name,
        campaign=campaign,
        sealed=log.sealed,
        decisions=decisions,
        arms=arms,
        rows=rows,
        done=done,
        best=judge.best(),
    )
