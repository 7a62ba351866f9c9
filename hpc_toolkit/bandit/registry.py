"""The policies by name."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit.asktell import AskTell
from hpc_toolkit.bandit.rules import RULES
from hpc_toolkit.bandit.scalarise import check_scalariser
from hpc_toolkit.errors import ConfigError, near_miss

if TYPE_CHECKING:
    from hpc_toolkit.bandit.arms import ArmTable
    from hpc_toolkit.bandit.policy import Policy
    from hpc_toolkit.bandit.pulls import TaskSet

__all__ = ["RULES", "make_policy"]


def make_policy(
    name: str,
    arms: ArmTable,
    seed: int,
    *,
    tasks: TaskSet | None = None,
    scalariser: str = "mean",
    **options: Any,
) -> Policy:
    """A policy that was told nothing yet.

    Without ``tasks``, arms are pulled whole, and told once on tasks of any names. With them, an
    arm is done when all of these were told, in any number of tells.

    Raises ConfigError for an unknown name, scalariser or option, with the nearest known one, for
    a seed that is not a whole number from 0, and for an empty task set.
    """
    if name not in RULES:
        message = f"unknown policy {name!r}"
        raise ConfigError(message, hint=near_miss(name, list(RULES)))
    if not _is_seed(seed):
        message = f"seed is {seed!r}"
        raise ConfigError(message, hint="a whole number, 0 or more")
    if tasks is not None and not tasks.names:
        message = "the task set is empty"
        raise ConfigError(message, hint="give at least one task, or no task set")
    check_scalariser(scalariser, tasks)
    known = [option.name for option in fields(RULES[name])]
    for option in options:
        if option not in known:
            message = f"policy {name!r} has no option {option!r}"
            hint = near_miss(option, known) if known else "it has no options"
            raise ConfigError(message, hint=hint)
    return AskTell(arms, RULES[name](**options), seed, tasks=tasks, scalariser=scalariser)


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
