"""The outcome of a search: how far it has come, its best arm, and how that compares with others."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

from hpc_toolkit.bandit import Recommendation
from hpc_toolkit.campaign.coordinator import arm_of
from hpc_toolkit.campaign.evaluations import Found, Searched, searched_of
from hpc_toolkit.campaign.search import score_of
from hpc_toolkit.campaign.settings import Campaign, settings_of
from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.status import Search
from hpc_toolkit.rundir.layout import Manifest
from hpc_toolkit.rundir.values import not_finite
from hpc_toolkit.system.clock import Seldom
from hpc_toolkit.system.quantities import counted

_LAST_ASKS = 8
_LONG = 30
"""Characters of the name of an arm that is too long to show several."""


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
    best = None
    if search["best"] is not None:
        best = {**search["best"], "evaluated": search["evaluated"], "arms": search["arms"]}
    return Search(best, {**search})


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    view: RunView, campaign: Campaign, searched: Searched | None = None
) -> Summary | None:
    """Summarize what is finished so far; None while no arm has a reward and the search goes on.

    ``searched`` is the result of :func:`searched_of`, for callers that have it.
    """
    searched = searched or searched_of(view, campaign)
    campaign, best, names = searched.campaign, searched.best, searched.campaign.tasks.names
    if best is None and not searched.sealed:
        return None
    told = [rows for rows in searched.rows.values() if len(rows) == len(names)]
    failures = [row for rows in told for row in rows.values() if score_of(row) is None]
    known = sum(len(one.scores) for one in searched.known)
    return Summary(
        policy=searched.policy,
        ended=searched.why_ended(),
        arms=len(searched.arms.arms),
        evaluated=len(searched.evaluated),
        evaluations=sum(map(len, searched.done.values())) + known,
        known=known,
        all_evaluations=searched.total,
        gpu_s=_seconds(searched.done.values())
        + math.fsum(second for one in searched.known for second in one.seconds.values()),
        best=searched.found(best.arm, best) if best else None,
        tasks=searched.compared,
        ties=list(best.ties) if best else [],
        baseline=_baseline(searched),
        baseline_name=campaign.baseline,
        **_exhaustive(searched, best),
        sequence=searched.asked,
        failed_tasks=len(failures),
        failure=_said(failures[0]) if failures else None,
    )


def _baseline(searched: Searched) -> Found | None:
    """The best arm of the baseline over the tasks that the search compared."""
    arms = [arm.id for arm in searched.campaign.arms() if arm.baseline]
    known = (searched.found(*one) for one in searched.rewards(arms, searched.compared).items())
    return max(known, key=attrgetter("reward"), default=None)


def _exhaustive(searched: Searched, best: Recommendation | None) -> dict[str, Any]:
    """The fields of a summary that are known once all arms have been evaluated on all tasks."""
    everything = searched.best_of_all()
    verified = None
    if everything and best:  # over all tasks, also if the search compared it by fewer
        rewards = searched.rewards(searched.arms.ids, searched.campaign.tasks.names)
        verified = searched.found(best.arm, rewards[best.arm]) if best.arm in rewards else None
    rows = map(dict.values, searched.rows.values())
    return {
        "exhaustive": searched.found(everything.arm, everything) if everything else None,
        "exhaustive_ties": list(everything.ties) if everything else [],
        "verified": verified,
        "exhaustive_gpu_s": _seconds(rows) if searched.complete else None,
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
        shown = ", ".join(islice(summary.ties, 4 if len(summary.ties[0]) < _LONG else 1))
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
