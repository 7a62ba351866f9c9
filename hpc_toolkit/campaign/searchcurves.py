"""The best reward of a search so far, by what it cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpc_toolkit.campaign.progress import expected_best, some_counts
from hpc_toolkit.report.figures import COLOURS
from hpc_toolkit.report.page import Figure
from hpc_toolkit.report.plots import DASHES, DOTS_LINE, STEPS, Plot, Series, plots
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpc_toolkit.campaign.searchfacts import SearchFacts
    from hpc_toolkit.campaign.summary import Summary


def progress(facts: SearchFacts, summary: Summary) -> Iterator[Figure]:
    """The best arm so far, over evaluations and over evaluation time."""
    if not facts.steps:
        return
    names = len(facts.searched.campaign.tasks.names)
    costs = {
        "evaluations": ([float(step.evaluations) for step in facts.steps], float(names)),
        "evaluation time": ([step.seconds for step in facts.steps], _seconds_of_an_arm(facts)),
    }
    drawn = []
    for cost, (spent, each) in costs.items():
        rewards = [step.reward for step in facts.steps]
        series = [_best_line(list(zip(spent, rewards, strict=True)))]
        series += [*_random(facts, each, spent[-1]), *_levels(summary, spent[-1])]
        drawn.append(
            Plot(
                x=cost,
                y="best reward so far",
                series=series,
                spans=cost == "evaluation time",
                price=facts.price,
            )
        )
    last = facts.steps[-1]
    since = next(one for one in facts.steps if one.reward == last.reward)
    said = f"After {counted(last.evaluations, 'evaluation')} the best reward is {last.reward:.4f};"
    said += f" it was found after {since.evaluations:,}."
    name = "Best reward so far"
    yield Figure(
        title=name,
        svg=plots(name, drawn, alternative=said),
        alt=said,
        caption=_caption(facts),
    )


def _best_line(points: Sequence[tuple[float, float]]) -> Series:
    """The points at which the best changes, and the last."""
    kept = [
        point
        for number, point in enumerate(points)
        if number in (0, len(points) - 1) or point[1] != points[number - 1][1]
    ]
    return Series(name="search", points=kept, colour=COLOURS[0], style=STEPS)


def _seconds_of_an_arm(facts: SearchFacts) -> float:
    """The mean evaluation time of an arm that has a result of every task; 0 if there is none."""
    rows = [facts.searched.found.rows[arm].values() for arm in facts.rewards]
    return math.fsum(row["seconds"] for some in rows for row in some) / max(1, len(rows))


def _random(facts: SearchFacts, each: float, end: float) -> Iterator[Series]:
    """The expected best of arms in a random order, as far as the search went.

    An arm costs ``each``; ``end`` is what the search cost. Only if all arms were evaluated: the
    policy chose the good ones, and a random order of those would look better than the search.
    """
    rewards = [one.mean for one in facts.rewards.values()]
    if not rewards or each <= 0 or not facts.evaluated_all:
        return
    most = min(len(rewards), max(1, math.ceil(end / each)))
    counts = some_counts(most)
    known = zip((one * each for one in counts), expected_best(rewards, counts), strict=True)
    points = [point for point in known if point[0] <= end * 1.02 or point[0] == each]
    yield Series(name="random order (expected)", points=points, colour=COLOURS[6], style=DASHES)


def _levels(summary: Summary, end: float) -> Iterator[Series]:
    lines = [(summary.baseline_name, summary.baseline, COLOURS[1])]
    lines += [("best of all arms", summary.exhaustive, COLOURS[2])]
    for name, found, colour in lines:
        if found is not None:
            points = [(0.0, found.reward), (end, found.reward)]
            yield Series(name=name, points=points, colour=colour, style=DOTS_LINE)


def _caption(facts: SearchFacts) -> str:
    said = "Evaluations are in the order in which the policy requested them."
    said += " Those that were known before cost nothing." if facts.searched.found.known else ""
    if not facts.rewards:
        return said + " No arm has a result of every task, so a random order is not known."
    if facts.evaluated_all:
        return said + " The random order is exact: the mean over all orders of all arms."
    return said + " A random order is shown once all arms are evaluated (exhaustive = true)."
