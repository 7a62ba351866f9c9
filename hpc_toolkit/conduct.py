"""Conduct: the one process of a campaign that decides (rule R14). Workers never talk to it.

The log of the tasks stage is its journal: every segment that it adds carries, in its header, the
ask and the tells that the ask rests on. A restart replays the log; the policy must give each
recorded ask again. So it can be killed at any moment and started anywhere, and the sequence of
arms is the same.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit import Arm, ArmTable, Observation, make_policy
from hpc_toolkit.bandit.geometry import GEOMETRY_NAMES, geometry_features
from hpc_toolkit.campaign import METRICS, PREPARE, TASKS, Campaign
from hpc_toolkit.errors import RunError, TryAgainLaterError
from hpc_toolkit.files import is_local, replace_file
from hpc_toolkit.gather import gather, unit_rows
from hpc_toolkit.queue.follower import Follower
from hpc_toolkit.queue.items import Item, encode_segment
from hpc_toolkit.queue.log import damaged
from hpc_toolkit.tables import check_rows

if TYPE_CHECKING:
    from hpc_toolkit.bandit import Policy
    from hpc_toolkit.queue.items import Segment
    from hpc_toolkit.queue.view import RunView, StageView
    from hpc_toolkit.run import Run

SEARCH, EXHAUSTIVE = "search", "exhaustive"
"""Why arms were asked: the policy chose them, or all that were left."""
_UNIT_SIZES = {SEARCH: 1, EXHAUSTIVE: 4}
# One evaluation task may take as long as all others of its arm, and the next decision waits for it.
# Nothing waits for a part of those that were left, and there are many of them.


def make_arms(campaign: Campaign) -> ArmTable:
    """The campaign's arms with their geometry as features."""
    return ArmTable(
        arms=tuple(
            Arm(
                id=arm.id,
                group=arm.checkpoint,
                features=geometry_features(
                    size=arm.model.size, step=arm.step, layer=arm.layer, layers=arm.model.layers
                ),
            )
            for arm in campaign.arms()
        ),
        feature_names=GEOMETRY_NAMES,
    )


@dataclass(slots=True)
class Decisions:
    """What the log of the tasks stage says was asked and told, in order."""

    asked: list[str] = field(default_factory=list)
    """Arms that the policy chose, in order."""
    told: list[str] = field(default_factory=list)
    """Arms whose result a later ask rests on, in order."""
    observations: dict[str, Observation] = field(default_factory=dict)
    """By arm, as they were told."""
    entries: int = 0
    """Segments read."""
    exhausted: bool = False
    """Whether all other arms were asked as well."""

    @property
    def waiting(self) -> list[str]:
        """Arms that were asked and not told, oldest first."""
        return self.asked[len(self.told) :]


def read_decisions(segments: list[Segment]) -> list[dict[str, Any]]:
    """The decision of every segment, in order.

    Raises:
        RunError: one is damaged.
    """
    found = []
    for segment in segments:
        one = segment.decision
        if one is None:
            continue
        lists = (one.get("arms"), one.get("tells"))
        if "why" not in one or not all(isinstance(each, list) for each in lists):
            raise damaged(segment.path, "line 1: its decision says no arms, tells or why")
        found.append(one)
    return found


def arm_of(row: dict[str, Any]) -> str:
    """The arm of a row of the tasks stage.

    Raises:
        RunError: its item names none, or no task of it.
    """
    item = row["item"]
    try:
        _, arm = item["task"], f"{item['checkpoint']}/layer{item['layer']}"
    except KeyError as error:
        message = f"an item of stage {TASKS!r} has no {error}: {json.dumps(item)[:200]}"
        raise RunError(message, hint="restore its segment; 'hpctk doctor RUN' checks it") from error
    return arm


class Conductor:
    """Runs the stages of one campaign to their end; restartable at any point."""

    def __init__(self, run: Run, campaign: Campaign) -> None:
        self._run = run
        self._view: RunView = run.view
        self._campaign = campaign
        self._arms = make_arms(campaign)
        self._facts = {arm.id: arm for arm in campaign.arms()}
        self._policy: Policy = make_policy(
            campaign.search.policy, self._arms, campaign.seed, **campaign.search.options
        )
        self._stage: StageView = self._view.stages[TASKS]
        self._follower = Follower(self._view, local=is_local(run.paths.root))
        self._decisions = Decisions()

    def run(self) -> None:
        """Conduct all stages.

        Raises:
            TryAgainLaterError: another conduct decides.
            RunError: a stage failed, or the policy does not give its recorded asks again.
        """
        if self._campaign.prepare is not None:
            self._finish(PREPARE, list(self._campaign.prepare.items))
        self._finish(METRICS, [arm.item() for arm in self._campaign.arms()])
        self._replay()
        self._search()
        if self._campaign.search.exhaustive:
            self._exhaust()
        self._stage.log.seal()
        self._wait(self._stage)
        gather(self._view, TASKS)
        self._write_trials()

    def _finish(self, name: str, items: list[Item]) -> None:
        """Have a stage's items in its log, wait until they are finished, publish their table."""
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
        if failed and name == PREPARE:
            message = f"{len(failed)} items of stage {name!r} failed: {failed[0]['error']}"
            raise RunError(message, hint="mend the cause, 'hpctk retry', and start again")

    def _wait(self, stage: StageView, units: list[str] | None = None) -> None:
        """Wait until these units have no pending item, or until a stage that is sealed has none."""
        while True:
            pause_s = self._follower.look(stage, stage.state.open if units is None else units)
            if stage.complete if units is None else stage.state.open.isdisjoint(units):
                return
            time.sleep(pause_s)

    def _replay(self) -> None:
        """Take in every recorded decision, and check that it is the one made from what was told."""
        self._stage.poll_log()
        for decision in read_decisions(list(self._stage.log.segments.values())):
            self._take_tells(decision["tells"])
            if decision["why"] == EXHAUSTIVE:
                self._decisions.exhausted = True
            else:
                self._check(decision["arms"])
                self._decisions.asked += decision["arms"]
            self._decisions.entries += 1

    def _take_tells(self, tells: list[dict[str, Any]]) -> None:
        for record in tells:
            observation = Observation.from_json(record)
            self._policy.tell(observation)
            self._decisions.told.append(observation.arm)
            self._decisions.observations[observation.arm] = observation

    def _check(self, arms: list[str]) -> None:
        again = self._ask(len(arms))
        if again != arms:
            message = (
                f"decision {len(self._decisions.asked)} was {arms}; the policy says {again} now"
            )
            raise RunError(
                message, hint="go on with the version and the settings that began this campaign"
            )

    def _ask(self, number: int) -> list[str]:
        proposals = self._policy.ask(number, pending=self._decisions.waiting)
        return [proposal.arm for proposal in proposals]

    def _search(self) -> None:
        search = self._campaign.search
        while not self._decisions.exhausted:
            asked, waiting = len(self._decisions.asked), self._decisions.waiting
            number = min(search.pending if asked == 0 else 1, search.budget - asked)
            if number <= 0:
                return
            tells = []
            if len(waiting) >= search.pending:
                # Only the oldest, though others may be back: a decision must not rest on speed.
                tells.append(self._result_of(waiting[0]))
            self._take_tells([observation.to_json() for observation in tells])
            arms = self._ask(number)
            if not arms:
                return
            self._add(SEARCH, arms, tells)
            self._decisions.asked += arms

    def _exhaust(self) -> None:
        asked = set(self._decisions.asked)
        left = [arm for arm in self._arms.ids if arm not in asked]
        if left and not self._decisions.exhausted:
            tells = [self._result_of(arm) for arm in self._decisions.waiting]
            self._take_tells([observation.to_json() for observation in tells])
            self._add(EXHAUSTIVE, left, tells)
        self._decisions.exhausted = True

    def _add(self, why: str, arms: list[str], tells: list[Observation]) -> None:
        """Write a decision with its tells into the log, and with it the items of its arms."""
        decision = {
            "why": why,
            "number": self._decisions.entries + 1,
            "arms": arms,
            "tells": [observation.to_json() for observation in tells],
        }
        items = [
            {**self._facts[arm].item(), "task": task}
            for arm in arms
            for task in self._longest_first()
        ]
        lines = encode_segment(
            items,
            group_by=self._stage.spec.group_by,
            decision=decision,
            unit_size=_UNIT_SIZES[why],
            kinds=[item["task"] for item in items],
        )
        # Waiting read the log on, so a rival's ask may be behind us by now. The entry that follows
        # what was looked at is exclusive, so no ask can slip in between. Another entry in the way,
        # a retry for instance, changes nothing that this ask rests on.
        self._refuse_rival()
        while not self._stage.log.add_segment(lines):
            self._refuse_rival()
        self._decisions.entries += 1
        self._write_trials()

    def _longest_first(self) -> list[str]:
        """The tasks in the order in which workers should begin them, by what the arms told so far;
        those of which nothing is known come first, as they were given."""
        seconds: dict[str, list[float]] = {task: [] for task in self._campaign.tasks.names}
        for observation in self._decisions.observations.values():
            for task in seconds.keys() & observation.seconds.keys():
                seconds[task].append(observation.seconds[task])
        means = {task: sum(n) / len(n) if n else math.inf for task, n in seconds.items()}
        return sorted(seconds, key=lambda task: -means[task])

    def _refuse_rival(self) -> None:
        found = read_decisions(list(self._stage.log.segments.values()))
        if len(found) > self._decisions.entries:
            # Whoever was frozen while it wrote may have put back what was there before.
            self._write_trials()
            message = f"another conduct decides for {self._run.root}"
            raise TryAgainLaterError(message, hint="one is enough; this one has ended")

    def _result_of(self, arm: str) -> Observation:
        """Wait for all tasks of an arm."""
        entry = next(
            number
            for number, segment in self._stage.log.segments.items()
            if segment.decision is not None and arm in segment.decision["arms"]
        )
        units = [unit.name for unit in self._stage.log.segments[entry].units]
        self._wait(self._stage, units)
        # A rival's table may say that they are finished before we see a line of their results.
        self._refuse_rival()
        rows = [row for _, row in unit_rows(self._view, self._stage, entry) if arm_of(row) == arm]
        return observe(arm, rows)

    def _write_trials(self) -> None:
        """A copy of asks and tells for people; never read back."""
        lines = []
        for decision in read_decisions(list(self._stage.log.segments.values())):
            lines += [{"type": "tell", **tell} for tell in decision["tells"]]
            lines.append({"type": "ask", "why": decision["why"], "arms": decision["arms"]})
        path = self._run.paths.trials
        replace_file(path, [json.dumps(line).encode() + b"\n" for line in lines])


def observe(arm: str, rows: list[dict[str, Any]]) -> Observation:
    """What an arm's rows of the tasks stage tell a policy."""
    scores, stderrs, seconds, failed = {}, {}, {}, []
    for row in sorted(rows, key=lambda row: str(row["item"]["task"])):
        task = row["item"]["task"]
        if row["state"] != "done" or "score" not in row["value"]:
            failed.append(task)
            continue
        scores[task] = row["value"]["score"]
        seconds[task] = row["seconds"]
        if row["value"].get("stderr") is not None:
            stderrs[task] = row["value"]["stderr"]
    return Observation(
        arm=arm, scores=scores, stderrs=stderrs, seconds=seconds, failed=tuple(failed)
    )
