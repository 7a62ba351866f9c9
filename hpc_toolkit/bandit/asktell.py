"""The bookkeeping that all policies share: tells, pending arms, the best arm, the saved state."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_toolkit.bandit.history import TIE_DECIMALS, History
from hpc_toolkit.bandit.policy import Observation, Recommendation
from hpc_toolkit.bandit.reward import Reward, mean_reward
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpc_toolkit.bandit.arms import ArmTable
    from hpc_toolkit.bandit.history import Rule
    from hpc_toolkit.bandit.policy import Proposal

TIE_STDERRS = 2.0
"""Arms within this many combined standard errors of the best are ties."""


class AskTell:
    """A ``Policy`` that remembers the tells and lets a rule pick the arms."""

    def __init__(self, arms: ArmTable, rule: Rule, seed: int) -> None:
        self._arms = arms
        self._rule = rule
        self._seed = seed
        self._tells: dict[int, Observation] = {}

    @property
    def name(self) -> str:
        return self._rule.name

    def ask(self, n: int, pending: Sequence[str] = ()) -> list[Proposal]:
        if n < 0:
            message = f"asked for {n} arms"
            raise ConfigError(message, hint="ask for 0 or more")
        return self._rule.choose(self._history(pending), n)

    def tell(self, observation: Observation) -> None:
        index = self._arms.index(observation.arm)
        known = self._tells.setdefault(index, observation)
        if known != observation:
            message = f"arm {observation.arm!r} was told before with another result"
            raise ConfigError(message, hint="what a policy was told stays; tell an arm once")

    def best(self) -> Recommendation | None:
        rewards = self._rewards()
        if not rewards:
            return None
        order = sorted(rewards, key=lambda i: (-round(rewards[i].mean, TIE_DECIMALS), i))
        top = order[0]
        ties = [i for i in order[1:] if _is_tie(rewards[top], rewards[i])]
        return Recommendation(
            arm=self._arms.ids[top],
            mean=rewards[top].mean,
            stderr=rewards[top].stderr,
            ties=tuple(self._arms.ids[i] for i in ties),
            failed=self._tells[top].failed,
        )

    def state_dict(self) -> dict[str, Any]:
        tells = [self._tells[index].to_json() for index in sorted(self._tells)]
        return {**self._identity(), "tells": tells}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                message = f"the saved state has {key} {state.get(key)!r}, this policy {mine!r}"
                raise ConfigError(message, hint="make the policy as it was when it was saved")
        if not isinstance(state.get("tells"), list):
            message = "the saved state has no list of tells"
            raise ConfigError(message, hint="expected the value of state_dict()")
        # Built apart, so that a bad tell leaves this policy as it was.
        loaded = AskTell(self._arms, self._rule, self._seed)
        for record in state["tells"]:
            loaded.tell(Observation.from_json(record))
        self._tells = loaded._tells

    def _identity(self) -> dict[str, Any]:
        return {
            "policy": self.name,
            "seed": self._seed,
            "options": asdict(self._rule),
            "arms": self._arms.digest,
        }

    def _rewards(self) -> dict[int, Reward]:
        found = ((index, mean_reward(self._tells[index])) for index in sorted(self._tells))
        return {index: reward for index, reward in found if reward is not None}

    def _history(self, pending: Sequence[str]) -> History:
        rewards = self._rewards()
        waiting = {self._arms.index(arm) for arm in pending} - self._tells.keys()
        return History(
            table=self._arms,
            seed=self._seed,
            scored=tuple(rewards),
            rewards=np.array([reward.mean for reward in rewards.values()], dtype=np.float64),
            failed=tuple(sorted(self._tells.keys() - rewards.keys())),
            pending=tuple(sorted(waiting)),
        )


def _is_tie(best: Reward, other: Reward) -> bool:
    noise = math.hypot(best.stderr or 0.0, other.stderr or 0.0)
    difference = round(best.mean - other.mean, TIE_DECIMALS)
    return difference <= TIE_STDERRS * noise
