"""The outcome of a simulated run: how long it took, and how the workers spent their time."""

from __future__ import annotations

from dataclasses import dataclass


class Ledger:
    """Counts the work of all workers as it happens."""

    def __init__(self, items: int) -> None:
        self.left = set(range(items))
        """Items without a result."""
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
    """Workers that were killed."""
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
