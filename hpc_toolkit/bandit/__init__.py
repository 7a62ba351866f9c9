"""Which arm to evaluate next: ask/tell policies over a finite set of arms. No input or output."""

from __future__ import annotations

from hpc_toolkit.bandit.arms import Arm, ArmTable
from hpc_toolkit.bandit.policy import Observation, Policy, Proposal, Recommendation
from hpc_toolkit.bandit.pulls import Pull, TaskSet
from hpc_toolkit.bandit.registry import make_policy
from hpc_toolkit.bandit.stopping import StopRules

__all__ = [
    "Arm",
    "ArmTable",
    "Observation",
    "Policy",
    "Proposal",
    "Pull",
    "Recommendation",
    "StopRules",
    "TaskSet",
    "make_policy",
]
