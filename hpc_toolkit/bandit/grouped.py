"""Group pulls: choosing an arm also chooses all other arms of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.bandit.policy import Proposal

if TYPE_CHECKING:
    from hpc_toolkit.bandit.history import History, Rule


def choose_groups(rule: Rule, history: History, n: int) -> list[Proposal]:
    """Choose at most ``n`` arms, one group after another.

    This is for evaluations in which the arms of a group share most of the work, such as the layers
    of one checkpoint. The next group is the group of the arm that ``rule`` would choose: its best
    member has the highest acquisition. That arm comes first, then the others in the table's order.
    A group with an arm that was asked for is finished before another group begins, so an ask may
    end inside a group and the next ask continues there.
    """
    found: list[Proposal] = []
    members, groups = history.table.members, history.table.groups
    while len(found) < n:
        group, first = _begun(history), None
        if group is None:
            chosen = rule.choose(history, 1)
            if not chosen:
                break
            first = chosen[0]
            group = groups[history.table.index(first.arm)]
        free = [arm for arm in members[group] if arm not in history.taken]
        rest = [history.table.ids[arm] for arm in free]
        if first is not None:
            found.append(first)
            rest.remove(first.arm)
        found += [Proposal(arm, None, f"in the group {group}") for arm in rest]
        history = history.with_pending(free)
    return found[:n]


def _begun(history: History) -> str | None:
    """Return the first group in which some arms are taken and some are not."""
    for group, members in history.table.members.items():
        taken = sum(arm in history.taken for arm in members)
        if 0 < taken < len(members):
            return group
    return None
