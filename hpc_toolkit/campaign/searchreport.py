"""The search of a campaign as sections of a run's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_toolkit.campaign.settings import Campaign
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.report.page import Section


def sections(_view: RunView, _campaign: Campaign) -> list[Section]:
    """Sections about the search, which follow the outcome of the run."""
    return []
