"""Parse policies for a comparison from user input such as ``gp-ucb:initial=8:features=all``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit.registry import RULES, TASK_RULES, make_policy, round_options
from hpc_toolkit.errors import ConfigError, near_miss

if TYPE_CHECKING:
    from hpc_toolkit.bandit.bench.recorded import ScoreTable
    from hpc_toolkit.bandit.bench.replay import Asks
    from hpc_toolkit.bandit.policy import Policy

KEPT = ("name", "arms", "seed", "tasks", "stop", "scalariser")
"""Arguments of ``make_policy`` that a comparison sets itself."""

ADAPTERS = {"optuna-tpe": "optuna"}
"""Policies that need an optional package, with its name."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """One policy with its options."""

    label: str
    """The policy and its options as the user wrote them."""

    name: str
    """The name of the policy in the registry."""

    options: dict[str, Any]
    """The options that the user gave."""

    @classmethod
    def parse(cls, text: str) -> Entrant:
        """Parse ``NAME`` or ``NAME:OPTION=VALUE:OPTION=VALUE``.

        A value is a whole number, a number, ``true``, ``false`` or a word. Raises ConfigError for
        an unknown policy and for an option without a value; ``make`` raises it for an unknown
        option.
        """
        name, *words = text.strip().split(":")
        known = [*RULES, *TASK_RULES]
        if name not in known:
            message = f"unknown policy {name!r}"
            raise ConfigError(message, hint=near_miss(name, known))
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
        """Whether the policy asks for an arm's tasks in parts."""
        return self.name in TASK_RULES

    def make(self, table: ScoreTable, seed: int, asks: Asks) -> Policy:
        """Create the policy for a search on a table.

        A policy that decides in rounds gets the options of :func:`registry.round_options`.
        """
        in_rounds = asks.kind == "rounds"
        options = round_options(self.name, self.options, asks.size) if in_rounds else self.options
        # Metrics that the policy does not use would change the distances between groups.
        measured = options.get("features", "geometry") != "geometry"
        arms = table.measured_arms if measured else table.arms
        return make_policy(self.name, arms, seed, tasks=table.tasks, **options)


def entrants(text: str) -> list[Entrant]:
    """Parse a comma-separated list of policies; ``all`` means every installed policy.

    Raises ConfigError for an unknown policy and for a policy that is named twice.
    """
    words: list[str] = []
    for word in text.split(","):
        words += _installed() if word.strip() == "all" else [word.strip()]
    for word in words:
        if words.count(word) > 1:
            message = f"policy {word!r} is named twice"
            raise ConfigError(message, hint="name every policy once")
    return [Entrant.parse(word) for word in words]


def _installed() -> list[str]:
    return [name for name in (*RULES, *TASK_RULES) if find_spec(ADAPTERS.get(name, "numpy"))]


def _value(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?[0-9]+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
