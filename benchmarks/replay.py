"""Recorded and synthetic scores of every arm on every task, and searches replayed on them."""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Literal

import numpy as np

from hpc_toolkit.bandit.arms import GEOMETRY_NAMES, Arm, ArmTable, geometry_features, with_metrics
from hpc_toolkit.bandit.asktell import Policy
from hpc_toolkit.bandit.policy import LARGEST_NUMBER, Floats, Observation, Pull, TaskSet
from hpc_toolkit.bandit.rule import Stream
from hpc_toolkit.errors import ConfigError


@dataclass(frozen=True, eq=False)
class ScoreTable:
    """All arms with their scores on all tasks.

    Raises ConfigError for an empty task set, for a number that is not finite or too large, and for
    negative durations or standard errors.
    """

    arms: ArmTable
    """The arms; their features may have gaps."""
    tasks: TaskSet
    scores: Floats
    """Shape (n_arms, n_tasks), finite; higher is better."""
    seconds: Floats | None = None
    """Shape (n_arms, n_tasks): seconds of each evaluation on one GPU; None: not known."""
    stderrs: Floats | None = None
    """Shape (n_arms, n_tasks): standard errors of the scores; None: not known."""
    metrics: Mapping[str, Floats] = field(default_factory=dict)
    """Further measurements of the arms by name, shape (n_arms,) each; NaN: not known."""

    def __post_init__(self) -> None:
        if not self.tasks.names:
            raise ConfigError("the table has no task", hint="give at least one task")
        for what, low in (("scores", -LARGEST_NUMBER), ("seconds", 0.0), ("stderrs", 0.0)):
            if (numbers := getattr(self, what)) is None:
                continue
            wrong = np.argwhere(~((numbers >= low) & (numbers <= LARGEST_NUMBER)))
            for arm, task in wrong.tolist():
                message = f"{what}: {numbers[arm, task]} at arm {arm}, task {task}"
                raise ConfigError(message, hint="leave out arms and tasks that lack numbers")

    @cached_property
    def means(self) -> Floats:
        """Shape (n_arms,): each arm's mean over all tasks, by which searches are judged."""
        return np.asarray(self.scores.mean(axis=1))

    @cached_property
    def measured_arms(self) -> ArmTable:
        """The arms with the metrics as further features; see ``arms.with_metrics``."""
        rows = {
            arm: {name: float(column[index]) for name, column in self.metrics.items()}
            for index, arm in enumerate(self.arms.ids)
        }
        return with_metrics(self.arms, rows, list(self.metrics))

    def observation(self, arm: int, tasks: Iterable[int]) -> Observation:
        """Return the observation that an evaluation of an arm on some tasks would have given."""
        chosen = list(tasks)
        scores, stderrs, seconds = (
            {} if known is None else {self.tasks.names[j]: float(known[arm, j]) for j in chosen}
            for known in (self.scores, self.stderrs, self.seconds)
        )
        return Observation(self.arms.ids[arm], scores, stderrs, seconds)


def finish_times(
    durations: Sequence[Sequence[float]], told_before: Sequence[int], gpus: int
) -> Floats:
    """Return when the last evaluation of each pull ends, in seconds; shape (n_pulls,).

    This is an event simulation. Each GPU runs one evaluation at a time and starts the longest one
    that may begin. Deciding, loading models and claiming cost nothing, so the result is a lower
    bound for a run with this order. A pull without evaluations ends when it may begin.

    ``durations`` has the seconds of the evaluations of each pull, in the order of asks.
    ``told_before`` has for each pull how many results had to be told before it was requested.
    Results arrive in the order of asks, so a pull begins when that many first pulls ended.
    """
    ends, now = np.zeros(len(durations)), 0.0
    left = [len(seconds) for seconds in durations]
    ready: list[tuple[float, int]] = []  # a heap of negative durations, with their pulls
    running: list[tuple[float, int]] = []  # a heap of the times when evaluations end
    asked = told = 0
    while True:
        # Tell ended pulls and request pulls that waited for them, until neither is possible.
        while True:
            if asked < len(left) and told_before[asked] <= told:
                ends[asked] = now
                for seconds in durations[asked]:
                    heapq.heappush(ready, (-seconds, asked))
                asked += 1
            elif told < asked and not left[told]:
                told += 1
            else:
                break
        while ready and len(running) < gpus:
            negative, pull = heapq.heappop(ready)
            heapq.heappush(running, (now - negative, pull))
        if not running:
            return ends
        now, pull = heapq.heappop(running)
        left[pull] -= 1
        ends[pull] = now


@dataclass(frozen=True, slots=True)
class Asks:
    """How many pulls run at once, and when the policy decides."""

    kind: Literal["rounds", "window"]
    """``rounds``: request ``size`` pulls, tell them all, ask again. ``window``: whenever the oldest
    running pull has ended, tell it and request one more."""
    size: int

    @classmethod
    def parse(cls, text: str) -> Asks:
        """Parse ``one``, ``rounds:N`` or ``window:N``. Raises ConfigError for any other text."""
        match = re.fullmatch(r"(rounds|window):([1-9][0-9]{0,5})", text)
        if text != "one" and not match:
            raise ConfigError(f"asks: {text!r}", hint="write one, rounds:N or window:N")
        size = int(match[2]) if match else 1
        return cls("window" if match and match[1] == "window" else "rounds", size)

    def __str__(self) -> str:
        return "one" if self.size == 1 else f"{self.kind}:{self.size}"


@dataclass(frozen=True, eq=False)
class Trace:
    """One search. Pulls are numbered in the order in which they were requested and told."""

    table: ScoreTable
    arms: tuple[int, ...]
    tasks: tuple[tuple[int, ...], ...]
    told_before: tuple[int, ...]
    """For each pull, the number of results told before it was requested."""
    known: Floats
    """Shape (n_pulls,): the table's mean of the arm that the policy recommends once this pull is
    told; NaN while it recommends none."""

    @cached_property
    def evaluations(self) -> Floats:
        """Shape (n_pulls,): number of evaluations in this and all earlier pulls."""
        return np.cumsum([float(len(tasks)) for tasks in self.tasks])

    @cached_property
    def gpu_s(self) -> Floats:
        """Shape (n_pulls,): GPU seconds of this and all earlier pulls."""
        return np.cumsum([math.fsum(seconds) for seconds in self.durations])

    @cached_property
    def durations(self) -> list[list[float]]:
        """Seconds of each evaluation, by pull. Raises ConfigError if the table has no durations."""
        if self.table.seconds is None:
            message = "the score table has no durations"
            raise ConfigError(message, hint="add a column t_<task> with seconds for every task")
        pulls = zip(self.arms, self.tasks, strict=True)
        return [self.table.seconds[arm, list(tasks)].tolist() for arm, tasks in pulls]

    def wall_s(self, gpus: int) -> Floats:
        """Return shape (n_pulls,): when each pull can be told, in seconds from the start."""
        ends = finish_times(self.durations, self.told_before, gpus)
        return np.asarray(np.maximum.accumulate(ends))


def replay(
    table: ScoreTable,
    policy: Policy,
    asks: Asks,
    *,
    pulls: int | None = None,
    until: float = math.inf,
) -> Trace:
    """Let a policy search, and tell it the scores of the table.

    The policy has no results yet, and was made with the arms of the table. The search ends after
    ``pulls`` pulls, once the recommended arm has at least the mean ``until`` in the table, or when
    the policy has nothing more to request.
    """
    ids, names, means = table.arms.ids, table.tasks.names, table.means
    arms, tasks, told_before, known = list[int](), list[tuple[int, ...]](), list[int](), []
    requested: dict[int, set[int]] = defaultdict(set)
    waiting, value, whole = deque[int](), math.nan, True
    limit, finished = math.inf if pulls is None else pulls, False

    def tell(n: int) -> None:
        """Tell the policy the oldest ``n`` pulls in flight, and record the value known then."""
        nonlocal value
        for left in reversed(range(n)):
            number = waiting.popleft()
            policy.tell(table.observation(arms[number], tasks[number]))
            if whole:
                # The best mean is what ``policy.best`` would recommend, but is much faster.
                value = float(np.fmax(value, means[arms[number]]))
            elif not left:
                best = policy.best()
                value = math.nan if best is None else float(means[table.arms.index(best.arm)])
            known.append(value)

    while not finished and len(arms) < limit and not value >= until:
        if asks.kind == "window" or not waiting:
            most = int(min(asks.size - len(waiting), limit - len(arms)))
            pending = [Pull(ids[arms[i]], tuple(names[j] for j in tasks[i])) for i in waiting]
            for proposal in policy.ask(most, pending):
                arm = table.arms.index(proposal.arm)
                if proposal.tasks:
                    some = tuple(map(table.tasks.index, proposal.tasks))
                else:  # of all that were not requested before
                    some = tuple(sorted(set(range(len(names))) - requested[arm]))
                requested[arm].update(some)
                waiting.append(len(arms))
                arms.append(arm)
                tasks.append(some)
                told_before.append(len(known))
                whole = whole and len(some) == len(names)
        finished = not waiting
        tell(min(1, len(waiting)) if asks.kind == "window" else len(waiting))
    tell(len(waiting))
    return Trace(table, tuple(arms), tuple(tasks), tuple(told_before), np.array(known, np.float64))


NOISE_STDERR = 0.002
"""Standard error of a score: about that of a mean over 32 text embedding tasks."""

RIPPLE = 0.004
"""Standard deviation of each layer's own offset once trained, the same at every step."""

SIZES, BLOCKS = (70e6, 160e6, 410e6), (6, 12, 24)
"""Models of :func:`score_table`: parameters and blocks of three Pythia sizes."""

STEPS = (1, 128, 512, 2000, 8000, 32000, 143000)
"""Training steps of the checkpoints of :func:`score_table`."""

SECOND, OWN = 0.046, 0.047
"""Variance over arms that tasks do not share, as parts of the variance they share. In MTEB scores
of 175 layers of Pythia-410m on 32 tasks, the first component explains 91.5 % of the variance, the
second 4.2 %. The constants below come from the same scores.
"""

ROUGH = 0.0037
"""The part of ``OWN`` that varies from layer to layer without a pattern. For a trained checkpoint,
a task's score differs from neighbouring layers by 0.006, apart from what all tasks share. The rest
of ``OWN`` changes slowly with depth and training.
"""

LOADING = 0.47
"""Standard deviation over tasks of how much a task's score moves with the mean over tasks."""

TASK_SECONDS = 2_800.0
"""Sum of the tasks' durations in seconds at 0.57 of the largest model's blocks."""

TASK_SPREAD, TASK_FLOOR, ARM_SPREAD = 1.75, 2.8, 0.27
"""Durations: standard deviation of their logarithm over tasks, minimum seconds of a task, and
standard deviation of an arm's logarithm around its task's. As measured, the longest task then takes
a third of the sum, and the cheapest five together a hundredth."""


def surface(
    seed: int, sizes: Sequence[float], steps: Sequence[int], layers: Sequence[int]
) -> tuple[ArmTable, Floats]:
    """Generate scores shaped like the scores of language models probed layer by layer.

    Return one arm per (size, step, layer), with geometry features and (size, step) as the group,
    and the scores without noise, shape (n_arms,).

    Early in training the embeddings (layer 0) are best and scores fall with depth. Late in
    training the best layer is at 0.7 to 0.8 of the depth, a few hundredths above the last layer
    (Skean et al. 2025, arXiv 2502.02013). ``layers[i]`` is the number of blocks of ``sizes[i]``,
    which gives ``layers[i] + 1`` arms per step. Larger models score higher. Nothing else about the
    numbers is realistic.
    """
    rng = np.random.default_rng([seed, Stream.SURFACE])
    peak, gain = rng.uniform(0.70, 0.80), rng.uniform(0.065, 0.080)
    arms: list[Arm] = []
    scores: list[Floats] = []
    for size, blocks in zip(sizes, layers, strict=True):
        shortfall = 0.03 * float(np.log10(max(sizes) / size))
        ripple = rng.normal(0.0, RIPPLE, blocks + 1)
        for step in steps:
            group = f"{size:g}/step{step}"
            scores.append(_scores_of(step, blocks, peak, gain, ripple) - shortfall)
            for layer in range(blocks + 1):
                features = geometry_features(size=size, step=step, layer=layer, layers=blocks)
                arms.append(Arm(f"{group}/layer{layer}", group, features))
    return ArmTable(tuple(arms), GEOMETRY_NAMES), np.concatenate(scores)


def score_table(seed: int, tasks: int = 32) -> ScoreTable:
    """Generate synthetic scores and durations of three models on evaluation tasks: 315 arms.

    The mean over tasks is a :func:`surface` plus noise. Each task follows it with its own loading,
    a second component that depends on depth, and slow bends, which cancel over the tasks, plus
    noise. Standard errors are larger than that noise, because sources of error such as the choice
    of texts are common to all arms. The constants above calibrate the table; models of another
    size, width or kind have other numbers. Durations grow with the blocks that an arm passes: the
    last layer of the largest model takes 4.3 times as long as its embeddings.
    Raises ConfigError for fewer than 2 tasks.
    """
    if tasks < 2:
        raise ConfigError(f"{tasks} tasks", hint="give at least 2, so that they can differ")
    arms, means = surface(seed, SIZES, STEPS, BLOCKS)
    rng = np.random.default_rng([seed, Stream.MADE_TASKS])
    shared = means - means.mean()
    _, step, depth = arms.features.T
    step = step / step.max()
    second, *bends = (
        np.cos(np.pi * depth),
        *(np.cos(2 * np.pi * depth), np.sin(2 * np.pi * depth)),
        *(step * np.cos(np.pi * depth), step * np.sin(np.pi * depth)),
    )
    loadings = np.maximum(1.0 + LOADING * rng.standard_normal(tasks), 0.1)
    rough = np.exp(0.5 * rng.standard_normal(tasks))
    rough *= np.sqrt(ROUGH / np.mean(rough**2))
    parts = (
        np.outer(shared / shared.std(), loadings / loadings.mean()),
        _cancelling(rng, second, tasks, SECOND),
        *(_cancelling(rng, bend, tasks, (OWN - ROUGH) / len(bends)) for bend in bends),
        rough * rng.standard_normal((len(shared), tasks)),
    )
    scores = rng.uniform(0.2, 0.6, tasks) + shared.std() * np.sum(parts, axis=0)
    return ScoreTable(
        arms=arms,
        tasks=TaskSet(tuple(f"task{number:02d}" for number in range(1, tasks + 1))),
        scores=scores,
        seconds=_seconds(rng, arms, tasks),
        stderrs=np.full_like(scores, NOISE_STDERR * np.sqrt(tasks)),
    )


def _cancelling(rng: np.random.Generator, shape: Floats, tasks: int, variance: float) -> Floats:
    """Return shape (n_arms, tasks): ``shape`` for every task, with task weights that sum to 0."""
    weights = rng.standard_normal(tasks)
    weights -= weights.mean()
    weights *= np.sqrt(variance) / weights.std()
    return np.outer((shape - shape.mean()) / shape.std(), weights)


def _seconds(rng: np.random.Generator, table: ArmTable, tasks: int) -> Floats:
    """Return shape (n_arms, tasks): durations in seconds on one GPU."""
    ranks = (np.arange(tasks) + 0.5) / tasks
    quantiles = np.array([NormalDist(0.0, TASK_SPREAD).inv_cdf(float(rank)) for rank in ranks])
    typical = rng.permutation(np.exp(quantiles))
    typical = TASK_FLOOR + typical * (TASK_SECONDS - tasks * TASK_FLOOR) / typical.sum()
    log_size, _, depth = table.features.T
    # The nearest: some versions of numpy give logarithms of arrays and of numbers that differ.
    nearest = np.abs(log_size[:, None] - np.log(SIZES)).argmin(axis=1)
    passed = depth * np.array(BLOCKS)[nearest] / max(BLOCKS)
    noise = np.exp(ARM_SPREAD * rng.standard_normal((len(passed), tasks)))
    return np.asarray(np.outer(0.35 + 1.15 * passed, typical) * noise)


def _scores_of(step: int, blocks: int, peak: float, gain: float, ripple: Floats) -> Floats:
    """Return shape (blocks + 1,): one checkpoint's scores by layer."""
    depth = np.arange(blocks + 1) / blocks
    early = 0.425 - 0.15 * -np.expm1(-depth / 0.08) - 0.03 * depth
    below = 1.0 - ((peak - depth) / peak) ** 2
    above = 1.0 - 0.6 * ((depth - peak) / (1.0 - peak)) ** 2
    hill = np.where(depth <= peak, below, above)
    late = 0.445 + gain * _ramp(step, middle=8.0, width=1.0) * hill + ripple
    trained = _ramp(step, middle=7.3, width=0.5)
    return np.asarray((1.0 - trained) * early + trained * late)


def _ramp(step: int, *, middle: float, width: float) -> float:
    """Rise from 0 to 1 over log(1 + step), with one half at ``middle``."""
    return float(1.0 / (1.0 + np.exp((middle - np.log1p(step)) / width)))
