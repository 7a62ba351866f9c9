"""A simulated run: its work, the kills and preemptions that it goes through, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpc_toolkit.queue.units import MAX_UNIT

if TYPE_CHECKING:
    from hpc_toolkit.queue.items import Item
    from simulation.coordinator import Step


@dataclass(frozen=True, slots=True)
class Group:
    """Items that share a context, and how long each step takes, in seconds."""

    items_s: tuple[float, ...]
    """Time of each item; there is at least one."""
    load_s: float = 0.0
    forward_s: float = 0.0
    """Extra time of the first item after each load."""
    kinds: tuple[str, ...] = ()
    """Kind of each item, if items of one kind take about as long in every group."""

    @property
    def seconds(self) -> float:
        """Time of the group if one worker runs it without interruption."""
        return self.load_s + self.forward_s + sum(self.items_s)


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
    grace_s: float = 25.0
    """Seconds that the running step may still take after SIGTERM."""
    group_by: str | None = "group"
    """The key of an item that names its group; None: the queue knows of no groups."""
    unit_size: int = MAX_UNIT
    tick_s: float = 1.0
    """Seconds between a worker's wake-ups while a step runs. Larger values make long simulations
    faster, but workers notice deaths and take over later."""
    steps: int = 0
    """How often a coordinator adds all items, each time when it has seen the results of the last
    time; 0: they are there at the start, once, and there is no coordinator."""
    seed: int = 0
    """Part of the workers' names, from which their random choices follow."""

    @property
    def hosts(self) -> int:
        return -(-self.workers // self.workers_per_host)

    @property
    def bound_s(self) -> float:
        """Lower bound on the makespan: nothing runs twice, and no worker is idle or dead."""
        times = max(1, self.steps)
        return times * sum(group.seconds for group in self.groups) / self.workers

    @property
    def kinds(self) -> list[str] | None:
        """Kind of each item; None if a group has no kinds."""
        known = all(group.kinds for group in self.groups)
        return [kind for group in self.groups for kind in group.kinds] if known else None

    @property
    def places(self) -> list[tuple[int, int]]:
        """For each item in order, its group and its index in the group."""
        return [(n, i) for n, group in enumerate(self.groups) for i in range(len(group.items_s))]

    def items(self) -> list[Item]:
        """Return the items in their order."""
        return [{"group": group, "item": item} for group, item in self.places]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What happened in one simulation, counted while it runs.

    Times are seconds; sums are worker seconds.
    """

    scenario: Scenario
    left: set[int]
    """Items without a result; some are left at the end only if every worker died."""
    makespan_s: float = 0.0
    """From the start to the last result."""
    executions: int = 0
    """Items that ran to their end, repeated ones included."""
    loads: int = 0
    """Contexts that were loaded, repeated ones included."""
    repeated_s: float = 0.0
    """Waste: loads and forward passes beyond one per group."""
    redone_s: float = 0.0
    """Waste: items run a second time, and steps that a death or a preemption cut short."""
    dead_s: float = 0.0
    """Waste: slots without a worker."""
    waiting_s: float = 0.0
    """Waste: idle workers that found work again."""
    tail_s: float = 0.0
    """Waste: idle workers at the end."""
    killed: dict[str, float] = field(default_factory=dict)
    """When each killed worker died."""
    takeovers_s: list[float] = field(default_factory=list)
    """For every unit of a killed worker, the seconds until another worker had it."""
    steps: list[Step] = field(default_factory=list)
    """What the coordinator waited for."""
    _prepared: set[tuple[str, int]] = field(default_factory=set, repr=False)

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

    @property
    def ratio(self) -> float:
        """Makespan over the lower bound."""
        return self.makespan_s / self.scenario.bound_s

    @property
    def shares(self) -> dict[str, float]:
        """Each kind of waste as a share of all worker seconds until the makespan."""
        total = self.scenario.workers * self.makespan_s
        kinds = {
            "repeated loads": self.repeated_s,
            "redone work": self.redone_s,
            "dead": self.dead_s,
            "waiting": self.waiting_s,
            "idle at the end": self.tail_s,
        }
        return {name: seconds / total for name, seconds in kinds.items()}
