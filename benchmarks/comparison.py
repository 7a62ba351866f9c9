"""Many searches of one policy on recorded scores, and what they needed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from replay import Asks, ScoreTable, Trace, replay

from hpc_toolkit.bandit import asktell
from hpc_toolkit.errors import ConfigError

KEPT = ("name", "arms", "seed", "tasks", "stop")
"""Arguments of ``make_policy`` that a comparison sets itself."""


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
    """A search ends when it knows an arm with this share of the best mean."""
    seeds: int = 10
    """Number of searches of each policy."""
    first: int = 0
    """The first seed."""


def searches(entrant: Entrant, table: ScoreTable, plan: Plan) -> Iterator[Trace]:
    """Run every search of one policy. The seeds are the same for all policies."""
    goal = math.inf if plan.until is None else _goal_of(table, plan.until)
    asks = Asks("rounds", len(table.arms.arms)) if entrant.in_parts else plan.asks
    pulls = None if entrant.in_parts else plan.pulls
    for number in range(plan.seeds):
        policy = entrant.make(table, plan.first + number, asks)
        yield replay(table, policy, asks, pulls=pulls, until=goal)


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
