"""The work of a simulated cluster, and the kills and preemptions that it goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.leases import DEFAULT_LEASE_S
from hpc_toolkit.queue.units import MAX_UNIT

if TYPE_CHECKING:
    from hpc_toolkit.queue.items import Item


@dataclass(frozen=True, slots=True)
class Group:
    """Items that share a context, and how long each step takes, in seconds."""

    items: int
    """Number of items, at least 1."""
    load_s: float
    """Time to load the context."""
    forward_s: float
    """Extra time of the first item after each load."""
    item_s: float
    """Time of one item."""
    items_s: tuple[float, ...] = ()
    """Time of each item, if they differ; ``item_s`` is then ignored."""
    kinds: tuple[str, ...] = ()
    """Kind of each item, if items of one kind take about as long in every group."""

    def seconds_of(self, item: int) -> float:
        """Return the time of one of the group's items."""
        return self.items_s[item] if self.items_s else self.item_s

    @property
    def seconds(self) -> float:
        """Time of the group if one worker runs it without interruption."""
        items_s = sum(self.items_s) if self.items_s else self.items * self.item_s
        return self.load_s + self.forward_s + items_s


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL of one worker."""

    at_s: float
    """Seconds after the start."""
    place: int
    """Slot of the worker, from 0; if the slot is empty, the next occupied slot in order."""
    back_s: float | None = None
    """Seconds until another worker starts in the slot; None: not before the job restarts."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """SIGTERM to all workers of the job, which restarts later."""

    at_s: float
    """Seconds after the start; no effect while the job is not running."""
    requeue_s: float
    """Seconds from the end of the last worker until all start again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulated run. Equal scenarios have equal outcomes."""

    groups: tuple[Group, ...]
    """The groups, in the order in which their items are listed."""
    workers: int
    """Slots of the cluster, each with one worker while the job runs."""
    workers_per_host: int = 4
    """Workers that share a kernel, and therefore see by a free lock that another has died."""
    kills: tuple[Kill, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    lease_s: float = DEFAULT_LEASE_S
    grace_s: float = 25.0
    """Seconds that the running step may still take after SIGTERM."""
    unit_size: int = MAX_UNIT
    """Most items of a unit."""
    tick_s: float = 1.0
    """Seconds between a worker's wake-ups while a step runs. Larger values make long simulations
    faster, but workers notice deaths and take over later."""
    seed: int = 0
    """Part of the workers' names, from which their random choices follow."""

    def __post_init__(self) -> None:
        counts = {"workers": self.workers, "workers per host": self.workers_per_host}
        counts |= {f"items of group {n}": group.items for n, group in enumerate(self.groups)}
        for what, number in counts.items():
            if number < 1:
                message = f"the number of {what} is {number}"
                raise ConfigError(message, hint="give at least 1")
        if not self.groups:
            message = "a simulation needs at least one group of items"
            raise ConfigError(message, hint="give the number of items of each group")
        for n, group in enumerate(self.groups):
            if not {len(group.items_s), len(group.kinds)} <= {0, group.items}:
                message = f"group {n} has {group.items} items, and not as many lengths or kinds"
                raise ConfigError(message, hint="give one for each item, or none")
        if min(min(g.load_s, g.forward_s, g.item_s, *g.items_s) for g in self.groups) < 0:
            message = "a step of the simulated work has a negative length"
            raise ConfigError(message, hint="give seconds, 0 or more")

    @property
    def useful_s(self) -> float:
        """Worker seconds that any schedule needs: each context once, each item once."""
        return sum(group.seconds for group in self.groups)

    @property
    def bound_s(self) -> float:
        """Lower bound on the makespan: nothing runs twice, and no worker is idle or dead."""
        return self.useful_s / self.workers

    @property
    def kinds(self) -> list[str] | None:
        """Kind of each item; None if a group has no kinds."""
        known = all(group.kinds for group in self.groups)
        return [kind for group in self.groups for kind in group.kinds] if known else None

    def items(self) -> list[Item]:
        """Return the items in their order."""
        return [
            {"group": number, "item": item}
            for number, group in enumerate(self.groups)
            for item in range(group.items)
        ]
