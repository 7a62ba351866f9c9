"""What the sections about a search are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.campaign.evaluations import searched_of
from hpc_toolkit.campaign.progress import progress_of
from hpc_toolkit.campaign.summary import summarize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpc_toolkit.bandit.rewards import Reward
    from hpc_toolkit.campaign.evaluations import Searched
    from hpc_toolkit.campaign.progress import Step
    from hpc_toolkit.campaign.settings import Campaign
    from hpc_toolkit.campaign.summary import Summary
    from hpc_toolkit.queue.view import RunView


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
    price: tuple[float, str] | None = None
    """Price of a worker for an hour, and its currency; None: not known."""

    @property
    def means(self) -> dict[str, float]:
        """The rewards without their errors."""
        return {arm: reward.mean for arm, reward in self.rewards.items()}

    @property
    def evaluated_all(self) -> bool:
        """Whether the reward of every arm is known."""
        return self.searched.found.complete


def read_search(
    view: RunView, campaign: Campaign, price: tuple[float, str] | None = None
) -> SearchFacts:
    searched = searched_of(view, campaign)
    found, names = searched.found, searched.campaign.tasks.names
    rewards = found.rewards(found.arms.ids, names)
    asked: dict[str, int] = {}
    for number, decision in enumerate(searched.rounds, 1):
        for pull in decision.pulls:
            asked.setdefault(pull.arm, number)
    return SearchFacts(
        searched=searched,
        summary=summarize(view, campaign, searched),
        rewards=rewards,
        asked=asked,
        steps=progress_of(searched, rewards),
        price=price,
    )
