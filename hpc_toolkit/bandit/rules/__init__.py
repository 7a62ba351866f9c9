"""The rules by their names in ``make_policy``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.bandit.rules.baselines import LastLayer, RandomOrder
from hpc_toolkit.bandit.rules.epsilon import EpsilonGreedy
from hpc_toolkit.bandit.rules.gaussian_ts import GaussianTs
from hpc_toolkit.bandit.rules.gp_ei import GpEi
from hpc_toolkit.bandit.rules.gp_ts import GpTs
from hpc_toolkit.bandit.rules.gp_ucb import GpUcb
from hpc_toolkit.bandit.rules.linear import LinTs, LinUcb
from hpc_toolkit.bandit.rules.optuna_tpe import OptunaTpe
from hpc_toolkit.bandit.rules.toptwo import TopTwo
from hpc_toolkit.bandit.rules.ucb1 import Ucb1

if TYPE_CHECKING:
    from hpc_toolkit.bandit.history import Rule

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
