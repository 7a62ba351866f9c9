"""The rules by their names in ``make_policy``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.bandit.rules.baselines import LastLayer, RandomOrder
from hpc_toolkit.bandit.rules.gp import GpEi, GpTs, GpUcb, TopTwo
from hpc_toolkit.bandit.rules.groups import EpsilonGreedy, GaussianTs, Ucb1
from hpc_toolkit.bandit.rules.linear import LinTs, LinUcb
from hpc_toolkit.bandit.rules.optuna_tpe import OptunaTpe

if TYPE_CHECKING:
    from hpc_toolkit.bandit.rule import Rule

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        RandomOrder,
        LastLayer,
        Ucb1,
        EpsilonGreedy,
        GaussianTs,
        LinUcb,
        LinTs,
        GpUcb,
        GpEi,
        GpTs,
        TopTwo,
        OptunaTpe,
    )
}
"""To add a policy, write a module with its rule and add the rule here."""
