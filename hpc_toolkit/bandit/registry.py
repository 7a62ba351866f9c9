"""The policies by name."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hpc_toolkit.bandit.asktell import Policy
from hpc_toolkit.bandit.policy import TaskSet, look_up
from hpc_toolkit.bandit.rewards import check_scalariser
from hpc_toolkit.bandit.rule import RandomOrder, Rule
from hpc_toolkit.bandit.rules.gp import EACH, GpEi, GpTs, GpUcb
from hpc_toolkit.bandit.rules.optuna_tpe import OptunaTpe
from hpc_toolkit.bandit.rules.racing import Halving, Racing
from hpc_toolkit.errors import ConfigError, near_miss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.bandit.arms import ArmTable
    from hpc_toolkit.bandit.stopping import StopRules

RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (RandomOrder, GpUcb, GpEi, GpTs, OptunaTpe)
}
"""Rules that evaluate an arm on all tasks at once; a new rule goes here or into ``TASK_RULES``."""

TASK_RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Halving, Racing)}
"""Rules that request an arm's tasks in parts."""

ONE_TASK = TaskSet(("task",))
"""The tasks of a search in which an evaluation has one score."""


def make_policy(
    policy: str | Rule,
    arms: ArmTable,
    seed: int,
    *,
    tasks: TaskSet = ONE_TASK,
    scalariser: str = "mean",
    stop: StopRules | None = None,
    **options: Any,
) -> Policy:
    """Create a policy without any results, from its name and options or from a rule.

    An arm is complete when all ``tasks`` were told, in any number of tells. ``scalariser`` turns an
    arm's scores into one reward. ``stop`` are the rules that the policy's method ``stop`` checks.

    Raises ConfigError for an unknown name, scalariser or option, with the nearest known one; for a
    seed that is not a whole number from 0; and for arguments that do not fit together.
    """
    rule = policy if isinstance(policy, Rule) else _made(policy, options)
    if type(seed) is not int or seed < 0:
        message = f"seed is {seed!r}"
        raise ConfigError(message, hint="a whole number, 0 or more")
    if not tasks.names:
        message = "the task set is empty"
        raise ConfigError(message, hint="give at least one task")
    check_scalariser(scalariser, tasks)
    if rule.name == Racing.name and scalariser != "mean":
        message = f"policy {rule.name!r} needs the scalariser 'mean', not {scalariser!r}"
        raise ConfigError(message, hint="use the scalariser 'mean', or another policy")
    return Policy(arms, rule, seed, tasks, scalariser, stop)


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
    initial: Any = getattr(rule_of(name), "__dataclass_fields__", {}).get("initial")
    return {**({"initial": max(initial.default, size)} if initial else {}), **options}


def scale_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a policy for arms whose features are settings of different kinds.

    Unless ``scales`` is given, a rule that has this option fits one for each feature: some settings
    matter more than others. Raises ConfigError for an unknown policy.
    """
    known = getattr(rule_of(name), "__dataclass_fields__", {})
    return {**({"scales": EACH} if "scales" in known else {}), **options}


def rule_of(name: str) -> type[Rule]:
    """Return the rule of a policy. Raises ConfigError with the nearest known name."""
    return look_up("policy", name, {**RULES, **TASK_RULES})
