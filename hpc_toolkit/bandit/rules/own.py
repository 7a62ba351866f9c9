"""A user's own policy: a class with the methods ``tell`` and ``ask``."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hpc_toolkit.bandit.policy import Proposal
from hpc_toolkit.bandit.rule import Rule
from hpc_toolkit.errors import ConfigError, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpc_toolkit.bandit.arms import Arm
    from hpc_toolkit.bandit.rule import History


class OwnPolicy(Protocol):
    """What a user writes; the constructor takes the arms, a seed and the policy's options.

    For every ask hpctk creates a new object with copies of the arms, and calls ``tell`` with each
    result so far, in the order of the arms. Equal arguments and results must lead to equal asks:
    draw random numbers from the seed only.
    """

    def __init__(self, arms: Sequence[Arm], seed: int, **options: Any) -> None: ...

    def tell(self, arm: str, reward: float | None) -> None:
        """Take the reward of an arm, higher is better; None: its evaluation failed."""
        ...

    def ask(self, pending: Sequence[str]) -> str | None:
        """Return the id of the next arm, which has no result and is not ``pending``. None: wait, or
        stop if no arm is pending. Called once for each arm of a round; ``pending`` contains the
        arms of the round before it."""
        ...


@dataclass(frozen=True, slots=True)
class OwnRule(Rule):
    """Picks arms with a user's class."""

    name: ClassVar[str] = "own"
    called: str = ""
    """``module:Class``."""
    make: Callable[..., OwnPolicy] = field(default=OwnPolicy)
    options: dict[str, Any] = field(default_factory=dict)

    def choose(self, history: History, n: int) -> list[Proposal]:
        table, ids = history.table, history.table.ids
        try:
            policy = self.make(copy.deepcopy(table.arms), history.seed, **self.options)
            told = dict.fromkeys(history.failed) | dict(
                zip(history.scored, history.rewards.tolist(), strict=True)
            )
            for index in sorted(told):
                policy.tell(ids[index], told[index])
            pending = [ids[index] for index in history.pending]
            known = set(ids)
            asked: list[Proposal] = []
            while len(asked) < n and (arm := policy.ask(pending)) is not None:
                if arm not in known:
                    message = f"policy {self.called!r} requested {str(arm)[:80]!r}, an unknown arm"
                    raise ConfigError(message, hint="return the id of an arm, or None")
                if table.index(arm) in told or arm in pending:
                    message = f"policy {self.called!r} asked again for arm {arm!r}"
                    hint = "request arms without a result that are not pending"
                    raise ConfigError(message, hint=hint)
                asked.append(Proposal(arm, None, "own policy"))
                pending = [*pending, arm]
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            message = f"policy {self.called!r} failed: {describe(error)}"
            raise ConfigError(message, hint="docs/how-to/policies.md has an example") from error
        return asked
