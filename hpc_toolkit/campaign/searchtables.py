"""The arms of a campaign in the order of their rewards, and what the policy expected of them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, NamedTuple

from hpc_toolkit.bandit.rule import Rule
from hpc_toolkit.bandit.rules.gp import EACH
from hpc_toolkit.campaign.scoremaps import brief
from hpc_toolkit.campaign.search import observe, score_of
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.report.page import Cell, Figure, Section, Table, count, seconds
from hpc_toolkit.report.plots import (
    Estimate,
    Interval,
    intervals,
    with_error,
)
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpc_toolkit.bandit.rewards import Reward
    from hpc_toolkit.bandit.rule import Belief
    from hpc_toolkit.campaign.searchfacts import SearchFacts

_ROWS, _SHOWN, _KEYS = 200, 24, 8
_MOST_TOLD, _MOST_SCALED = 600, 300
"""A model of more arms takes more than a few seconds; fewer if each feature has a scale."""
_SDS = 2.0


class _Ranked(NamedTuple):
    arm: str
    reward: Reward | None
    tasks: int


def ranking(facts: SearchFacts) -> Iterator[Table]:
    """The evaluated arms: those with a result of every task by reward, then the others."""
    ranked = _ranked(facts)
    if not ranked:
        return
    tasks = len(facts.searched.campaign.tasks.names)
    shown = ranked[:_ROWS]
    keys = _keys(facts, [one.arm for one in shown])
    errors = any(one.reward and one.reward.stderr is not None for one in shown)
    rows = [
        (count(rank), *_row(facts, one, keys, _cells(facts, one, tasks, errors)))
        for rank, one in enumerate(shown, 1)
    ]
    hidden = len(ranked) - len(rows)
    note = "Noise cannot tell ties from the best arm." if _ties(facts)[1] else ""
    note += "" if errors or not note else " No task reports a standard error."
    note += f" Left out: {counted(hidden, 'lower arm')}." if hidden else ""
    if any(one.tasks < tasks for one in ranked):
        note += " Arms with fewer tasks come last: their means are not comparable."
    error = ("standard error",) if errors else ()
    told = ("tasks", "evaluation time")
    judged = ("reward", *error, "tie", "requested in round")
    columns = ("rank", *judged, *keys, *told) if keys else ("rank", "arm", *judged, *told)
    yield Table(title="Arms by reward", columns=columns, rows=rows, note=note)


def _row(
    facts: SearchFacts, one: _Ranked, keys: Sequence[str], cells: Iterator[str | Cell]
) -> Iterator[str | Cell]:
    """The cells of an arm: its name before its reward, or its keys, which may be many, behind."""
    named, (*judged, tasks, took) = _named(facts, one.arm, keys), cells
    yield from (*judged, *named) if keys else (*named, *judged)
    yield tasks
    yield took


def _keys(facts: SearchFacts, shown: Sequence[str]) -> tuple[str, ...]:
    """The keys in which these arms differ, if they are few; empty: use the names of the arms."""
    if facts.searched.campaign.rows is None:
        return ()
    arms = facts.searched.found.arms
    keys = [arms.arms[arms.index(arm)].keys for arm in shown]
    names = dict.fromkeys(name for one in keys for name in one)
    differ = [name for name in names if any(one.get(name) != keys[0].get(name) for one in keys)]
    return tuple(differ) if len(differ) <= _KEYS else ()


def _named(facts: SearchFacts, arm: str, keys: Sequence[str]) -> Iterator[str | Cell]:
    """The values of these keys, or the name of the arm."""
    arms = facts.searched.found.arms
    if not keys:
        yield brief(arm)
        return
    given = arms.arms[arms.index(arm)].keys
    for key in keys:
        value = given.get(key, "")
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield Cell(json.dumps(value), float(value))
        else:
            yield brief(value if isinstance(value, str) else json.dumps(value))


def _cells(facts: SearchFacts, one: _Ranked, tasks: int, errors: bool) -> Iterator[str | Cell]:
    rows, reward = facts.searched.found.rows[one.arm], one.reward
    yield "no reward" if reward is None else _number(reward.mean)
    if errors:
        error = None if reward is None else reward.stderr
        yield "unknown" if error is None else _number(error)
    ties, top = _ties(facts)
    yield "best" if one.arm == top else "yes" if one.arm in ties else "no"
    asked = facts.asked.get(one.arm)
    yield "not asked" if asked is None else count(asked)
    failed = sum(score_of(row) is None for row in rows.values())
    said = f"{one.tasks} of {tasks}" + (f", {failed} failed" if failed else "")
    yield Cell(said, one.tasks)
    yield seconds(math.fsum(row["seconds"] for row in rows.values()))


def _number(value: float) -> Cell:
    return Cell(f"{value:.4f}", value)


def _ranked(facts: SearchFacts) -> list[_Ranked]:
    found = facts.searched.found
    every = len(facts.searched.campaign.tasks.names)
    groups: dict[tuple[str, ...], list[str]] = {}
    for arm, rows in found.rows.items():
        groups.setdefault(tuple(sorted(rows)), []).append(arm)
    ranked = []
    for tasks, arms in groups.items():
        rewards = facts.rewards if len(tasks) == every else found.rewards(arms, tasks)
        ranked += [_Ranked(arm, rewards.get(arm), len(tasks)) for arm in arms]

    def order(one: _Ranked) -> tuple[int, float]:
        return -one.tasks, -one.reward.mean if one.reward else math.inf

    return sorted(ranked, key=order)


def _ties(facts: SearchFacts) -> tuple[set[str], str]:
    """The ties of the best arm, and that arm: of all arms if the truth is known."""
    summary = facts.summary
    if summary is None or summary.best is None:
        return set(), ""
    if summary.exhaustive is not None:
        return set(summary.exhaustive_ties), summary.exhaustive.arm
    return set(summary.ties), summary.best.arm


def expected(facts: SearchFacts) -> Section:
    """What the policy's model expects of the arms after its last results."""
    title, searched = "What the policy expects", facts.searched
    try:
        found = _beliefs(facts) if facts.summary else "No arm has a reward yet."
    except (HpcToolkitError, ValueError) as error:
        found = f"The model could not be made: {error}"
    if isinstance(found, str):
        return Section(title=title, paragraphs=(found,))
    return _expected(facts, title, dict(zip(searched.found.arms.ids, found, strict=True)))


def _beliefs(facts: SearchFacts) -> list[Belief] | str:
    """What the policy's model expects of each arm, or why that is not known."""
    searched = facts.searched
    search = searched.campaign.search
    if searched.policy != search.policy:
        return f"Left out: it would run the code of policy {searched.policy}."
    policy = searched.found.policy()
    if type(policy.rule).beliefs is Rule.beliefs:
        return f"Policy {searched.policy} has no model of the arms."
    told = len({pull.arm for pull in searched.rows})
    scaled = searched.campaign.rows is not None or search.options.get("scales") == EACH
    if told > (_MOST_SCALED if scaled else _MOST_TOLD):
        return f"Left out: the model of {told:,} arms would take more than a few seconds."
    for pull, rows in searched.rows.items():
        policy.tell(observe(pull.arm, rows))
    return policy.beliefs() or "No arm has a reward."


def _expected(facts: SearchFacts, title: str, beliefs: Mapping[str, Belief]) -> Section:
    told = facts.searched.arms
    unseen = [arm for arm in facts.rewards if arm not in told]
    said = f"The model of {facts.searched.policy} after {counted(len(told), 'arm')},"
    said += f" for all {len(beliefs):,} arms."
    if unseen:
        near = sum(_inside(beliefs[arm], facts.rewards[arm]) for arm in unseen) / len(unseen)
        away = math.fsum(abs(beliefs[arm].mean - facts.rewards[arm].mean) for arm in unseen)
        said += f" Rewards of {counted(len(unseen), 'arm')} that it was not told differ by"
        said += f" {away / len(unseen):.4f} on average from what it expects. {near:.0%} of them"
        said += f" are within {_SDS:g} standard deviations of the model and standard errors of"
        said += " the reward, combined; 95% would be if both were exact."
    return Section(title=title, paragraphs=(said,), figures=(_best_expected(facts, beliefs, told),))


def _inside(belief: Belief, reward: Reward) -> bool:
    """Whether a reward is as near as the model and the error of the reward say."""
    return abs(reward.mean - belief.mean) <= _SDS * math.hypot(belief.sd, reward.stderr or 0.0)


def _best_expected(facts: SearchFacts, beliefs: Mapping[str, Belief], told: set[str]) -> Figure:
    """The arms of which the model expects most, beside what was observed."""
    top = sorted(beliefs, key=lambda arm: -beliefs[arm].mean)[:_SHOWN]
    keys = _keys(facts, top)
    rows = []
    for arm in top:
        belief, reward = beliefs[arm], facts.rewards.get(arm)
        seen, found = facts.searched.found.lacks(arm), None
        if reward is not None:
            when = "" if arm in told else " after the search"
            seen = f"observed {with_error(reward.mean, reward.stderr)}{when}"
            found = Interval(reward.mean, reward.stderr and _SDS * reward.stderr)
        texts = (one if isinstance(one, str) else one.text for one in _named(facts, arm, keys))
        model = Interval(belief.mean, _SDS * belief.sd)
        observed = (found, None) if arm in told else (None, found)
        said = f"{brief(arm)}: expects {with_error(belief.mean, belief.sd)}, {seen}"
        rows.append(Estimate(name=", ".join(texts), intervals=(model, *observed), said=said))
    name = f"The {len(rows)} arms of which the model expects most"
    said = "; ".join(one.said for one in rows[:3])
    kinds = ["expected", "observed"]
    kinds += ["observed after the search"] if any(one.intervals[2] for one in rows) else []
    named = f" Arms are named by {', '.join(keys)}." if keys else ""
    return Figure(
        title=name,
        svg=intervals(name, [("", rows)], kinds, x="reward", alternative=said),
        alt=said,
        caption=f"The bars are 2 standard deviations or standard errors to each side.{named}",
        text="\n".join(one.said for one in rows),
    )
