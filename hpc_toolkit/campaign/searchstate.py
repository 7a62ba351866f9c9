"""How far a search has come, for everybody who looks while it runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.campaign.evaluations import searched_of, why_ended
from hpc_toolkit.campaign.settings import TASKS, Campaign, settings_of
from hpc_toolkit.errors import RunError
from hpc_toolkit.results.status import Search

if TYPE_CHECKING:
    from hpc_toolkit.campaign.decisions import Decision
    from hpc_toolkit.campaign.evaluations import Found
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.rundir.layout import Manifest
    from hpc_toolkit.system.seldom import Seldom

_LAST_ASKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """How far a search has come."""

    policy: str
    ended: str | None
    """Why the search has ended; None while it goes on."""
    arms: int
    """Number of arms of the campaign."""
    asked: int
    """Arms that the policy has requested."""
    budget: int | None
    """Arms that it may request; None: no such limit."""
    evaluated: int
    """Arms with results, perhaps not of all tasks, and those that were known before."""
    evaluations: int
    """Evaluations of an arm on a task that have ended."""
    evaluations_asked: int
    evaluations_budget: int | None
    """Evaluations that it may request; None: no such limit."""
    rounds: int
    """Decisions so far."""
    best: Found | None
    """The best evaluated arm, by the policy; None while no arm has a reward."""
    ties: int
    """Other arms within the noise of ``best``."""
    rounds_since_best: int | None
    """Decisions since the one that requested ``best``; None if it was known before, or no arm has a
    reward."""
    last: list[tuple[str, float | None, str]]
    """The arms that were requested last, the newest first, each with its reward over all tasks. If
    that is None, the text says why: ``failed``, ``not evaluated``, or ``2 of 3 tasks``."""


def search_of(
    view: RunView, manifest: Manifest, kept: Seldom[SearchState], complete: bool
) -> Search:
    """The state of the search, or why it is not known, as the status of a campaign has it."""

    def state() -> SearchState:
        return search_so_far(view, settings_of(view.paths, manifest))

    try:
        search, _ = kept.read(state, complete)
    except RunError as error:
        return Search(warnings=(error.message,))
    best = None
    if search.best is not None:
        best = asdict(search.best) | {"evaluated": search.evaluated, "arms": search.arms}
    return Search(best, asdict(search))


def search_so_far(view: RunView, campaign: Campaign) -> SearchState:
    """The state of the search, from the files alone."""
    searched = searched_of(view, campaign)
    names, best = campaign.tasks.names, searched.best
    search, rounds, asked = searched.campaign.search, searched.rounds, searched.asked
    since = None
    if best is not None:
        rest = (n for n, one in enumerate(reversed(rounds)) if best.arm in _arms_of(one))
        since = next(rest, None)
    newest = asked[: -_LAST_ASKS - 1 : -1]
    scored = searched.found.rewards(newest, names)
    sealed = view.stages[TASKS].log.sealed
    return SearchState(
        policy=searched.policy,
        # Otherwise it may take a fit of the policy's model to find out.
        ended=why_ended(searched.found, searched.decisions, sealed=True) if sealed else None,
        arms=len(searched.found.arms.arms),
        asked=len(asked),
        budget=search.budget,
        evaluated=len(searched.arms),
        evaluations=sum(
            len(searched.found.rows.get(pull.arm, {}).keys() & set(pull.tasks or names))
            for pull in searched.pulls
        ),
        evaluations_asked=sum(len(pull.tasks or names) for pull in searched.pulls),
        evaluations_budget=search.evaluations,
        rounds=len(rounds),
        best=None if best is None else searched.found.found(best.arm, best),
        ties=0 if best is None else len(best.ties),
        rounds_since_best=since,
        last=[
            (arm, scored[arm].mean, "") if arm in scored else (arm, None, searched.found.lacks(arm))
            for arm in newest
        ],
    )


def _arms_of(decision: Decision) -> set[str]:
    return {pull.arm for pull in decision.pulls}
