"""The search of a campaign as sections of a run's report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpc_toolkit.campaign import searchcurves, searchtables
from hpc_toolkit.campaign.scoremaps import brief
from hpc_toolkit.campaign.searchfacts import read_search
from hpc_toolkit.campaign.searchmaps import key_means, metric_maps, reward_maps
from hpc_toolkit.report.page import Section
from hpc_toolkit.report.plots import with_error
from hpc_toolkit.system.quantities import HOUR_S, counted, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.campaign.searchfacts import SearchFacts
    from hpc_toolkit.campaign.settings import Campaign
    from hpc_toolkit.campaign.summary import Summary
    from hpc_toolkit.queue.view import RunView

_RECENT = 0.8
"""A search whose best arm came after this share of its evaluations is still improving."""


def sections(
    view: RunView, campaign: Campaign, price: tuple[float, str] | None = None
) -> list[Section]:
    """Sections about the search, which follow the outcome of the run.

    ``price`` is that of a worker for an hour, with its currency, if it is known.
    """
    facts = read_search(view, campaign, price)
    if not facts.searched.decisions:
        return [Section(title="Search", paragraphs=("The policy has not requested any arm yet.",))]
    return [
        _outcome(facts),
        Section(
            title="Rewards",
            figures=(*reward_maps(facts), *metric_maps(facts, view), *key_means(facts)),
            tables=tuple(searchtables.ranking(facts)),
        ),
        searchtables.expected(facts),
    ]


def _outcome(facts: SearchFacts) -> Section:
    summary = facts.summary
    if summary is None or summary.best is None:
        said = "No arm has a reward yet." if summary is None else "No arm has a reward."
        return Section(title="Search", paragraphs=(said,))
    return Section(
        title="Search",
        paragraphs=tuple(outcome(facts, summary)),
        facts=tuple(_tiles(facts, summary)),
        figures=tuple(searchcurves.progress(facts, summary)),
    )


def outcome(facts: SearchFacts, summary: Summary) -> Iterator[str]:
    """The best arm, how sure that is and what to do next; then how it compares and what it took."""
    best = summary.best
    assert best is not None
    so_far = "" if summary.ended else " so far"
    every, done = summary.all_evaluations // summary.arms, len(summary.tasks)
    notes = [summary.scalariser] if every > 1 else []
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
    if facts.price is not None:
        price, currency = facts.price
        yield "cost of the evaluations", f"{price * summary.gpu_s / HOUR_S:,.2f} {currency}"
    if summary.failed_tasks:
        yield "failed evaluations", f"{summary.failed_tasks:,}"
