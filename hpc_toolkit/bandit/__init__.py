"""Ask/tell policies that choose which arm of a finite set to evaluate next, without any I/O."""

from __future__ import annotations

from hpc_toolkit.bandit.arms import Arm, ArmTable
from hpc_toolkit.bandit.asktell import Policy, StopRules, ask_within, make_policy
from hpc_toolkit.bandit.policy import Observation, Pull, Recommendation, TaskSet

__all__ = [
    "Arm",
    "ArmTable",
    "Observation",
    "Policy",
    "Pull",
    "Recommendation",
    "StopRules",
    "TaskSet",
    "ask_within",
    "make_policy",
]
