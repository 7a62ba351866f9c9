"""Compare policies by many searches on recorded scores, and write the result as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from hpc_toolkit.bandit import asktell
from hpc_toolkit.bandit.bench.replay import Asks, ScoreTable, Trace, replay
from hpc_toolkit.bandit.rules.gp import OptunaTpe
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.quantities import format_duration

OnSearch = Callable[["Entrant", int], None]

KEPT = ("name", "arms", "seed", "tasks", "stop", "scalariser")
"""Arguments of ``make_policy`` that a comparison sets itself."""

FORMAT = 4
"""Version of the report; its keys stay the same under one version."""

GOALS = (0.98, 0.99, 0.995, 1.0)
"""Shares of the table's best mean to which searches are timed; 1 is the best arm."""

GOAL = 0.99
"""The goal that the text table shows."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """One policy with its options."""

    label: str
    """The policy and its options as the user wrote them."""
    name: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Entrant:
        """Parse ``NAME`` or ``NAME:OPTION=VALUE:OPTION=VALUE``.

        A value is a whole number, a number, ``true``, ``false`` or a word. Raises ConfigError for
        an unknown policy and for an option without a value; ``make`` raises it for an unknown
        option.
        """
        name, *words = text.strip().split(":")
        asktell.rule_of(name)  # a ConfigError for an unknown one
        options: dict[str, Any] = {}
        for word in words:
            option, equals, value = word.partition("=")
            if not (equals and option and value) or option in KEPT:
                message = f"policy {text!r}: {word!r} sets no option"
                raise ConfigError(message, hint=f"write {name}:OPTION=VALUE")
            options[option] = _value(value)
        return cls(text.strip(), name, options)

    @property
    def in_parts(self) -> bool:
        """Whether the policy requests an arm's tasks in parts."""
        return self.name in asktell.TASK_RULES

    def make(self, table: ScoreTable, seed: int, asks: Asks) -> asktell.Policy:
        """Create the policy for a search on a table.

        A policy that decides in rounds gets the options of :func:`asktell.round_options`.
        """
        in_rounds = asks.kind == "rounds"
        options = (
            asktell.round_options(self.name, self.options, asks.size) if in_rounds else self.options
        )
        # Metrics that the policy does not use would change the distances between groups.
        measured = options.get("features", "geometry") != "geometry"
        arms = table.measured_arms if measured else table.arms
        return asktell.make_policy(self.name, arms, seed, tasks=table.tasks, **options)


def entrants(text: str) -> list[Entrant]:
    """Parse a comma-separated list of policies; ``all`` means every installed policy.

    Raises ConfigError for an unknown policy and for a policy that is named twice.
    """
    words: list[str] = []
    installed = [*asktell.RULES, *asktell.TASK_RULES]
    if find_spec("optuna") is None:
        installed.remove(OptunaTpe.name)
    for word in text.split(","):
        words += installed if word.strip() == "all" else [word.strip()]
    for word in words:
        if words.count(word) > 1:
            raise ConfigError(f"policy {word!r} is named twice", hint="name every policy once")
    return [Entrant.parse(word) for word in words]


def _value(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?[0-9]+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The policies to compare, and the searches to compare them by."""

    entrants: Sequence[Entrant]
    asks: Asks = field(default_factory=lambda: Asks("rounds", 1))
    """How many pulls at once. A policy that requests tasks in parts requests complete rungs."""
    pulls: int | None = 60
    """Pulls on all tasks after which a search ends; None: when the policy has finished."""
    until: float | None = None
    """A search ends when it knows an arm with this share of the best mean, above 0 and at most 1.
    The share is one of the goals then."""
    seeds: int = 10
    """Number of searches of each policy."""
    first: int = 0
    """The first seed."""
    gpus: tuple[int, ...] = (1, 32)
    """Numbers of GPUs for which wall-clock time is simulated, if the table has durations."""

    def __post_init__(self) -> None:
        for what, number in (("seeds", self.seeds), ("pulls", self.pulls)):
            if number is not None and number < 1:
                raise ConfigError(f"{what}: {number}", hint="give at least 1")
        if self.until is not None and not 0 < self.until <= 1:
            message = f"until: {self.until}"
            raise ConfigError(message, hint="a share of the best mean, above 0, at most 1")
        if self.first < 0:
            raise ConfigError(f"first seed: {self.first}", hint="give 0 or more")


def reports(
    table: ScoreTable, plan: Plan, on_search: OnSearch | None = None
) -> Iterator[dict[str, Any]]:
    """Run the searches and yield a report after each policy, ready for strict JSON.

    Each report has one policy more than the report before; ``left_out`` names the missing ones. No
    report has a score, an arm or a task of the table. ``on_search`` is called before every search
    with its policy and its number. Raises ConfigError, before any search, for a table whose best
    mean is not positive, since the goals are shares of it, and for options that a policy rejects.
    """
    if float(table.means.max()) <= 0:
        message = "the best reward of the table is not positive"
        hint = "--until needs a positive best reward; add a constant to the scores"
        raise ConfigError(message, hint=hint)
    for entrant in plan.entrants:
        entrant.make(table, plan.first, plan.asks)
    exhaustive: dict[str, Any] = {"evaluations": float(table.scores.size)}
    if (seconds := table.seconds) is not None:
        exhaustive["gpu_s"] = float(seconds.sum())
        # A lower bound: no GPU is idle, or the longest evaluation takes all the time.
        exhaustive["wall_s"] = {
            str(gpus): float(max(seconds.sum() / gpus, seconds.max())) for gpus in plan.gpus
        }
    head = {
        "format": FORMAT,
        "arms": len(table.arms.arms),
        "tasks": len(table.tasks.names),
        "seeds": plan.seeds,
        "first_seed": plan.first,
        "asks": str(plan.asks),
        "pulls": plan.pulls,
        "until": plan.until,
        "exhaustive": exhaustive,
    }
    found: list[dict[str, Any]] = []
    for entrant in plan.entrants:
        traces = list(searches(entrant, table, plan, on_search))
        found.append({"policy": entrant.label, **_summary(entrant, traces, plan)})
        left_out = [other.label for other in plan.entrants[len(found) :]]
        yield {**head, "policies": list(found), "left_out": left_out}


def searches(
    entrant: Entrant, table: ScoreTable, plan: Plan, on_search: OnSearch | None = None
) -> Iterator[Trace]:
    """Run every search of one policy. The seeds are the same for all policies."""
    goal = math.inf if plan.until is None else _goal_of(table, plan.until)
    asks = Asks("rounds", len(table.arms.arms)) if entrant.in_parts else plan.asks
    pulls = None if entrant.in_parts else plan.pulls
    for number in range(plan.seeds):
        if on_search is not None:
            on_search(entrant, number)
        policy = entrant.make(table, plan.first + number, asks)
        yield replay(table, policy, asks, pulls=pulls, until=goal)


def _summary(entrant: Entrant, traces: Sequence[Trace], plan: Plan) -> dict[str, Any]:
    """Summarise what the searches of one policy spent to reach the goals, and how they ended."""
    costs = {}
    if not entrant.in_parts:  # otherwise pulls are of some tasks, and cannot be compared
        costs["pulls"] = [np.arange(1.0, len(trace.arms) + 1.0) for trace in traces]
    costs["evaluations"] = [trace.evaluations for trace in traces]
    if traces[0].table.seconds is not None:
        costs["gpu_s"] = [trace.gpu_s for trace in traces]
        costs |= {f"wall_s_{count}": [t.wall_s(count) for t in traces] for count in plan.gpus}
    goals, until = set(GOALS), plan.until
    if until is not None:
        goals = {*(share for share in GOALS if share < until), until}
    to_goal: dict[str, dict[str, dict[str, float | None]]] = {}
    for share in sorted(goals):
        reached = [reached_at(trace, share) for trace in traces]
        to_goal[_goal_key(share)] = {
            name: spread(
                [
                    float(one[int(end) - 1]) if math.isfinite(end) else math.inf
                    for one, end in zip(spent, reached, strict=True)
                ]
            )
            for name, spent in costs.items()
        }
    exact = [len(t.known) > 0 and t.known[-1] >= _goal_of(t.table, 1.0) for t in traces]
    return {"searches": len(traces), "to_goal": to_goal, "ended": {"exact": float(np.mean(exact))}}


def _goal_key(share: float) -> str:
    # More digits than users write, so that different goals have different keys.
    return f"{share:.12g}"


def _goal_of(table: ScoreTable, share: float) -> float:
    """Return the mean that an arm must have to be this share of the table's best."""
    # The factor keeps rounding from putting the goal above the best arm's own mean.
    return share * float(table.means.max()) * (1.0 - 1e-12)


def reached_at(trace: Trace, share: float) -> float:
    """Return the pull, from 1, after which the recommended arm always has this share of the best.

    It is infinity if there is no such pull. A policy that compares arms on few tasks may leave a
    good arm again.
    """
    lasting = np.minimum.accumulate(np.nan_to_num(trace.known, nan=-np.inf)[::-1])[::-1]
    reached = lasting >= _goal_of(trace.table, share)
    return float(np.argmax(reached)) + 1.0 if reached.any() else math.inf


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return how one number per search varies; None replaces infinity, which is no JSON.

    Infinity means that a search did not reach the goal, and sorts above every number. The keys are
    the ``median``, the ``p90`` (the lowest number that nine of ten searches do not exceed), and
    ``reached``, the share of the searches that reached the goal.
    """
    numbers = np.asarray(values, dtype=np.float64)
    found = {
        "median": float(np.median(numbers)),
        # Without interpolation, which is undefined between infinities.
        "p90": float(np.quantile(numbers, 0.9, method="inverted_cdf")),
        "reached": float(np.isfinite(numbers).mean()),
    }
    return {name: one if math.isfinite(one) else None for name, one in found.items()}


def as_csv(report: dict[str, Any]) -> str:
    """Return one line per policy, goal and cost; a cell is empty if searches missed the goal."""
    columns = ("median", "p90", "reached")
    lines = [",".join(("policy", "goal", "cost", *columns))]
    for one in report["policies"]:
        for goal, costs in one["to_goal"].items():
            for cost, found in costs.items():
                numbers = ("" if found[name] is None else repr(found[name]) for name in columns)
                lines.append(",".join((one["policy"], goal, cost, *numbers)))
    return "\n".join(lines) + "\n"


def as_lines(report: dict[str, Any]) -> list[str]:
    """Return a text table of what each policy spends to know an arm with 99 % of the best mean.

    If the searches ended at a lower share, the table is about that share. Each cell is the median
    and, after a slash, what nine of ten searches need.
    """
    key = _goal_key(GOAL if report["until"] is None else min(GOAL, report["until"]))
    costs = dict.fromkeys(cost for one in report["policies"] for cost in one["to_goal"][key])
    # Wall-clock time on one GPU is the GPU time.
    costs.pop("wall_s_1", None)
    every = {"pulls": report["arms"], **report["exhaustive"]}
    every |= {f"wall_s_{gpus}": found for gpus, found in every.pop("wall_s", {}).items()}
    rows = [[f"to {100 * float(key):g}% of the best", *map(_title, costs), "best at end"]]
    for one in report["policies"]:
        found = [(cost, one["to_goal"][key].get(cost)) for cost in costs]
        cells = [
            " / ".join(_number(cost, of[name]) for name in ("median", "p90")) if of else "-"
            for cost, of in found
        ]
        rows.append([one["policy"], *cells, f"{one['ended']['exact']:.0%}"])
    rows.append(["(everything)", *(_number(cost, every[cost]) for cost in costs), "100%"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _title(cost: str) -> str:
    if cost.startswith("wall_s_"):
        count = cost.removeprefix("wall_s_")
        return f"time on {count} GPU{'' if count == '1' else 's'}"
    return {"gpu_s": "GPU time"}.get(cost, cost)


def _number(cost: str, number: float | None) -> str:
    if number is None:
        return "never"
    return format_duration(number) if cost.startswith(("gpu_s", "wall_s_")) else f"{number:g}"
