"""The search of a campaign: its arms, its policy, and which ask follows which tells.

Nothing here waits or writes, so that the coordinator and the summary can take the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from hpc_toolkit import bandit
from hpc_toolkit.bandit.arms import GEOMETRY_NAMES, METRIC_PREFIX, geometry_features, with_metrics
from hpc_toolkit.bandit.asktell import TASK_RULES, round_options, scale_options
from hpc_toolkit.bandit.policy import number
from hpc_toolkit.bandit.rule import OwnRule, Rule
from hpc_toolkit.campaign.arms import TASK, arm_id
from hpc_toolkit.campaign.decisions import Decision, Decisions, MetricColumns, known_rows
from hpc_toolkit.campaign.settings import METRICS, TASKS, Campaign
from hpc_toolkit.campaign.tables import BUDGETS, search_table
from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.results.tables import Row
from hpc_toolkit.system.quantities import HOUR_S
from hpc_toolkit.worker.loading import load_object


def make_arms(campaign: Campaign, metrics: MetricColumns | None = None) -> bandit.ArmTable:
    """The campaign's arms; their features are the geometry, or their keys, and given metrics."""
    names, features = _features(campaign)
    table = bandit.ArmTable(
        arms=tuple(
            bandit.Arm(id=arm.id, group=arm.group, features=numbers, keys=arm.keys)
            for arm, numbers in zip(campaign.arms(), features, strict=True)
        ),
        feature_names=names,
    )
    if not metrics:
        return table
    if {len(column) for column in metrics.values()} != {len(table.ids)}:
        message = f"the first decision lacks metrics for some of {len(table.ids)} arms"
        raise RunError(message, hint="continue with the settings that started this campaign")
    rows = {
        arm: {name: column[index] for name, column in metrics.items()}
        for index, arm in enumerate(table.ids)
    }
    return with_metrics(table, rows, list(metrics))


def _features(campaign: Campaign) -> tuple[tuple[str, ...], list[tuple[float, ...]]]:
    """Names of the arms' own features, and for each arm its numbers."""
    if campaign.rows is None:
        return GEOMETRY_NAMES, [
            geometry_features(size=model.size, step=step, layer=layer, layers=model.layers)
            for model in campaign.models
            for step, layer in model.points()
        ]
    found = campaign.rows.columns()
    columns = [numbers for column in found for numbers in column.numbers]
    rows = list(zip(*(column.values for column in columns), strict=True))
    return tuple(column.name for column in columns), rows or [()] * len(campaign.rows.rows)


def recorded_search(campaign: Campaign) -> dict[str, Any]:
    """The keys of [search] that asks depend on, which the first decision records."""
    table = asdict(campaign.search)
    return {key: one for key, one in table.items() if key not in BUDGETS and one is not None}


def as_decided(campaign: Campaign, decisions: Sequence[Decision]) -> Campaign:
    first = decisions[0].search if decisions else None
    if first is None:
        return campaign
    ends = {key: getattr(campaign.search, key) for key in BUDGETS}
    given = {key: one for key, one in ends.items() if one is not None}
    try:
        search = search_table({**first, **given}, "search", ends=False)
        return replace(campaign, search=search)
    except ConfigError as error:
        message = f"the first decision of stage 'tasks' is damaged: {error.message}"
        raise RunError(message, hint="restore its segment; 'hpctk doctor RUN' checks it") from error


def make_tasks(campaign: Campaign) -> bandit.TaskSet:
    work = campaign.tasks
    return bandit.TaskSet(
        work.names, seconds=tuple(work.seconds[name] for name in work.names if work.seconds)
    )


def metric_columns(campaign: Campaign, rows: Iterable[dict[str, Any]]) -> MetricColumns:
    """The metrics that the search uses, from the rows of the metrics stage.

    Raises ConfigError: no row has one of the metrics, or too few rows have it.
    """
    table = make_arms(campaign)
    found: dict[str, dict[str, float | None]] = {arm: {} for arm in table.ids}
    for row in rows:
        arm = arm_id(row["item"])
        if arm in found and isinstance(row["value"], dict):
            found[arm].update((name, number(value)) for name, value in row["value"].items())
    fix = "fix search.metrics, then run 'hpctk campaign run FILE --update'"
    try:
        used = with_metrics(table, found, campaign.search.metrics).feature_names
    except ConfigError as error:
        message = f"search.metrics: {error.message}"
        raise ConfigError(message, hint=f"{error.hint}; {fix}") from error
    columns = {
        name: [found[arm].get(name) for arm in table.ids] for name in campaign.search.metrics
    }
    for name, column in columns.items():
        if METRIC_PREFIX + name not in used:
            known = sum(value is not None for value in column)
            message = f"search.metrics: only {known} of {len(column)} arms have {name!r}"
            raise ConfigError(message, hint=f"retry the metrics stage, or {fix}")
    return columns


def policy_of(campaign: Campaign, arms: bandit.ArmTable) -> bandit.Policy:
    """The campaign's policy, before any tell. Raises ConfigError for an unknown name or option."""
    search = campaign.search
    options = dict(search.options)
    policy: str | Rule = search.policy
    if search.is_own:
        make = load_object(search.policy, campaign.path)
        policy, options = OwnRule(called=search.policy, make=make, options=options), {}
    elif search.in_rounds and search.policy not in TASK_RULES:
        options = round_options(search.policy, options, search.most_pending)
    if campaign.rows is not None and not search.is_own:
        options = scale_options(search.policy, options)
    stop = bandit.StopRules(
        pulls=search.budget,
        evaluations=search.evaluations,
        gpu_s=None if search.gpu_hours is None else search.gpu_hours * HOUR_S,
    )
    return bandit.make_policy(
        policy, arms, campaign.seed, tasks=make_tasks(campaign), stop=stop, **options
    )


def try_search(campaign: Campaign, file: str) -> None:
    """Make the policy and ask it once, so that a ConfigError comes before anything runs."""
    search, where = campaign.search, file
    try:
        rows, known = known_metrics(campaign), known_results(campaign)
        where = f"{file}: search"
        # Metrics that are not measured yet are zero in this check.
        columns: MetricColumns = {name: [0.0 for _ in campaign.arms()] for name in search.metrics}
        if search.metrics and campaign.metrics is not None and campaign.metrics.known:
            columns = metric_columns(campaign, rows)
        arms = make_arms(campaign, columns)
        first, again = (_first_asks(CampaignSearch(campaign, arms, known)) for _ in range(2))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error
    if not first[0]:
        ended = CampaignSearch(campaign, arms, known)
        ended.advance(lambda _: None)
        message = f"{file}: search: nothing would be evaluated: {ended.ended}"
        raise ConfigError(message, hint="raise the limits, or add arms or tasks")
    if first != again:
        message = f"{file}: search: policy {search.policy!r} asks differently when asked again"
        raise ConfigError(message, hint="draw random numbers from a generator of the seed only")
    if (
        search.metrics
        and not search.is_own
        and search.options.get("features", "geometry") == "geometry"
    ):
        message = f"{file}: search: metrics: nothing uses them"
        hint = "options = { features = 'all' }, for a policy that has this option"
        raise ConfigError(message, hint=hint)


def _first_asks(search: CampaignSearch) -> list[list[bandit.Pull]]:
    """The first ask, and one more after made-up results: two searches must agree on both."""
    asks = [search.advance(lambda _: [])]
    for place, pull in enumerate(asks[0][:3]):
        scores = {task: float(place) for task in pull.tasks or search.tasks}
        search.tell([bandit.Observation(pull.arm, scores)])
    asks.append(search.again(2))
    return asks


class CampaignSearch:
    """The policy of a campaign, with its asks and tells."""

    def __init__(
        self, campaign: Campaign, arms: bandit.ArmTable, known: Sequence[bandit.Observation] = ()
    ) -> None:
        self.arms = arms
        self.known = tuple(known)
        """Results from before the campaign."""
        self.decisions = Decisions()
        self.fresh: list[bandit.Observation] = []
        """Observations told since the last decision."""
        self.ended: str | None = None
        """Why the search has ended; None while it goes on."""
        self._search = campaign.search
        self.tasks = campaign.tasks.names
        self._policy = policy_of(campaign, arms)
        self._open: dict[str, tuple[str, ...]] = {}
        """Tasks to evaluate of the arms that have known results."""
        self._given_seconds = campaign.tasks.seconds
        self._seconds: dict[str, tuple[int, float]] = dict.fromkeys(self.tasks, (0, 0.0))
        """Number and sum of the durations told of each task."""
        for observation in self.known:
            self._policy.tell(observation)
            self._note_seconds(observation)
            told = {*observation.scores, *observation.failed}
            self._open[observation.arm] = tuple(
                name for name in campaign.tasks.names if name not in told
            )
        self._together = self._search.in_rounds or self._search.policy in TASK_RULES
        # A rule over tasks waits for its complete rung, so a window would only delay the next one.

    @property
    def known_pulls(self) -> list[bandit.Pull]:
        """The evaluations whose results were known."""
        return [bandit.Pull(one.arm, (*one.scores, *one.failed)) for one in self.known]

    def tell(self, tells: Iterable[bandit.Observation]) -> None:
        """Tell the policy results, in the order of their asks."""
        for observation in tells:
            self._policy.tell(observation)
            self._note_seconds(observation)
            self.decisions.told.append(observation)
            self.fresh.append(observation)

    def _note_seconds(self, observation: bandit.Observation) -> None:
        for task, seconds in observation.seconds.items():
            if task in observation.scores:
                count, total = self._seconds[task]
                self._seconds[task] = count + 1, total + seconds

    def expected_seconds(self) -> dict[str, float]:
        """By task: the mean of those told, else the campaign's own, else infinity."""
        return {
            task: total / count if count else self._given_seconds.get(task, math.inf)
            for task, (count, total) in self._seconds.items()
        }

    def take(self, decision: Decision) -> None:
        """Record the asks of a decision; later tells belong to the next decision."""
        self.decisions.take(decision)
        self.fresh = []

    def again(self, number: int) -> list[bandit.Pull]:
        return self._pulls(self._policy.ask(number, self.decisions.waiting))

    def due(self) -> list[bandit.Pull]:
        """The pulls whose results must be told before the next ask."""
        waiting = self.decisions.waiting
        if self._together:
            return waiting
        # Only the oldest, even if others are back: a decision must not depend on speed.
        return waiting[:1] if len(waiting) >= self._search.most_pending else []

    def advance(
        self,
        results_of: Callable[[Sequence[bandit.Pull]], list[bandit.Observation] | None],
    ) -> list[bandit.Pull]:
        """The next ask; empty when the search has ended, and ``ended`` says why.

        ``results_of`` returns the results of pulls; if it returns None, this returns no ask and
        sets no reason.
        """
        due = self.due()
        while True:
            found = results_of(due) if due else []
            if found is None:
                return []
            self.tell(found)
            waiting = self.decisions.waiting
            self.ended = self._policy.stop(waiting)
            if self.ended is not None:
                return []
            pulls = self._pulls(bandit.ask_within(self._policy, self._most(), waiting))
            if pulls:
                return pulls
            if not waiting:
                self.ended = "the policy requested nothing more"
                return []
            due = waiting[:1]

    def _most(self) -> int:
        if self._search.policy in TASK_RULES:
            return len(self.arms.arms)
        return self._search.most_pending if self._together or not self.decisions.asked else 1

    def _pulls(self, asked: Sequence[bandit.Pull]) -> list[bandit.Pull]:
        """The pulls in one form that can be compared: empty ``tasks`` for all tasks."""
        pulls = [bandit.Pull(one.arm, one.tasks or self._open.get(one.arm, ())) for one in asked]
        return [
            bandit.Pull(arm, () if set(self.tasks) <= set(tasks) else tasks) for arm, tasks in pulls
        ]


def known_metrics(campaign: Campaign) -> list[Row]:
    """The rows of the metrics that [metrics] names with ``from``."""
    sources = campaign.metrics.known if campaign.metrics else ()
    return known_rows(sources, METRICS) if sources else []


def known_results(campaign: Campaign) -> list[bandit.Observation]:
    """The evaluations that [tasks] names with ``from``, of arms and tasks of this campaign."""
    if not campaign.tasks.known:
        return []
    rows = known_rows(campaign.tasks.known, TASKS)
    found: dict[str, dict[str, Row]] = {arm.id: {} for arm in campaign.arms()}
    for row in rows:
        arm, task = arm_id(row["item"]), row["item"].get(TASK)
        if arm in found and task in campaign.tasks.names and score_of(row) is not None:
            found[arm].setdefault(task, row)  # of several results of one evaluation the first
    if not any(found.values()):
        message = f"tasks: from: none of {len(rows)} results is of an arm and task of this campaign"
        raise ConfigError(message, hint=f"sources: {', '.join(campaign.tasks.known)}")
    return [observe(arm, list(some.values())) for arm, some in found.items() if some]


def observe(arm: str, rows: list[dict[str, Any]]) -> bandit.Observation:
    """The observation from an arm's rows of the tasks stage; a task without a score has failed."""
    scores, stderrs, seconds, failed = {}, {}, {}, []
    for row in sorted(rows, key=lambda row: str(row["item"]["task"])):
        task = row["item"]["task"]
        score = score_of(row)
        seconds[task] = row["seconds"]  # failures take time as well
        if score is None:
            failed.append(task)
            continue
        scores[task] = score
        stderr = number(row["value"].get("stderr")) if isinstance(row["value"], dict) else None
        if stderr is not None and stderr >= 0:
            stderrs[task] = stderr
    return bandit.Observation(arm, scores, stderrs, seconds, tuple(failed))


def score_of(row: dict[str, Any]) -> float | None:
    """The score of a row of the tasks stage, or the value itself; None if it is not finite.

    A done item is never run again, so an unreadable score must not end the search.
    """
    value = row["value"]
    return number(value.get("score") if isinstance(value, dict) else value)
