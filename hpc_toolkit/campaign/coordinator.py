"""The coordinator, ``hpctk campaign coordinate``: it makes a campaign's decisions (rule R14).

Workers never talk to it. The log of the tasks stage is its journal: the header of every segment
that it adds contains the ask and the tells on which the ask is based. A restart tells the policy
what the log says and goes on from there. So the coordinator can be killed at any moment and started
anywhere, and the sequence of arms is the same. :func:`dry_run` counts what it would do.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from time import monotonic
from typing import Any

from hpc_toolkit.bandit import Observation, Pull
from hpc_toolkit.bandit.arms import NONE
from hpc_toolkit.bandit.asktell import TASK_RULES
from hpc_toolkit.bandit.policy import number
from hpc_toolkit.campaign import settings
from hpc_toolkit.campaign.arms import TASK, arm_id
from hpc_toolkit.campaign.decisions import (
    EXHAUSTIVE,
    SEARCH,
    Decision,
    MetricColumns,
    left_over,
    read_decision,
)
from hpc_toolkit.campaign.search import (
    CampaignSearch,
    as_decided,
    known_metrics,
    known_results,
    make_arms,
    metric_columns,
    observe,
    policy_of,
    recorded_search,
    try_search,
)
from hpc_toolkit.errors import RunError, TryAgainLaterError
from hpc_toolkit.queue.items import Item, encode_segment
from hpc_toolkit.queue.presence import LIMIT_S
from hpc_toolkit.queue.units import MAX_UNIT
from hpc_toolkit.queue.view import Follower, RunView, StageView
from hpc_toolkit.results.gather import gather, rows_of_unit
from hpc_toolkit.results.tables import check_rows
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.rundir.trust import is_local
from hpc_toolkit.rundir.values import not_finite
from hpc_toolkit.system.quantities import counted

_SHORT_S = 0.1
"""Seconds of waiting before the copy for people is written; a shorter wait skips it."""
_ITEMS_A_UNIT = 1000
"""A unit of the tasks stage gets one item for every this many items of its segment."""
_SHORT_LOCAL_S, _SHORT_SHARED_S, _MOST_SHORT = 0.005, 0.05, 8
"""Expected seconds of a unit of short items, and the most items: they may turn out to be long."""


def arm_of(item: Item) -> str:
    """The arm of an item of the tasks stage. Raises RunError: the item names no arm, or no task."""
    if len(item) < 2 or TASK not in item:
        what = "keys of an arm" if TASK in item else repr(TASK)
        message = f"an item of stage {settings.TASKS!r} has no {what}: {json.dumps(item)[:200]}"
        raise RunError(message, hint="restore its segment; 'hpctk doctor RUN' checks it")
    return arm_id(item)


def unit_size(items: int) -> int:
    """Most items per unit in a segment of ``items`` items.

    Few, because one item may take as long as all others of its arm. But a name on disk for each of
    100,000 items would be too many.
    """
    return min(MAX_UNIT, max(1, items // _ITEMS_A_UNIT))


def short_unit(longest_s: float, *, local: bool) -> int:
    """Items per unit if none is expected to take longer than ``longest_s``: 1, or some that fit.

    Claiming a unit and syncing its results take longer than such short items, and ten times longer
    on a shared filesystem than on a local one.
    """
    unit_s = _SHORT_LOCAL_S if local else _SHORT_SHARED_S
    return max(1, int(unit_s / max(longest_s, unit_s / _MOST_SHORT)))


class Coordinator:
    """Runs the stages of one campaign to their end; restartable at any point."""

    def __init__(self, view: RunView, campaign: settings.Campaign) -> None:
        policy_of(campaign, make_arms(campaign))  # so that invalid settings are reported at once
        self._view = view
        self._campaign = campaign
        self._facts = {arm.id: arm for arm in campaign.arms()}
        self._stage: StageView = self._view.stages[settings.TASKS]
        self._local = is_local(view.paths.root)
        if not self._local:
            self._view.probes.limit_s = LIMIT_S
        self._follower = Follower(self._view, local=self._local)
        self._decided: dict[int, Decision] = {}
        self._units: dict[int, dict[str, set[str]]] = {}
        self._search: CampaignSearch
        self._metrics: MetricColumns | None = None
        self._untold = False
        """Whether the copy for people lacks an ask."""

    def run(self) -> None:
        """Run all stages to their end.

        Raises TryAgainLaterError: another coordinator decides; ConfigError: metrics that the search
        uses were not measured; RunError: a stage failed.
        """
        if self._campaign.prepare is not None:
            self._finish(settings.PREPARE, list(self._campaign.prepare.items))
        rows: list[dict[str, Any]] | None = None
        if settings.METRICS in self._view.stages:
            rows = self._finish(settings.METRICS, [arm.item() for arm in self._campaign.arms()])
        self._replay(rows)
        # A sealed log already contains the last decision.
        if not self._stage.log.sealed:
            self._decide()
        self._stage.log.seal()
        self._wait(self._stage)
        gather(self._view, settings.TASKS)
        self._write_trials()

    def _finish(self, name: str, items: list[Item]) -> list[dict[str, Any]]:
        """Add a stage's items to its log, wait until they are finished, publish their table."""
        stage = self._view.stages[name]
        stage.poll_log()
        while not stage.log.segments and not stage.log.sealed:
            stage.log.add_segment(encode_segment(items, group_by=stage.spec.group_by))
            stage.poll_log()
        stage.log.seal()
        self._wait(stage)
        rows = gather(self._view, name).rows
        check_rows(rows)
        failed = [row for row in rows if row["state"] == "failed"]
        if failed and name == settings.PREPARE:
            message = (
                f"{counted(len(failed), 'item')} of stage {name!r} failed: {failed[0]['error']}"
            )
            raise RunError(message, hint="fix the cause, run 'hpctk retry' and start again")
        return rows

    def _wait(self, stage: StageView, units: Collection[str] | None = None) -> None:
        """Wait until ``units`` have no pending item; None: until the stage is complete."""
        began = monotonic()
        while True:
            wanted = stage.state.open if units is None else units
            pause_s = self._follower.look(stage, wanted, monotonic() - began)
            if stage.complete if units is None else stage.state.open.isdisjoint(units):
                return
            if self._untold and monotonic() >= began + _SHORT_S:
                self._write_trials()
            time.sleep(pause_s)

    def _replay(self, rows: list[dict[str, Any]] | None) -> None:
        self._stage.log.hold_head()
        self._stage.poll_log()
        decisions = self._recorded()
        # The stages before may have taken days, and the settings may have been updated meanwhile.
        updated = settings.read_settings(self._view.paths, self._campaign.with_pending().to_json())
        self._campaign = as_decided(replace(updated, path=self._campaign.path), decisions)
        first = decisions[0] if decisions else None
        if self._campaign.search.metrics:
            recorded = first.metrics if first else None
            if recorded is None and rows is None:
                rows = known_metrics(self._campaign)
            self._metrics = recorded or metric_columns(self._campaign, rows or [])
        arms = make_arms(self._campaign, self._metrics)
        self._search = CampaignSearch(
            self._campaign, arms, first.known if first else known_results(self._campaign)
        )
        for decision in decisions:
            self._search.tell(decision.tells)
            self._search.take(decision)

    def _recorded(self) -> list[Decision]:
        for entry in self._decision_entries():
            if entry not in self._decided:
                self._decided[entry] = read_decision(self._stage.log.segments[entry])
        return list(self._decided.values())

    def _decision_entries(self) -> list[int]:
        segments = self._stage.log.segments
        return [entry for entry, segment in segments.items() if segment.decision is not None]

    def _decide(self) -> None:
        decisions = self._search.decisions
        while not decisions.exhausted:
            pulls = self._search.advance(self._results_of)
            if not pulls:
                break
            self._add(SEARCH, pulls)
        if not self._campaign.search.exhaustive or decisions.exhausted:
            return
        asked = [*decisions.asked, *self._search.known_pulls]
        left = left_over(asked, self._search.arms.ids, self._campaign.tasks.names)
        told = self._results_of(decisions.waiting) if left else None
        if told is not None:
            self._search.tell(told)
            self._add(EXHAUSTIVE, left)

    def _add(self, why: str, pulls: Sequence[Pull]) -> None:
        number = self._search.decisions.entries + 1
        decision = Decision(
            why=why,
            number=number,
            pulls=tuple(pulls),
            tells=tuple(self._search.fresh),
            metrics=self._metrics if number == 1 else None,
            search=recorded_search(self._campaign) if number == 1 else None,
            known=self._search.known if number == 1 else (),
        )
        lines = self._encode(decision)
        # The log was read on while waiting, so it may contain a rival's ask by now. The next
        # entry number is exclusive, so no ask can slip in after this check. Any other new entry,
        # such as a retry, changes nothing on which this ask is based.
        self._refuse_rival()
        while not self._stage.log.sealed:
            if self._stage.log.add_segment(lines):
                break
            self._refuse_rival()
        else:
            message = f"another coordinator has finished the search of {self._view.paths.root}"
            hint = "only one coordinator runs at a time; this one exits"
            raise TryAgainLaterError(message, hint=hint)
        self._search.take(decision)
        self._untold = True

    def _encode(self, decision: Decision) -> list[bytes]:
        """The segment of a decision: tasks of unknown duration first, then the longest ones."""
        seconds = self._search.expected_seconds()
        order = sorted(seconds, key=lambda task: -seconds[task])
        items = [
            {**self._facts[pull.arm].item(), "task": task}
            for pull in decision.pulls
            for task in order
            if not pull.tasks or task in pull.tasks
        ]
        longest_s = max(seconds[one["task"]] for one in items)
        size, short = unit_size(len(items)), short_unit(longest_s, local=self._local)
        segment = encode_segment(
            items,
            group_by=self._stage.spec.group_by,
            decision=decision.to_json(),
            unit_size=size,
            items_per_claim=short if short > size else None,
            kinds=[item["task"] for item in items],
        )
        return list(segment)  # a second attempt needs it again

    def _refuse_rival(self) -> None:
        if len(self._decision_entries()) > self._search.decisions.entries:
            # A process that was frozen while it wrote the copy may have restored an older one.
            self._write_trials()
            message = f"another coordinator is running for {self._view.paths.root}"
            hint = "only one coordinator runs at a time; this one exits"
            raise TryAgainLaterError(message, hint=hint)

    def _results_of(self, pulls: Sequence[Pull]) -> list[Observation] | None:
        """Wait for all tasks of some pulls; None if the log is sealed, so the search is over."""
        numbers, entries = self._search.decisions.numbers, self._decision_entries()
        places = [(pull, entries[numbers[pull] - 1]) for pull in pulls]
        units = {entry: set[str]() for _, entry in places}
        for pull, entry in places:
            units[entry] |= self._units_of(entry)[pull.arm]
        self._wait(self._stage, set().union(*units.values()))
        # A rival's table may show them as finished before we see a line of their results.
        self._refuse_rival()
        if self._stage.log.sealed:
            return None
        rows: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for entry, names in units.items():
            states = (self._stage.state.units[name] for name in sorted(names))
            found = (rows_of_unit(self._view, self._stage, state) for state in states)
            for _, row in chain.from_iterable(found):
                rows.setdefault((entry, arm_of(row["item"])), []).append(row)
        done = [row for some in rows.values() for row in some if row["state"] == "done"]
        self._refuse_scoreless(done)
        return [observe(pull.arm, rows.get((entry, pull.arm), [])) for pull, entry in places]

    def _refuse_scoreless(self, rows: list[dict[str, Any]]) -> None:
        """Raise RunError if the first results have no score: the next ones would have none."""
        known = any(one.scores for one in (*self._search.known, *self._search.decisions.told))
        if known or not rows or any(map(_may_score, rows)):
            return
        values = [row["value"] for row in rows]
        keys = {key for value in values if isinstance(value, dict) for key in value}
        have = ", ".join(sorted(keys))[:200] or f"only {json.dumps(values[0])[:200]}"
        message = f"the first results of stage {settings.TASKS!r} have no key 'score', but {have}"
        hint = "return {'score': NUMBER}, or the number, from the code of [tasks]; make a new run"
        raise RunError(message, hint=hint)

    def _units_of(self, entry: int) -> dict[str, set[str]]:
        """For each arm, the names of the units of a segment that contain its items."""
        if entry not in self._units:
            segment, found = self._stage.log.segments[entry], dict[str, set[str]]()
            for position, line in enumerate(segment.items()):
                name = segment.unit_of(position).name
                found.setdefault(arm_of(json.loads(line)), set()).add(name)
            self._units[entry] = found
        return self._units[entry]

    def _write_trials(self) -> None:
        """Write a copy of the asks and tells for people; it is never read back."""
        lines = []
        for decision in self._recorded():
            record = decision.to_json()
            lines += [{"type": "tell", **tell} for tell in record["tells"]]
            shown = {key: record[key] for key in ("why", "arms", "tasks") if key in record}
            lines.append({"type": "ask", **shown})
        self._untold = False
        path = self._view.paths.trials
        replace_file(path, [json.dumps(line).encode() + b"\n" for line in lines])


def _may_score(row: dict[str, Any]) -> bool:
    """Whether the code gives scores; one that is NaN is a failed evaluation."""
    value = row["value"]
    if isinstance(value, dict):
        return "score" in value
    return number(value) is not None or "" in not_finite(row.get("types", {}))


GEOMETRY = {"size": "log", "step": "log", "layer": "share of the model's layers"}
"""How the features of [[models]] are computed."""


def dry_run(campaign: settings.Campaign, file: str) -> dict[str, Any]:
    """Check the campaign as its start would, and count; ready for JSON.

    A limit or a duration is None where the file does not state it. Raises what the start of the
    campaign would raise.
    """
    campaign = campaign.with_pending()
    try_search(campaign, file)
    settings.checked_stages(campaign, campaign.path)
    search, tasks = campaign.search, campaign.tasks
    arms = list(campaign.arms())
    known = sum(len(one.scores) + len(one.failed) for one in known_results(campaign))
    everything = len(arms) * len(tasks.names)
    limits = [] if search.budget is None else [search.budget * len(tasks.names)]
    limits += [] if search.evaluations is None else [search.evaluations]
    # Known evaluations count towards the limits.
    most = max(0, min(*limits, everything) - known) if limits else None
    features, unused = GEOMETRY, list[str]()
    if campaign.rows is not None:
        columns = campaign.rows.columns()
        kinds = {one.key: one.kind if isinstance(one.kind, str) else "ordered" for one in columns}
        features = {key: kind for key, kind in kinds.items() if kind != NONE}
        unused = [key for key, kind in kinds.items() if kind == NONE]
    seconds = None
    # A race pays for cheap tasks first, so a mean over all tasks would mislead.
    if tasks.seconds and search.policy not in TASK_RULES:
        evaluations = everything - known if search.exhaustive or most is None else most
        seconds = sum(tasks.seconds.values()) / len(tasks.names) * evaluations
    return {
        "name": campaign.name,
        "policy": search.policy,
        "arms": len(arms),
        "tasks": list(tasks.names),
        "features": features,
        "unused": unused,
        "baseline": sum(arm.baseline for arm in arms),
        "baseline_name": campaign.baseline,
        # Items of the metrics stage.
        "measured": len(arms) if campaign.metrics and campaign.metrics.workload else 0,
        "evaluations": everything,
        "known": known,
        "most_arms": search.budget,
        "most_evaluations": most,
        # Arms that are evaluated at once.
        "pending": len(arms) if search.policy in TASK_RULES else search.most_pending,
        "seconds": seconds,
        # Checkpoints to load, by model.
        "checkpoints": dict(Counter(model.name for model in campaign.models for _ in model.steps)),
        "from_hub": any("@" in model.checkpoint for model in campaign.models),
    }
