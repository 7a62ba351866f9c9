"""The policies by name: tells, pending pulls and best arm, and the rule that picks the pulls."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hpc_toolkit.bandit.arms import ArmTable
from hpc_toolkit.bandit.gp import EACH, GpEi, GpUcb
from hpc_toolkit.bandit.policy import (
    Floats,
    Observation,
    Pull,
    Recommendation,
    TaskSet,
    look_up,
)
from hpc_toolkit.bandit.racing import Racing
from hpc_toolkit.bandit.rule import (
    TIE_DECIMALS,
    Finalists,
    History,
    RandomOrder,
    Reward,
    Rule,
    TaskResults,
    checked_number,
    gaps_of,
    rewards_of,
)
from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.system.quantities import counted, format_duration

TIE_STDERRS = 2.0
"""On one task, arms within this many combined standard errors of the best are ties."""


def merged(known: Observation, more: Observation) -> Observation:
    """Merge two observations of one arm; ConfigError if they disagree on a task."""
    for task in {*known.scores, *known.failed} & {*more.scores, *more.failed}:
        if known.numbers_of(task) != more.numbers_of(task):
            message = f"arm {more.arm!r} has another result of task {task!r} already"
            raise ConfigError(message, hint="report each task of an arm once")
    return Observation(
        arm=known.arm,
        scores={**known.scores, **more.scores},
        stderrs={**known.stderrs, **more.stderrs},
        seconds={**known.seconds, **more.seconds},
        failed=(*known.failed, *more.failed),
    )


@dataclass(frozen=True, slots=True)
class StopRules:
    """Rules that end a search; None turns a rule off. Raises ConfigError for invalid values.

    Pending pulls count as spent, so that the asks of a batch stay within a budget too. A pull that
    exceeds a budget while it runs is still finished.
    """

    pulls: int | None = None
    """Different arms that were requested, on any tasks; failed arms count as well."""
    evaluations: int | None = None
    """Evaluations of an arm on a task."""
    gpu_s: float | None = None
    """Worker seconds: told durations plus the expected durations of pending evaluations."""

    def __post_init__(self) -> None:
        for name in ("pulls", "evaluations", "gpu_s"):
            if (value := getattr(self, name)) is not None:
                whole = name in ("pulls", "evaluations")
                hint = f"{'a whole number' if whole else 'seconds'}, 0 or more"
                value = checked_number(f"stop: {name}", value, low=0, whole=whole, hint=hint)
                object.__setattr__(self, name, value)

    def reason(self, history: History) -> str | None:
        """Describe the rule that holds now, with its numbers; None: no rule holds."""
        asked = history.results.asked
        if self.pulls is not None and (arms := int(asked.any(axis=1).sum())) >= self.pulls:
            return f"requested {counted(arms, 'arm')}, the budget is {self.pulls}"
        if self.evaluations is not None and (count := int(asked.sum())) >= self.evaluations:
            return f"requested {counted(count, 'evaluation')}, the budget is {self.evaluations}"
        if self.gpu_s is not None and (spent := seconds_spent(history)) >= self.gpu_s:
            used, most = format_duration(spent), format_duration(self.gpu_s)
            return f"requested {used} of GPU time, the budget is {most}"
        return None


def task_seconds(history: History) -> Floats:
    """Return shape (n_tasks,): seconds on one worker that each task takes for an average arm.

    This is the mean of the task's told durations; else the expected duration in the task set; else
    the mean over the tasks for which one of these is known; else 0.
    """
    expected = history.results.tasks.expected.copy()
    for task, column in enumerate(history.results.seconds.T):
        known = column[~np.isnan(column)]
        if known.size:
            expected[task] = known.mean()
    gaps = np.isnan(expected)
    expected[gaps] = expected[~gaps].mean() if not gaps.all() else 0.0
    return expected


def seconds_spent(history: History) -> float:
    """Return the told plus the expected durations of pending evaluations, on one worker."""
    seconds = history.results.seconds
    told = seconds[~np.isnan(seconds)].tolist()
    pending = (history.results.asked & ~history.results.told).sum(axis=0)
    expected = pending * task_seconds(history) if pending.any() else np.empty(0)
    return math.fsum([*told, *expected.tolist()])


@dataclass(eq=False, repr=False)
class Policy:
    """Decides which arms to evaluate next, without files, a clock or global random state.

    It remembers the tells and lets a rule pick the pulls. The same seed, arms, options, tells and
    pending arms give the same proposals in every process, whatever the order of the tells and
    however often ``ask`` was called before.
    """

    arms: ArmTable
    rule: Rule
    seed: int
    tasks: TaskSet
    stop_rules: StopRules | None = None

    def __post_init__(self) -> None:
        self._tells: dict[int, Observation] = {}
        self._results = TaskResults.empty(len(self.arms.arms), self.tasks)
        self._rewards: dict[int, Reward | None] = {}
        """Rewards of arms whose tasks were all told; None: the arm has none."""

    def ask(self, n: int, pending: Sequence[str | Pull] = ()) -> list[Pull]:
        """Return at most ``n`` pulls.

        An empty list means that a pending pull must be told first, or, if none is pending, that
        the policy has finished.

        ``pending`` must name every pull that was requested and not yet told; an arm's id alone
        means all of its tasks. ``ask`` keeps no record of its answers, so a lost ask can simply be
        repeated. No task of an arm is proposed that is told, pending, or earlier in the list.
        Asking for more arms gives a longer list with the same beginning. Stop rules do not change
        the answer.
        """
        if n < 0:
            raise ConfigError(f"requested {n} arms", hint="request 0 or more")
        return self.rule.choose(self._history(pending), n)

    def tell(self, observation: Observation) -> None:
        """Add an arm's results on some tasks. The results of several tells add up, in any order.
        Telling a task again is harmless if its result is equal, else an error.
        """
        index = self.arms.index(observation.arm)
        for task in (*observation.scores, *observation.failed, *observation.seconds):
            self.tasks.index(task)  # a ConfigError for an unknown one
        known = self._tells.get(index)
        self._tells[index] = observation if known is None else merged(known, observation)
        self._results.take(index, observation)
        self._rewards.pop(index, None)

    def best(self) -> Recommendation | None:
        """Return the best arm told so far; None while no arm has a reward."""
        history = self._history(())
        results = history.results
        for found in self._finalists(history):
            rewards = rewards_of(results, found.arms, tasks=found.tasks)
            if rewards:
                break
        else:
            return None
        order = sorted(rewards, key=lambda i: (-round(rewards[i].mean, TIE_DECIMALS), i))
        top = order[0] if found.leader is None else found.leader
        others = [i for i in order if i != top]
        gaps = gaps_of(results, top, others, tasks=found.tasks)
        behind = zip(others, gaps, strict=True)
        ties = [i for i, gap in behind if _is_tie(gap, rewards[top], rewards[i])]
        names = [results.tasks.names[task] for task in found.tasks]
        told = self._tells[top]
        return Recommendation(
            arm=self.arms.ids[top],
            mean=rewards[top].mean,
            stderr=rewards[top].stderr,
            ties=tuple(self.arms.ids[i] for i in ties),
            failed=tuple(name for name in names if name in told.failed),
            tasks=tuple(name for name in names if name in told.scores),
        )

    def stop(self, pending: Sequence[str | Pull] = ()) -> str | None:
        """Return the reason to request nothing more, for users; None: no stop rule holds."""
        if self.stop_rules is None:
            return None
        return self.stop_rules.reason(self._history(pending))

    def _history(self, pending: Sequence[str | Pull]) -> History:
        pulls = [Pull(pull) if isinstance(pull, str) else pull for pull in pending]
        indices = [self.arms.index(pull.arm) for pull in pulls]
        results = self._results.with_pending(zip(indices, pulls, strict=True))
        whole = np.flatnonzero(results.told.all(axis=1)).tolist()
        waiting = np.flatnonzero((results.asked & ~results.told).any(axis=1)).tolist()
        if new := [index for index in whole if index not in self._rewards]:
            found = rewards_of(results, new)
            self._rewards |= {index: found.get(index) for index in new}
        rewards = {i: reward for i in whole if (reward := self._rewards[i]) is not None}
        return History(
            table=self.arms,
            seed=self.seed,
            scored=tuple(rewards),
            rewards=np.array([reward.mean for reward in rewards.values()], dtype=np.float64),
            failed=tuple(index for index in whole if index not in rewards),
            pending=tuple(waiting),
            results=results,
        )

    def _finalists(self, history: History) -> Iterator[Finalists]:
        """Yield sets of arms for ``best``, which uses the first set in which an arm has a reward.

        They are the rule's finalists, the scored arms, and of the arms with the most scores the
        largest set with scores on the same tasks.
        """
        judged = self.rule.finalists(history)
        if judged is not None:
            yield judged
        yield Finalists(history.scored, tuple(range(len(history.results.tasks.names))))
        known, told = ~np.isnan(history.results.scores), history.results.told
        counts = known.sum(axis=1)
        # As in ``rewards_of``, an arm with more failures than scores does not count.
        counts[2 * counts < told.sum(axis=1)] = 0
        if not counts.any():
            return
        most = np.flatnonzero(counts == counts.max()).tolist()
        alike: dict[bytes, list[int]] = {}
        for arm in most:
            alike.setdefault(known[arm].tobytes(), []).append(arm)
        arms = max(alike.values(), key=len)
        yield Finalists(tuple(arms), tuple(np.flatnonzero(known[arms[0]]).tolist()))


def _is_tie(found: tuple[float, float | None], best: Reward, other: Reward) -> bool:
    gap, noise = found
    if noise is None:  # one task: only its own errors say how certain the difference is
        gap = best.mean - other.mean
        noise = TIE_STDERRS * math.hypot(best.stderr or 0.0, other.stderr or 0.0)
    return round(gap, TIE_DECIMALS) <= noise


def ask_within(policy: Policy, n: int, pending: Sequence[str | Pull] = ()) -> list[Pull]:
    """Return at most ``n`` pulls, fewer if a stop rule holds after some of them."""
    asked = policy.ask(n, pending)

    def stops_before(place: int) -> bool:
        return policy.stop([*pending, *asked[:place]]) is not None

    # Each pending pull only adds to what is spent, so bisection finds the first that is too much.
    return asked[: bisect_left(range(len(asked)), True, key=stops_before)]


RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (RandomOrder, GpUcb, GpEi)}
"""Rules that evaluate an arm on all tasks at once; a new rule goes here or into ``TASK_RULES``."""

TASK_RULES: dict[str, type[Rule]] = {Racing.name: Racing}
"""Rules that request an arm's tasks in parts."""

ONE_TASK = TaskSet(("task",))
"""The tasks of a search in which an evaluation has one score."""


def make_policy(
    policy: str | Rule,
    arms: ArmTable,
    seed: int,
    *,
    tasks: TaskSet = ONE_TASK,
    stop: StopRules | None = None,
    **options: Any,
) -> Policy:
    """Create a policy without any results, from its name and options or from a rule.

    An arm is complete when all ``tasks`` were told, in any number of tells. ``stop`` are the rules
    that the policy's method ``stop`` checks.

    Raises ConfigError for an unknown name or option, with the nearest known one; for a
    seed that is not a whole number from 0; and for arguments that do not fit together.
    """
    rule = policy if isinstance(policy, Rule) else _made(policy, options)
    if type(seed) is not int or seed < 0:
        raise ConfigError(f"seed is {seed!r}", hint="a whole number, 0 or more")
    if not tasks.names:
        raise ConfigError("the task set is empty", hint="give at least one task")
    return Policy(arms, rule, seed, tasks, stop)


def _made(name: str, options: Mapping[str, Any]) -> Rule:
    rule = rule_of(name)
    known = [option.name for option in fields(rule)]
    for option in options:
        if option not in known:
            message = f"policy {name!r} has no option {option!r}"
            hint = near_miss(option, known) if known else "it has no options"
            raise ConfigError(message, hint=hint)
    return rule(**options)


def round_options(name: str, options: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the options of a policy that is asked in rounds of ``size`` arms.

    Unless ``initial`` is given, a rule that has this option begins with at least one full round of
    initial arms: the results of part of a round come too late to choose the rest of it.
    Raises ConfigError for an unknown policy.
    """
    defaults: dict[str, Any] = {option.name: option.default for option in fields(rule_of(name))}
    initial = {"initial": max(defaults["initial"], size)} if "initial" in defaults else {}
    return {**initial, **options}


def scale_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a policy for arms whose features are settings of different kinds.

    Unless ``scales`` is given, a rule that has this option fits one for each feature: some settings
    matter more than others. Raises ConfigError for an unknown policy.
    """
    known = {option.name for option in fields(rule_of(name))}
    return {**({"scales": EACH} if "scales" in known else {}), **options}


def rule_of(name: str) -> type[Rule]:
    """Return the rule of a policy. Raises ConfigError with the nearest known name."""
    return look_up("policy", name, {**RULES, **TASK_RULES})
