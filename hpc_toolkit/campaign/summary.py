"""What a search has evaluated, how far it has come, its best arm, and how that compares."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
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
    score_of,
)
from hpc_toolkit.campaign.settings import TASKS, Campaign, settings_of
from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.status import Search
from hpc_toolkit.results.tables import Row, check_rows
from hpc_toolkit.rundir.layout import Manifest
from hpc_toolkit.rundir.values import not_finite
from hpc_toolkit.system.clock import Seldom
from hpc_toolkit.system.quantities import counted

_LAST_ASKS = 8
_LONG = 30
"""Characters of the name of an arm that is too long to show several."""


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
    rows: dict[str, dict[str, Row]]
    """All finished rows by arm and task, also those after the search or known before it."""
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
    def compared(self) -> list[str]:
        """The tasks by which the policy found its best arm; all if no arm has a reward."""
        names, best = self.campaign.tasks.names, self.best
        return [name for name in names if best is None or name in {*best.tasks, *best.failed}]

    @property
    def complete(self) -> bool:
        """Whether all arms have been evaluated on all tasks."""
        done = sum(map(len, self.rows.values()))
        return done == len(self.arms.arms) * len(self.campaign.tasks.names)

    def lacks(self, arm: str) -> str:
        """Why an arm has no reward over all tasks."""
        done, every = len(self.rows.get(arm, {})), len(self.campaign.tasks.names)
        partly = f"{done} of {every} tasks" if done else "not evaluated"
        return "failed" if done == every else partly

    def found(self, arm: str, by: Reward | bandit.Recommendation) -> Found:
        keys = dict(self.arms.arms[self.arms.index(arm)].keys)
        return Found(arm=arm, keys=keys, reward=by.mean, stderr=by.stderr)

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

    def why_ended(self) -> str | None:
        """Why the search ended, found by the same steps that the coordinator takes."""
        search = CampaignSearch(self.campaign, self.arms, self.known)
        for decision in self.rounds:
            search.tell(decision.tells)
            search.take(decision)

        def results_of(pulls: Sequence[bandit.Pull]) -> list[bandit.Observation] | None:
            finished = self.done.keys() >= set(pulls)
            return [observe(pull.arm, self.done[pull]) for pull in pulls] if finished else None

        search.advance(results_of)
        is_over = self.sealed or len(self.rounds) < len(self.decisions)
        return search.ended or ("its end was decided" if is_over else None)


def searched_of(view: RunView, campaign: Campaign) -> Searched:
    """Read the log of a search and the finished rows; ``campaign`` are the current settings."""
    table = gather(view, TASKS, partial=True).rows  # this reads the log
    check_rows(table)
    rows: dict[str, dict[str, Row]] = {}
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
    judge, done = policy_of(campaign, arms), dict[bandit.Pull, list[Row]]()
    for observation in decisions[0].known if decisions else ():
        judge.tell(observation)
        keys = arms.arms[arms.index(observation.arm)].keys
        rows.setdefault(observation.arm, {}).update(rows_of(observation, keys))
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


def search_of(
    view: RunView, manifest: Manifest, kept: Seldom[dict[str, Any]], complete: bool
) -> Search:
    """The state of the search, or why it is not known, as the status of a campaign has it."""
    try:
        search, _ = kept.read(
            lambda: search_so_far(view, settings_of(view.paths, manifest)), complete
        )
    except RunError as error:
        return Search(warnings=(error.message,))
    more = {"evaluated": search["evaluated"], "arms": search["arms"]}
    return Search(search["best"] and {**search["best"], **more}, {**search})


def search_so_far(view: RunView, campaign: Campaign) -> dict[str, Any]:
    """How far the search has come, from the files alone; ready for JSON."""
    searched = searched_of(view, campaign)
    names, best, pulls = searched.campaign.tasks.names, searched.best, searched.pulls
    search, rounds, asked = searched.campaign.search, searched.rounds, searched.asked
    since = None
    if best is not None:
        arms = [{pull.arm for pull in one.pulls} for one in reversed(rounds)]
        since = next((n for n, some in enumerate(arms) if best.arm in some), None)
    newest = asked[: -_LAST_ASKS - 1 : -1]
    scored = searched.rewards(newest, names)
    return {
        "policy": searched.policy,
        # While it goes on, it may take a fit of the policy's model to find out.
        "ended": searched.why_ended() if searched.sealed else None,
        "arms": len(searched.arms.arms),
        # Arms that the policy has requested, and that it may request.
        "asked": len(asked),
        "budget": search.budget,
        # Arms with results, perhaps not of all tasks, and those that were known before.
        "evaluated": len(searched.evaluated),
        "evaluations": sum(
            len(searched.rows.get(pull.arm, {}).keys() & set(pull.tasks or names)) for pull in pulls
        ),
        "rounds": len(rounds),
        "best": None if best is None else asdict(searched.found(best.arm, best)),
        "ties": 0 if best is None else len(best.ties),
        # None if the best arm was known before, or no arm has a reward.
        "rounds_since_best": since,
        # The newest first, each with its reward over all tasks, or why it has none.
        "last": [
            (arm, scored[arm].mean, "") if arm in scored else (arm, None, searched.lacks(arm))
            for arm in newest
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The outcome of a search."""

    policy: str
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
    exhaustive: Found | None = None
    """The best of all arms over all tasks; None unless all were evaluated."""
    exhaustive_ties: list[str] = field(default_factory=list)
    """Other arms within the noise of ``exhaustive``."""
    verified: Found | None = None
    """The reward of ``best`` among all arms over all tasks; None unless all were evaluated."""
    exhaustive_gpu_s: float | None = None
    """Duration of all evaluations, in seconds of one worker; None unless all were made."""
    sequence: list[str]
    """The policy's arms in the order in which they were first requested."""
    failed_tasks: int
    """Evaluations without a score, of arms that have results of all tasks."""
    failure: str | None
    """What the first of these evaluations returned instead."""


def summarize(searched: Searched) -> Summary | None:
    """Summarize what is finished so far; None while no arm has a reward and the search goes on."""
    campaign, best, names = searched.campaign, searched.best, searched.campaign.tasks.names
    if best is None and not searched.sealed:
        return None
    told = [rows for rows in searched.rows.values() if len(rows) == len(names)]
    failures = [row for rows in told for row in rows.values() if score_of(row) is None]
    known = sum(len(one.scores) for one in searched.known)
    arms = [arm.id for arm in campaign.arms() if arm.baseline]
    baseline = (searched.found(*one) for one in searched.rewards(arms, searched.compared).items())
    return Summary(
        policy=searched.policy,
        ended=searched.why_ended(),
        arms=len(searched.arms.arms),
        evaluated=len(searched.evaluated),
        evaluations=sum(map(len, searched.done.values())) + known,
        known=known,
        all_evaluations=len(searched.arms.arms) * len(names),
        gpu_s=_seconds(searched.done.values())
        + math.fsum(second for one in searched.known for second in one.seconds.values()),
        best=searched.found(best.arm, best) if best else None,
        tasks=searched.compared,
        ties=list(best.ties) if best else [],
        baseline=max(baseline, key=attrgetter("reward"), default=None),
        baseline_name=campaign.baseline,
        **_exhaustive(searched, best),
        sequence=searched.asked,
        failed_tasks=len(failures),
        failure=_said(failures[0]) if failures else None,
    )


def _exhaustive(searched: Searched, best: bandit.Recommendation | None) -> dict[str, Any]:
    """The fields of a summary that are known once all arms have been evaluated on all tasks."""
    if not searched.complete:
        return {}
    judge = bandit.make_policy("random", searched.arms, 0, tasks=make_tasks(searched.campaign))
    for arm, rows in searched.rows.items():
        judge.tell(observe(arm, list(rows.values())))
    truth = judge.best()
    # Over all tasks, also if the search compared its best arm by fewer.
    rewards = searched.rewards(searched.arms.ids, searched.campaign.tasks.names)
    verified = rewards.get(best.arm) if best else None
    return {
        "exhaustive": searched.found(truth.arm, truth) if truth else None,
        "exhaustive_ties": list(truth.ties) if truth else [],
        "verified": searched.found(best.arm, verified) if best and verified else None,
        "exhaustive_gpu_s": _seconds(map(dict.values, searched.rows.values())),
    }


def _seconds(rows: Iterable[Iterable[dict[str, Any]]]) -> float:
    return math.fsum(row["seconds"] for some in rows for row in some)


def _said(row: dict[str, Any]) -> str:
    """Describe for people what an evaluation returned instead of a score."""
    gave = row["error"] if row["state"] != "done" else json.dumps(row["value"])
    for place, number in not_finite(row.get("types", {})).items():
        gave = f"{place[1:] or 'value'} is {number}"
    return f"{arm_of(row['item'])} on {row['item']['task']}: {str(gave)[:120]}"


def summary_lines(summary: Summary) -> list[str]:
    spent = f"{summary.evaluations:,} of {counted(summary.all_evaluations, 'evaluation')}"
    before = f" ({summary.known} known before)" if summary.known else ""
    arms = f"{summary.evaluated:,} of {counted(summary.arms, 'arm')}"
    lines = [f"policy          {summary.policy}: {arms}, {spent}{before}"]
    if summary.ended is not None:
        lines.append(f"  ended         {summary.ended}")
    none = ["best arm        none: no arm has a reward"]
    lines += _best_lines(summary, summary.best) if summary.best else none
    if summary.failed_tasks:
        lines.append(f"failed tasks    {summary.failed_tasks}, left out of the means")
        lines.append(f"  the first     {summary.failure}")
    return lines


def _best_lines(summary: Summary, best: Found) -> list[str]:
    done, tasks = len(summary.tasks), summary.all_evaluations // summary.arms
    partly = f" over {done} of {tasks} tasks" if done < tasks else ""
    lines = [f"best arm        {_line(best)}{partly}"]
    if summary.ties:
        shown = ", ".join(summary.ties[: 4 if len(summary.ties[0]) < _LONG else 1])
        more = ", ..." if len(summary.ties) > shown.count(", ") + 1 else ""
        count = len(summary.ties)
        lines.append(f"  ties          {count} that noise cannot tell from it: {shown}{more}")
    if summary.baseline is not None:
        gain = best.reward - summary.baseline.reward
        against = f"{_line(summary.baseline)}: {gain:+.4f} against it"
        lines.append(f"{summary.baseline_name:15} {against}")
    elif summary.baseline_name:
        lines.append(f"{summary.baseline_name:15} not evaluated")
    if summary.exhaustive is not None:
        own = summary.verified or best
        behind = summary.exhaustive.reward - own.reward
        lines.append(f"exhaustive best {_line(summary.exhaustive)}: {behind:.4f} behind it")
        lines.append(f"  the search    {_standing(summary, best, summary.exhaustive)}")
    return lines


def _line(found: Found) -> str:
    spread = f" +- {found.stderr:.4f}" if found.stderr is not None else ""
    return f"{found.arm}  {found.reward:.4f}{spread}"


def _standing(summary: Summary, best: Found, exhaustive: Found) -> str:
    if best.arm == exhaustive.arm:
        found = "found it"
    elif best.arm in summary.exhaustive_ties:
        found = "found an arm that noise cannot tell from it"
    else:
        found = "found a lesser arm"
    share = f"{summary.evaluations / summary.all_evaluations:.0%} of the evaluations"
    if summary.exhaustive_gpu_s:
        share += f" and {summary.gpu_s / summary.exhaustive_gpu_s:.0%} of their time"
    return f"{found} with {share}"
