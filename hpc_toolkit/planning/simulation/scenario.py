"""What a simulated cluster has to do, and what befalls it."""

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
    """Loading the context."""
    forward_s: float
    """What the first item costs after each load, beside its own time."""
    item_s: float
    """One item."""
    items_s: tuple[float, ...] = ()
    """Each item, where they differ; ``item_s`` is not read then."""
    kinds: tuple[str, ...] = ()
    """What each item is, where items of one kind take about as long in every group."""

    def seconds_of(self, item: int) -> float:
        """One of the group's items."""
        return self.items_s[item] if self.items_s else self.item_s

    @property
    def seconds(self) -> float:
        """The group done by one worker at a stretch."""
        items_s = sum(self.items_s) if self.items_s else self.items * self.item_s
        return self.load_s + self.forward_s + items_s


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL of one worker."""

    at_s: float
    """Seconds after the start."""
    place: int
    """Which of the cluster's places, from 0; where nobody is there, the next one in order."""
    back_s: float | None = None
    """Seconds until another worker stands there; None: not before the job starts again."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """SIGTERM to all workers of the job, which starts again later."""

    at_s: float
    """Seconds after the start; without effect while the job does not run."""
    requeue_s: float
    """From the end of the last worker until all start again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulated run. Equal scenarios have equal outcomes."""

    groups: tuple[Group, ...]
    """In the order in which their items are listed."""
    workers: int
    """Places of the cluster, each with one worker while the job runs."""
    workers_per_host: int = 4
    """Workers that share a kernel, and so see each other's death by a free lock."""
    kills: tuple[Kill, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    lease_s: float = DEFAULT_LEASE_S
    grace_s: float = 25.0
    """Seconds that the running step may still take after SIGTERM."""
    unit_size: int = MAX_UNIT
    """Most items of a unit."""
    tick_s: float = 1.0
    """How often a worker looks around while a step runs; more makes long simulations quicker, and
    deaths and takeovers later."""
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
        """Worker seconds that no schedule can save: each context once, each item once."""
        return sum(group.seconds for group in self.groups)

    @property
    def bound_s(self) -> float:
        """No schedule is faster: nothing twice, nobody idle, nobody dead."""
        return self.useful_s / self.workers

    @property
    def kinds(self) -> list[str] | None:
        """What each item is; None where a group does not tell."""
        known = all(group.kinds for group in self.groups)
        return [kind for group in self.groups for kind in group.kinds] if known else None

    def items(self) -> list[Item]:
        """The items in their order."""
        return [
            {"group": number, "item": item}
            for number, group in enumerate(self.groups)
            for item in range(group.items)
        ]
