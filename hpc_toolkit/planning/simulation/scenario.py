"""A simulated run: its work, the kills and preemptions that it goes through, and its outcome."""

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
    forward_s: float
    """Extra time of the first item after each load."""
    item_s: float
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


class Ledger:
    """Counts the work of all workers as it happens."""

    def __init__(self, items: int) -> None:
        self.left = set(range(items))
        self.executions = 0
        """Items that ran to their end, repeated ones included."""
        self.loads = 0
        self.repeated_s = 0.0
        self.redone_s = 0.0
        self._prepared: set[tuple[str, int]] = set()

    def prepared(self, step: str, group: int, seconds: float) -> None:
        """Record that a context was loaded (``load``), or its forward pass made (``forward``)."""
        self.loads += step == "load"
        if (step, group) in self._prepared:
            self.repeated_s += seconds
        self._prepared.add((step, group))

    def ended(self, item: int, seconds: float) -> None:
        """Record that an item ran to its end."""
        self.executions += 1
        if item not in self.left:
            self.redone_s += seconds
        self.left.discard(item)

    def given_up(self, item: int) -> None:
        """Record that an item failed for good."""
        self.left.discard(item)

    def cut(self, seconds: float) -> None:
        """Record that a step was cut short after this many seconds."""
        self.redone_s += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one simulation. Times are seconds, sums are worker seconds."""

    workers: int
    items: int
    groups: int
    makespan_s: float
    """From the start to the last result."""
    bound_s: float
    """:attr:`hpc_toolkit.planning.simulation.scenario.Scenario.bound_s`."""
    left: int
    """Items without a result because no worker was left; 0 otherwise."""
    executions: int
    """Items that ran to their end, repeated ones included."""
    loads: int
    """Contexts that were loaded, repeated ones included."""
    repeated_s: float
    """Waste: loads and forward passes beyond one per group."""
    redone_s: float
    """Waste: items run a second time, and steps that a death or a preemption cut short."""
    dead_s: float
    """Waste: slots without a worker."""
    waiting_s: float
    """Waste: idle workers that found work again."""
    tail_s: float
    """Waste: idle workers at the end."""
    deaths: int
    takeovers_s: tuple[float, ...]
    """For every unit of a killed worker, the seconds until another worker had it."""

    @property
    def ratio(self) -> float:
        """Makespan over the lower bound."""
        return self.makespan_s / self.bound_s

    @property
    def shares(self) -> dict[str, float]:
        """Each kind of waste as a share of all worker seconds until the makespan."""
        total = self.workers * self.makespan_s
        kinds = {
            "repeated loads": self.repeated_s,
            "redone work": self.redone_s,
            "dead": self.dead_s,
            "waiting": self.waiting_s,
            "idle at the end": self.tail_s,
        }
        return {name: seconds / total for name, seconds in kinds.items()}
