"""The search of a campaign as sections of a run's report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_toolkit.bandit import Pull
from hpc_toolkit.bandit.asktell import TASK_RULES
from hpc_toolkit.bandit.rule import Reward
from hpc_toolkit.campaign.search import observe, policy_of, score_of
from hpc_toolkit.campaign.searchfigures import Step, best_so_far, brief, reward_map
from hpc_toolkit.campaign.settings import Campaign
from hpc_toolkit.campaign.summary import Searched, Summary, searched_of, summarize
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.report.figures import Figure
from hpc_toolkit.report.page import Cell, Section, Table, count, seconds
from hpc_toolkit.system.quantities import counted, format_duration

_RECENT = 0.8
"""A search whose best arm came after this share of its evaluations is still improving."""
_ROWS, _KEYS = 200, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFacts:
    """What the sections are made from."""

    searched: Searched
    summary: Summary | None
    """None: no arm has a reward, and the search goes on."""
    rewards: Mapping[str, Reward]
    """Rewards of the arms that have a result of every task, also of those after the search."""
    asked: Mapping[str, int]
    """The first decision, from 1, that requested each arm of the search."""
    steps: Sequence[Step]
    """The best arm so far."""


def read_search(view: RunView, campaign: Campaign) -> SearchFacts:
    searched = searched_of(view, campaign)
    names = searched.campaign.tasks.names
    rewards = searched.rewards(searched.arms.ids, names)
    asked: dict[str, int] = {}
    for number, decision in enumerate(searched.rounds, 1):
        for pull in decision.pulls:
            asked.setdefault(pull.arm, number)
    return SearchFacts(
        searched=searched,
        summary=summarize(searched),
        rewards=rewards,
        asked=asked,
        steps=progress_of(searched, rewards),
    )


def sections(view: RunView, campaign: Campaign) -> list[Section]:
    """Sections about the search; the first is the outcome of the run."""
    facts = read_search(view, campaign)
    if not facts.searched.decisions:
        return [Section(title="Search", paragraphs=("The policy has not requested any arm yet.",))]
    rewards = Section(title="Rewards", figures=_map(facts), tables=tuple(_ranking(facts)))
    return [_outcome(facts), rewards]


def _outcome(facts: SearchFacts) -> Section:
    summary = facts.summary
    if summary is None or summary.best is None:
        said = "No arm has a reward yet." if summary is None else "No arm has a reward."
        return Section(title="Search", paragraphs=(said,))
    return Section(
        title="Search",
        paragraphs=tuple(_sentences(facts, summary)),
        facts=tuple(_tiles(facts, summary)),
        figures=_best(facts, summary),
    )


def _sentences(facts: SearchFacts, summary: Summary) -> Iterator[str]:
    """The best arm, how sure that is and what to do next; then how it compares and what it took."""
    best = summary.best
    assert best is not None
    so_far = "" if summary.ended else " so far"
    every, done = summary.all_evaluations // summary.arms, len(summary.tasks)
    notes = ["mean over tasks"] if every > 1 else []
    notes += [f"{done} of {every} tasks"] if done < every else []
    notes += ["uncertainty unknown"] if best.stderr is None else []
    shown = with_error(best.reward, best.stderr) + (f" ({', '.join(notes)})" if notes else "")
    yield f"The best arm{so_far} is {brief(best.arm)}: reward {shown}. {_ties(summary)}"
    yield " ".join(_next(facts, summary))
    compared = [*_baseline(facts, summary), *_truth(summary)]
    if compared:
        yield " ".join(compared)
    said = f"{summary.policy} used {summary.evaluations:,} of the {summary.all_evaluations:,}"
    said += f" possible evaluations ({summary.evaluations / summary.all_evaluations:.0%}"
    if summary.exhaustive_gpu_s:
        said += f", {summary.gpu_s / summary.exhaustive_gpu_s:.0%} of their time"
    known = f" Known before: {counted(summary.known, 'evaluation')}." if summary.known else ""
    yield f"{said}).{known}"


def _ties(summary: Summary) -> str:
    others = counted(len(summary.ties), "other arm") if summary.ties else "no other evaluated arm"
    if _is_unsure(summary):
        unknown = "whether more are as good is unknown from one task without a standard error"
        return f"As high: {others}; {unknown}."
    by = f"by the differences over {len(summary.tasks)} common tasks"
    by = "by the standard errors of one task" if len(summary.tasks) == 1 else by
    return f"Perhaps as good: {others}, judged {by}."


def _is_unsure(summary: Summary) -> bool:
    """Whether nothing says which differences are noise."""
    return len(summary.tasks) == 1 and summary.best is not None and summary.best.stderr is None


def _next(facts: SearchFacts, summary: Summary) -> Iterator[str]:
    assert summary.best is not None
    total = facts.steps[-1].evaluations if facts.steps else 0
    since = (one.evaluations for one in facts.steps if one.arm == summary.best.arm)
    improving = summary.evaluated < summary.arms and next(since, 0) > _RECENT * total
    yield f"The search ended: {summary.ended}." if summary.ended else "The search goes on."
    if improving:
        yield "It is still improving: the best arm came in the last fifth of its evaluations."
    if not summary.ended:
        return
    if improving:
        yield "Next: a larger budget in a copy of the campaign file, with 'from' in [tasks]."
    elif _is_unsure(summary):
        yield "Next: return 'stderr' with the score, or add tasks, to learn how sure this is."
    elif summary.ties:
        yield "Next: take the cheapest of these arms, or compare them on more tasks."
    else:
        yield "Next: use this arm."


def _baseline(facts: SearchFacts, summary: Summary) -> Iterator[str]:
    best, base = summary.best, summary.baseline
    if best is None or base is None:
        return
    gain = best.reward - base.reward
    if best.arm == base.arm:
        yield f"The best arm is itself the {summary.baseline_name}."
        return
    side = "above" if gain >= 0 else "below"
    shown = with_error(base.reward, base.stderr)
    said = f"The best arm is {abs(gain):.4f} {side} the {summary.baseline_name}"
    yield f"{said}, {brief(base.arm)} ({shown})."
    arms = [arm.id for arm in facts.searched.campaign.arms() if arm.baseline]
    known = sum(arm in facts.rewards for arm in arms)
    if known < len(arms):
        yield f"Arms of this baseline with results of all tasks: {known:,} of {len(arms):,}."


def _truth(summary: Summary) -> Iterator[str]:
    truth, verified = summary.exhaustive, summary.verified
    if truth is None or summary.best is None:
        return
    if truth.arm == summary.best.arm:
        yield f"It is the best of all arms: {counted(summary.arms, 'arm')} evaluated."
        return
    behind = truth.reward - verified.reward if verified else math.nan
    ties = summary.best.arm in summary.exhaustive_ties
    within = ", which is within the noise" if ties else ""
    shown = with_error(truth.reward, truth.stderr)
    yield (
        f"All {summary.arms:,} arms were evaluated: the best is {brief(truth.arm)} ({shown}),"
        f" {behind:.4f} better than the arm that the search found{within}."
    )


def _tiles(facts: SearchFacts, summary: Summary) -> Iterator[tuple[str, str]]:
    assert summary.best is not None
    yield "best reward", with_error(summary.best.reward, summary.best.stderr)
    yield "arms evaluated", f"{summary.evaluated:,} of {summary.arms:,}"
    yield "rounds", f"{len(facts.searched.rounds):,}"
    yield "evaluation time", format_duration(summary.gpu_s)
    if summary.failed_tasks:
        yield "failed evaluations", f"{summary.failed_tasks:,}"


def with_error(value: float, error: float | None) -> str:
    """A value with its error in words."""
    return f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else "")


def _map(facts: SearchFacts) -> tuple[Figure, ...]:
    summary, marks = facts.summary, dict[str, str]()
    if summary is not None and summary.exhaustive is not None:
        marks[summary.exhaustive.arm] = "truth"
    if summary is not None and summary.best is not None:
        best = summary.best.arm
        marks[best] = " ".join(filter(None, ("best", marks.get(best))))

    return reward_map(
        facts.searched.campaign,
        facts.searched.arms,
        {arm: reward.mean for arm, reward in facts.rewards.items()},
        asked=facts.asked,
        marks=marks,
        unit="mean over tasks" if summary else "",
    )


def _best(facts: SearchFacts, summary: Summary) -> tuple[Figure, ...]:
    """The best arm so far, over evaluations and over evaluation time."""
    if not facts.steps:
        return ()
    found, rewards = facts.searched, [one.mean for one in facts.rewards.values()]
    rows = (row for arm in facts.rewards for row in found.rows[arm].values())
    each_s = math.fsum(row["seconds"] for row in rows) / max(1, len(rewards))
    levels = {summary.baseline_name: summary.baseline, "best of all arms": summary.exhaustive}
    drawn = best_so_far(
        facts.steps,
        (len(facts.searched.campaign.tasks.names), each_s),
        # The policy chose the good arms: a random order of those would look better than the search.
        rewards if found.complete else (),
        {name: arm.reward for name, arm in levels.items() if arm is not None},
    )
    return (drawn._replace(caption=_caption(facts)),)


def _caption(facts: SearchFacts) -> str:
    said = "Evaluations are in the order in which the policy requested them."
    said += " Those that were known before cost nothing." if facts.searched.known else ""
    if not facts.rewards:
        return said + " No arm has a result of every task, so a random order is not known."
    if facts.searched.complete:
        return said + " The random order is exact: the mean over all orders of all arms."
    return said + " A random order is shown once all arms are evaluated (exhaustive = true)."


def _ranking(facts: SearchFacts) -> Iterator[Table]:
    """The evaluated arms: those with a result of every task by reward, then the others."""
    searched = facts.searched
    every, groups = len(searched.campaign.tasks.names), dict[tuple[str, ...], list[str]]()
    for arm, rows in searched.rows.items():
        groups.setdefault(tuple(sorted(rows)), []).append(arm)
    rewards: dict[str, Reward | None] = {}
    for tasks, arms in groups.items():
        known = facts.rewards if len(tasks) == every else searched.rewards(arms, tasks)
        rewards |= {arm: known.get(arm) for arm in arms}

    def order(arm: str) -> tuple[int, float]:
        reward = rewards[arm]
        return -len(searched.rows[arm]), math.inf if reward is None else -reward.mean

    ranked = sorted(rewards, key=order)
    if not ranked:
        return
    shown, hidden = ranked[:_ROWS], len(ranked) - _ROWS
    keys = _keys(facts, shown)
    errors = any((one := rewards[arm]) and one.stderr is not None for arm in shown)
    note = "Noise cannot tell ties from the best arm." if _tied(facts)[1] else ""
    note += " No task reports a standard error." if note and not errors else ""
    note += f" Left out: {counted(hidden, 'lower arm')}." if hidden > 0 else ""
    if any(len(searched.rows[arm]) < every for arm in ranked):
        note += " Arms with fewer tasks come last: their means are not comparable."
    judging = ("reward", *(["standard error"] * errors), "tie", "round")
    columns = (*judging, *keys) if keys else ("arm", *judging)
    yield Table(
        title="Arms by reward",
        columns=("rank", *columns, "tasks", "time"),
        rows=[
            (count(rank), *_row(facts, arm, rewards[arm], keys, errors=errors))
            for rank, arm in enumerate(shown, 1)
        ],
        note=note,
    )


def _row(
    facts: SearchFacts, arm: str, reward: Reward | None, keys: Sequence[str], *, errors: bool
) -> Iterator[str | Cell]:
    """The cells of an arm; its keys, which may be many, come behind its reward."""
    if not keys:
        yield brief(arm)
    yield "no reward" if reward is None else Cell(f"{reward.mean:.4f}", reward.mean)
    if errors:
        known = None if reward is None else reward.stderr
        yield "unknown" if known is None else Cell(f"{known:.4f}", known)
    ties, top = _tied(facts)
    yield "best" if arm == top else "yes" if arm in ties else "no"
    yield count(facts.asked[arm]) if arm in facts.asked else "not asked"
    for value in (_keys_of(facts, arm).get(key, "") for key in keys):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield Cell(json.dumps(value), float(value))
        else:
            yield brief(value if isinstance(value, str) else json.dumps(value))
    rows, tasks = facts.searched.rows[arm].values(), len(facts.searched.campaign.tasks.names)
    failed = sum(score_of(row) is None for row in rows)
    done = f"{len(rows)} of {tasks}" + (f", {failed} failed" if failed else "")
    yield Cell(done, len(rows))
    yield seconds(math.fsum(row["seconds"] for row in rows))


def _keys(facts: SearchFacts, shown: Sequence[str]) -> tuple[str, ...]:
    """The keys in which these arms differ, if they are few; empty: use the names of the arms."""
    if facts.searched.campaign.rows is None:
        return ()
    keys = [_keys_of(facts, arm) for arm in shown]
    names = dict.fromkeys(name for one in keys for name in one)
    differ = [name for name in names if any(one.get(name) != keys[0].get(name) for one in keys)]
    return tuple(differ) if len(differ) <= _KEYS else ()


def _keys_of(facts: SearchFacts, arm: str) -> Mapping[str, Any]:
    arms = facts.searched.arms
    return arms.arms[arms.index(arm)].keys


def _tied(facts: SearchFacts) -> tuple[Sequence[str], str]:
    """The ties of the best arm, and that arm: of all arms if the truth is known."""
    summary = facts.summary
    if summary is None or summary.best is None:
        return (), ""
    if summary.exhaustive is not None:
        return summary.exhaustive_ties, summary.exhaustive.arm
    return summary.ties, summary.best.arm


def progress_of(searched: Searched, rewards: Mapping[str, Reward]) -> list[Step]:
    """The best arm so far after each finished pull, in the order of the asks.

    ``rewards`` are those of all arms that have a result of every task. The best arm of a policy
    that requests tasks in parts is the one that it would name after each decision.
    """
    spent: dict[Pull, tuple[int, float]] = {}
    evaluations, seconds = 0, 0.0
    for pull, rows in searched.done.items():
        evaluations += len(rows)
        seconds += math.fsum(row["seconds"] for row in rows)
        spent[pull] = evaluations, seconds
    if searched.campaign.search.policy in TASK_RULES:
        return list(_race(searched, rewards, spent))
    return list(_by_arm(searched, rewards, spent))


def _by_arm(
    searched: Searched, rewards: Mapping[str, Reward], spent: Mapping[Pull, tuple[int, float]]
) -> Iterator[Step]:
    known = [one.arm for one in searched.known if one.arm in rewards]
    best = max(known, key=lambda arm: rewards[arm].mean, default=None)
    if best is not None:
        yield Step(0, 0.0, best, rewards[best].mean)
    for pull, cost in spent.items():
        found = rewards.get(pull.arm)
        if found is not None and (best is None or found.mean > rewards[best].mean):
            best = pull.arm
        if best is not None:
            yield Step(*cost, best, rewards[best].mean)


def _race(
    searched: Searched, rewards: Mapping[str, Reward], spent: Mapping[Pull, tuple[int, float]]
) -> Iterator[Step]:
    judge = policy_of(searched.campaign, searched.arms)
    for observation in searched.known:
        judge.tell(observation)
    for decision in searched.rounds:
        finished = [pull for pull in decision.pulls if pull in spent]
        for pull in finished:
            judge.tell(observe(pull.arm, searched.done[pull]))
        best = judge.best() if finished else None
        if best is not None:
            reward = rewards[best.arm].mean if best.arm in rewards else best.mean
            yield Step(*spent[finished[-1]], best.arm, reward)
