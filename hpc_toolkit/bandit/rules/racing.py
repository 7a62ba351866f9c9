"""Racing and successive halving: evaluate arms on a few tasks, and only the best on more."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, NamedTuple

import numpy as np

from hpc_toolkit.bandit.policy import Floats, Indices, Proposal
from hpc_toolkit.bandit.rewards import best_row, gaps, rewards_of
from hpc_toolkit.bandit.rule import TIE_DECIMALS, Finalists, History, Rule, Stream, number_option


class TaskOrder(NamedTuple):
    """The tasks from shortest to longest, or the arm to evaluate first to learn that order."""

    tasks: tuple[int, ...]
    """Indices of all tasks; ties go to the lower index, tasks of unknown duration come last."""
    seconds: Floats
    """Shape (n_tasks,): expected duration of each of ``tasks``, in that order; 1 for each if none
    is known."""
    pilot: int | None = None
    """The arm that must be told on all tasks before the order is known; None: it is known."""
    timed_by: int | None = None
    """The arm that took ``seconds``; None: they come from the task set, or are unknown."""


def task_order(history: History) -> TaskOrder:
    """Order the tasks by expected duration, if the task set has one for every task.

    Otherwise order them by the durations of a pilot arm. The seed draws the pilot; if it has
    neither a score nor a duration on any task, the next arm drawn takes its place.
    """
    expected = history.results.tasks.expected
    if not np.isnan(expected).any():
        return _ascending(expected)
    order = np.random.default_rng([history.seed, Stream.PILOT])
    for arm in order.permutation(len(history.table.arms)).tolist():
        if not history.results.told[arm].all():
            return TaskOrder((), np.empty(0), pilot=arm)
        if not np.isnan(history.results.seconds[arm]).all():
            return _ascending(history.results.seconds[arm])._replace(timed_by=arm)
        if not np.isnan(history.results.scores[arm]).all():
            # Scores came without durations; another pilot would not give any either.
            break
    return _ascending(np.full(len(expected), np.nan))


def _ascending(seconds: Floats) -> TaskOrder:
    known = np.where(np.isnan(seconds), np.inf, seconds)
    order = np.argsort(known, kind="stable")
    # The duration of a failed task is unknown; it counts as long as the longest.
    longest = float(np.nanmax(seconds)) if not np.isnan(seconds).all() else 0.0
    costs = np.where(np.isnan(seconds), longest, seconds)[order]
    if not costs.any():
        costs = np.ones(len(costs))
    return TaskOrder(tuple(order.tolist()), costs)


class Rung:
    """The state of a contest of arms, computed from the beginning for every ask."""

    def __init__(self, history: History, order: Sequence[int]) -> None:
        self._history = history
        self._order = tuple(order)
        self.arms: Indices = np.arange(len(history.table.arms))
        """Ascending indices of the remaining arms."""
        self.done = 0
        """All remaining arms were told on the first ``done`` tasks of the order."""
        self.counted: tuple[int, ...] = ()
        """The tasks among these by which arms are compared."""
        self.dropped: tuple[int, ...] = ()
        """The other tasks, which gave no scores to compare."""
        self.until: int | None = None
        """The arms must be told on the first ``until`` tasks next; None: the contest is over."""

    @property
    def scores(self) -> Floats:
        """Scores of the remaining arms on the counted tasks, shape (len(arms), len(counted))."""
        return self._history.results.scores[self.arms][:, self.counted]

    def reach(self, until: int) -> bool:
        """Advance to the first ``until`` tasks; if some are not told, request them, return False.

        The remaining arms at that point decide once and for all which of the new tasks count. A
        task cannot compare the arms if none has a score, or only one of more than two. This is the
        fault of the task, for instance of a missing data set, and not of an arm. A single score may
        have been told earlier, when the task could still be evaluated.
        """
        new = self._order[self.done : until]
        if not self._history.results.told[self.arms][:, new].all():
            self.until = until
            return False
        known = ~np.isnan(self._history.results.scores[self.arms][:, new])
        lost = known.sum(axis=0) < (2 if len(self.arms) > 2 else 1)
        self.counted += tuple(np.array(new)[~lost].tolist())
        self.dropped += tuple(np.array(new)[lost].tolist())
        self.done = until
        return True

    def proposals(self, n: int) -> list[Proposal]:
        """Return the first ``n`` requested pulls; none when the contest is over."""
        if self.until is None:
            return []
        return proposals(self._history, self.arms.tolist(), self._order[: self.until], n)


def proposals(
    history: History, arms: Sequence[int], tasks: Sequence[int], n: int
) -> list[Proposal]:
    """Propose the first ``n`` arms that lack some of these tasks, each with its missing tasks.
    The list is empty if all have a result or are pending.
    """
    names, asked = history.results.tasks.names, history.results.asked
    left = ((arm, tuple(names[task] for task in tasks if not asked[arm, task])) for arm in arms)
    found = (Proposal(history.table.ids[arm], some) for arm, some in left if some)
    return list(islice(found, n))


@dataclass(frozen=True, slots=True)
class _Contest(Rule):
    """A rule that first times the tasks on a pilot arm where their durations are not known."""

    def choose(self, history: History, n: int) -> list[Proposal]:
        order = task_order(history)
        if order.pilot is not None:
            # Nothing while the pilot is being evaluated.
            tasks = range(len(history.results.tasks.names))
            return proposals(history, [order.pilot], tasks, n)
        return self._rung(history, order).proposals(n)

    def finalists(self, history: History) -> Finalists | None:
        order = task_order(history)
        if order.pilot is not None:
            return None
        rung = self._rung(history, order)
        return self._last(rung) if rung.counted and rung.arms.size else None

    @abstractmethod
    def _rung(self, history: History, order: TaskOrder) -> Rung:
        """The open rung with its arms; the last one when the contest is over."""

    def _last(self, rung: Rung) -> Finalists | None:
        return Finalists(tuple(rung.arms.tolist()), rung.counted, dropped=rung.dropped)


@dataclass(frozen=True, slots=True)
class Racing(_Contest):
    """Evaluate the cheapest tasks first; arms that fall too far behind the leader drop out.

    Once all remaining arms were told on k of K tasks, with k at least ``first``, arm a drops out
    if ``mean(leader - a) > c * sd(leader - a) / sqrt(k) * sqrt(1 - k / K)``, by paired differences
    (see ``gaps``). See Maron and Moore 1994, "Hoeffding races", and Birattari et al. 2002. The
    race ends with one arm, or after all tasks with the exact mean. Arms are checked after every
    task, so ``c`` is not a quantile of a known error. An arm with more failed tasks than scores
    drops out, and a task that cannot compare the arms counts in neither k nor K.
    """

    name: ClassVar[str] = "racing"
    c: float = number_option(2.5)
    """Standard errors behind the leader at which an arm drops out."""
    first: int = number_option(3, low=2)
    """Number of tasks before any arm drops out."""
    block: int = number_option(1, low=1)
    """Number of tasks between one check and the next."""

    def _last(self, rung: Rung) -> Finalists | None:
        rung.arms = rung.arms[comparable(rung.scores)]
        if not rung.arms.size:
            return None
        leader = int(rung.arms[best_row(rung.scores)])
        return Finalists(tuple(rung.arms.tolist()), rung.counted, leader, rung.dropped)

    def _rung(self, history: History, order: TaskOrder) -> Rung:
        rung, look, tasks = Rung(history, order.tasks), self.first, len(order.tasks)
        while len(rung.arms) > 1 or not rung.counted:
            missing = max(look - len(rung.counted), 1)
            if rung.done == tasks or not rung.reach(min(rung.done + missing, tasks)):
                break
            if len(rung.counted) >= look or rung.done == tasks:
                if rung.counted:
                    left = survivors(rung.scores, tasks - len(rung.dropped), self.c)
                    rung.arms = rung.arms[left]
                look = len(rung.counted) + self.block
        return rung


def survivors(scores: Floats, population: int, c: float) -> Indices:
    """Return the rows that are still in the race after k of ``population`` tasks.

    ``scores`` has shape (n_arms, k), k >= 1, NaN for a failed task. The leader is always included,
    unless no arm has a score for half of the tasks.
    """
    usable = comparable(scores)
    if not usable.size:
        return usable
    found = gaps(scores[usable], population)
    unknown = np.isinf(found.errors)
    bounds = c * np.where(unknown, 0.0, found.errors)
    # Without the rounding, the last bit of a sum would separate equal arms.
    near = unknown | (np.round(found.means - bounds, TIE_DECIMALS) <= 0.0)
    return np.asarray(usable[near], np.intp)


def comparable(scores: Floats) -> Indices:
    """Return the rows with a score for at least half of the tasks."""
    return np.flatnonzero(2 * (~np.isnan(scores)).sum(axis=1) >= scores.shape[1])


@dataclass(frozen=True, slots=True)
class Halving(_Contest):
    """Evaluate all arms on a few cheap tasks, then the best 1/``eta`` on more tasks, and so on.

    This is sequential halving (Karnin, Koren and Somekh 2013, "Almost optimal exploration in
    multi-armed bandits") in which each rung adds tasks, cheapest first, for an equal part of the
    budget. The budget is ``share`` of the expected duration of all arms on all tasks; it includes a
    pilot's evaluations, and the first rung rescales it by the arms' slowness relative to the pilot.
    A rung may exceed its part. Arms are compared by their reward over the rung's tasks; ties go to
    the lower index. An arm with more failed tasks than scores drops out, and a task that cannot
    compare the arms is replaced.
    """

    name: ClassVar[str] = "halving"
    eta: float = number_option(2.0, low=1.1)
    """One arm in this many goes on to the next rung."""
    share: float = number_option(
        0.05, low=1e-6, high=1, hint="a share of the cost of all arms on all tasks, up to 1"
    )
    """The budget, as a share of the duration of all arms on all tasks. The first rung takes one
    task even if the budget is too small for it; the last rung takes at most all tasks."""

    def _rung(self, history: History, order: TaskOrder) -> Rung:
        rung, purse = Rung(history, order.tasks), _Purse(history, order, self.share)
        sizes = self.sizes(len(rung.arms))
        for place, size in enumerate(sizes, start=1):
            rung.arms = self._best(history, rung, size)
            if not rung.arms.size:
                break
            while True:
                before, dropped = rung.done, len(rung.dropped)
                until = purse.affordable(rung, place / len(sizes))
                if until > before and not rung.reach(until):
                    return rung
                purse.pay(rung, before)
                # Tasks dropped for lack of scores compared nothing: add others if affordable.
                if rung.done == len(order.tasks) or (rung.counted and len(rung.dropped) == dropped):
                    break
        return rung

    def _best(self, history: History, rung: Rung, size: int) -> Indices:
        """Return the ``size`` best arms over the tasks that count; all arms if none counts."""
        if not rung.counted:
            return rung.arms
        arms, tasks = rung.arms.tolist(), rung.counted
        rewards = rewards_of(history.results, arms, tasks=tasks, scalariser=history.scalariser)
        best = sorted(rewards, key=lambda arm: (-round(rewards[arm].mean, TIE_DECIMALS), arm))
        return np.array(sorted(best[:size]), dtype=np.intp)

    def sizes(self, arms: int) -> list[int]:
        """Return the number of arms of each rung; the last rung has at most ``eta``."""
        sizes = [arms]
        while sizes[-1] > self.eta:
            sizes.append(min(sizes[-1] - 1, math.ceil(sizes[-1] / self.eta)))
        return sizes


class _Purse:
    """The budget of the rungs and their spending, in expected and told seconds."""

    def __init__(self, history: History, order: TaskOrder, share: float) -> None:
        self._tasks, self._expected = order.tasks, order.seconds
        self._seconds = history.results.seconds[:, order.tasks]
        self._share = share
        self._everything = len(self._seconds) * float(order.seconds.sum())
        self._pilot = -1 if order.timed_by is None else order.timed_by
        self._corrected = self._pilot < 0
        self._prepaid, self._spent = 0.0, 0.0
        if self._pilot >= 0:
            self._prepaid = self._took(np.array([self._pilot]), 0, len(order.tasks))

    def affordable(self, rung: Rung, part: float) -> int:
        """Return how many tasks the arms can be told on for this part of the budget; at least one
        more than are done while no task counts.
        """
        left = part * (self._share * self._everything - self._prepaid) - self._spent
        pace = self._pace(rung)[rung.arms]
        each = max(float(pace[rung.arms != self._pilot].sum()), 1e-9)
        spent = np.concatenate([[0.0], np.cumsum(self._expected)])
        # Rounding in the sums must not cost a task.
        reach = float(spent[rung.done]) + left / each * (1.0 + 1e-9)
        tasks = int(np.searchsorted(spent, reach, side="right")) - 1
        return min(max(tasks, rung.done, 1 if rung.counted else rung.done + 1), len(self._expected))

    def pay(self, rung: Rung, before: int) -> None:
        """Charge for the tasks after the first ``before`` on which the arms were told."""
        payers = rung.arms[rung.arms != self._pilot]
        self._spent += self._took(payers, before, rung.done)
        if rung.counted and not self._corrected:
            # All arms were told on these tasks, which shows if the pilot is slower or faster.
            self._everything *= float(self._pace(rung).mean())
            self._corrected = True

    def _pace(self, rung: Rung) -> Floats:
        """Return every arm's duration divided by the expected one; 1 where that is 0.

        Only counted tasks count: tasks that fail can end at once.
        """
        counted = [place for place, task in enumerate(self._tasks) if task in rung.counted]
        seconds, expected = self._seconds[:, counted], self._expected[counted]
        if (total := float(expected.sum())) <= 0.0:
            return np.ones(len(seconds))
        return np.asarray(np.where(np.isnan(seconds), expected, seconds).sum(axis=1) / total)

    def _took(self, arms: Indices, start: int, stop: int) -> float:
        seconds = self._seconds[arms, start:stop]
        return float(np.where(np.isnan(seconds), self._expected[start:stop], seconds).sum())
