"""Items that a campaign has yet to ask for, as far as its settings determine them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_toolkit.campaign.decisions import EXHAUSTIVE, left_over, read_decisions
from hpc_toolkit.campaign.search import as_decided
from hpc_toolkit.campaign.settings import METRICS, PREPARE, TASKS, read_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.bandit import Pull
    from hpc_toolkit.campaign.decisions import Decision
    from hpc_toolkit.campaign.settings import ArmFacts, Campaign
    from hpc_toolkit.queue.items import Item
    from hpc_toolkit.queue.view import RunView


@dataclass(frozen=True, slots=True)
class ToCome:
    """Items that a campaign has not asked for yet."""

    items: dict[str, list[Item]] = field(default_factory=dict)
    """The items by stage."""
    most_workers: int | None = None
    """The most workers that find work while the search goes on; None: not limited."""
    said: tuple[str, ...] = ()
    """The assumptions, in sentences."""


def to_come(view: RunView, settings: dict[str, Any]) -> ToCome:
    """Return the items that the rest of a campaign will ask for and that are not in the run yet.

    Args:
        view: the view of the run, whose log must have been read.
        settings: the settings of the campaign in run.json.
    """
    campaign = read_settings(view.paths, settings)
    decisions = read_decisions(view.stages[TASKS].log.segments.values())
    campaign = as_decided(campaign, decisions)
    items: dict[str, list[Item]] = {}
    whole = {METRICS: [arm.item() for arm in campaign.arms()]}
    if campaign.prepare is not None:
        whole[PREPARE] = list(campaign.prepare.items)
    for name, all_items in whole.items():
        stage = view.stages[name]
        if not stage.log.sealed and not stage.state.units:
            items[name] = all_items
    if view.stages[TASKS].log.sealed or any(one.why == EXHAUSTIVE for one in decisions):
        return ToCome(items)
    found, said = _pulls(campaign, decisions)
    facts = {arm.id: arm for arm in campaign.arms()}
    names = campaign.tasks.names
    items[TASKS] = [
        {**facts[pull.arm].item(), "task": task} for pull in found for task in pull.tasks or names
    ]
    most = None if campaign.search.exhaustive else campaign.search.pending * len(names)
    return ToCome(items, most, (said,))


def _pulls(campaign: Campaign, decisions: Sequence[Decision]) -> tuple[list[Pull], str]:
    """Return the pulls that the search may still ask for, and the assumption behind them."""
    search, names = campaign.search, campaign.tasks.names
    asked = [pull for one in decisions for pull in one.pulls]
    open_pulls = left_over(asked, [arm.id for arm in campaign.arms()], names)
    if search.exhaustive:
        return open_pulls, "The campaign evaluates all arms in the end; all of them are counted."
    arms = len({pull.arm for pull in asked})
    evaluations = sum(len(pull.tasks or names) for pull in asked)
    bounds = []
    if search.budget is not None:
        bounds.append(max(0, search.budget - arms))
    if search.evaluations is not None:
        bounds.append(max(0, search.evaluations - evaluations) // len(names))
    if not bounds:
        return [], "Nothing says how many arms the search will ask for: those to come are left out."
    fresh = [pull for pull in open_pulls if not pull.tasks]
    count = min(*bounds, len(fresh))
    taken = _spread(campaign, fresh, count)
    said = (
        f"The search may ask for {count:,} more arms on {len(names)} tasks, at most"
        f" {search.pending} at once; it is taken to ask for all of them, spread evenly over"
        " those that are left, and never to wait for the last of a round."
    )
    return taken, said


def _spread(campaign: Campaign, pulls: list[Pull], count: int) -> list[Pull]:
    """Choose ``count`` of the pulls evenly; with group pulls, choose checkpoints evenly instead."""
    if not campaign.search.group_pulls:
        return [pulls[number * len(pulls) // count] for number in range(count)]
    facts: dict[str, ArmFacts] = {arm.id: arm for arm in campaign.arms()}
    groups: dict[str, list[Pull]] = {}
    for pull in pulls:
        groups.setdefault(facts[pull.arm].checkpoint, []).append(pull)
    some = list(groups.values())
    wanted = min(len(some), -(-count * len(some) // max(len(pulls), 1)))
    return [pull for number in range(wanted) for pull in some[number * len(some) // wanted]][:count]
