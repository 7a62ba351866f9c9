"""A campaign's coordinator on a virtual clock: it adds a segment, awaits its results, and goes on.

It uses the queue's own log and follower. There is no policy, which would take its time as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpc_toolkit.queue.items import encode_segment
from hpc_toolkit.queue.view import Follower, RunView
from simulation.worker import STAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simulation.worker import Site


@dataclass(slots=True)
class Step:
    """What happened in one step, in seconds after the start."""

    added_s: float
    """When the coordinator began to add its items."""
    claimed_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    seen_s: float = 0.0
    """When the coordinator had seen all results."""


class SimulatedCoordinator:
    """The coordinator from its start to its last result; :meth:`life` runs it."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._view = RunView(site.paths, site.manifest)
        self._follower = Follower(self._view, local=False)

    def life(self) -> Iterator[float]:
        """Yield the times at which the coordinator continues."""
        site, scenario, stage = self._site, self._site.scenario, self._view.stages[STAGE]
        stage.log.hold_head()
        for entry in range(1, scenario.steps + 1):
            yield site.clock.now  # others see what follows after the reads before it, not earlier
            step = Step(site.clock.now)
            site.outcome.steps.append(step)
            segment = encode_segment(
                scenario.items(),
                group_by=scenario.group_by,
                unit_size=scenario.unit_size,
                kinds=scenario.kinds,
            )
            assert stage.log.add_segment(segment)
            units = stage.log.segments[entry].units
            names = {unit.name for unit in units}
            site.units.update((unit.name, unit) for unit in units)
            while True:
                pause_s = self._follower.look(stage, names, site.clock.now - step.added_s)
                if stage.state.open.isdisjoint(names):
                    break
                yield site.clock.now + pause_s
            step.seen_s = site.clock.now
        stage.log.seal()
