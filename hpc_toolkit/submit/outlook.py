"""Say what a job asks for, what that costs, and how it fits what is left of its run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.planning.choices import SURE, Node, choose, price_of
from hpc_toolkit.planning.page import counted, number, span
from hpc_toolkit.slurm.clusters.partitions import Needs, named_site
from hpc_toolkit.slurm.render.directives import complete, cpus, memory_mib, ranks
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.quantities import HOUR_S, format_duration, format_walltime

if TYPE_CHECKING:
    from hpc_toolkit.planning.choices import Choice
    from hpc_toolkit.planning.forecast import Forecaster
    from hpc_toolkit.run import Run
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.render.spec import ScriptSpec

_MANY = 10_000
"""With more items left, fewer draws: otherwise 'hpctk submit' would take seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one submission asks of Slurm."""

    needs: Needs
    """Of each job."""
    node: Node
    most_s: int | None
    """The cluster's longest job."""
    most_nodes: int | None
    """The most nodes of one job there."""
    jobs: int = 1
    chain: bool = False
    """Whether its jobs run one after another, instead of at once."""
    array: bool = False

    @property
    def nodes(self) -> int:
        """Nodes that work at once."""
        return self.needs.nodes * (1 if self.chain else self.jobs)


def ask_of(spec: ScriptSpec, cluster: Cluster, *, jobs: int = 1, chain: bool = False) -> Ask:
    # Its indices may be more than one array can have; 'hpctk submit' sends several arrays then.
    full = complete(replace(spec, array=None), cluster)
    site = named_site(cluster, full.partition)
    gpus = full.gpus_per_node
    return Ask(
        needs=Needs(
            nodes=full.nodes,
            gpus_per_node=gpus,
            cpus=cpus(full),
            mem_mib=memory_mib(full),
            time_s=full.time or 0,
            gpu_type=full.gpu_type or (site.gpu_type if gpus else None),
        ),
        node=Node(
            gpus=gpus,
            cpus=site.cpus_per_node,
            mem_mib=site.mem_per_node_mib,
            workers=ranks(full),
            why="as the script says",
            price_per_hour=price_of(site, gpus),
            watts=None,
            currency=site.currency,
        ),
        most_s=site.max_walltime_s,
        most_nodes=site.nodes,
        jobs=jobs,
        # Slurm starts jobs of one name one after another.
        chain=chain or "singleton" in (spec.dependency or ""),
        array=spec.array is not None,
    )


def asked_line(ask: Ask) -> str:
    """Return the request of a submission, with its cost if all of the time is used."""
    each = "each job of the array asks" if ask.array else "asks"
    each = f"each of {ask.jobs} jobs asks" if ask.jobs > 1 else each
    hours = ask.needs.nodes * ask.needs.time_s / HOUR_S
    return f"{each} for {ask.needs}: up to {_costs(ask, hours)}"


def _costs(ask: Ask, node_hours: float) -> str:
    gpus, price = ask.node.gpus, ask.node.price_per_hour
    text = f"{number(node_hours * (gpus or 1))} {'GPU' if gpus else 'node'}-hours"
    return text if price is None else f"{text}, {number(node_hours * price)} {ask.node.currency}"


def left_lines(run: Run, ask: Ask) -> tuple[list[str], list[str]]:
    """Return what is left of the run as a forecast on the nodes of ``ask``, and warnings.

    There is no forecast before the first result. ``run`` has one list of items.
    """
    forecaster, left = _forecaster(run)
    said, warnings = [], []
    if forecaster is not None:
        choice = choose(forecaster, ask.node, ask.nodes, limit_s=ask.needs.time_s)
        took = format_duration(choice.forecast.time_s.median)
        running = run.status(forecast=False).workers.alive
        are = "is" if left == 1 else "are"
        said.append(
            f"{counted(left, 'item')} {are} left: {took} ({span(choice.forecast.time_s)}) on"
            f" {counted(choice.forecast.workers)}, {_costs(ask, choice.node_hours.median)}"
            + f"; the {counted(running)} running now will shorten that"
            * bool(running)
        )
        if not 1 <= choice.in_a_row <= (ask.jobs if ask.chain else 1):
            warnings.append(_too_short(forecaster, ask, choice))
    warnings += _idle(run, ask)
    return said, warnings


def _too_short(forecaster: Forecaster, ask: Ask, choice: Choice) -> str:
    limit = format_walltime(ask.needs.time_s)
    if not choice.in_a_row:
        longest = format_duration(forecaster.longest_s)
        return f"{limit} is probably too short for the longest item, which may take {longest}"
    enough_s = choose(forecaster, ask.node, ask.nodes).ask_s
    if ask.most_s is not None and enough_s > ask.most_s:
        return f"{limit} is too short for all items; {choice.in_a_row} jobs in a row are enough"
    return f"{limit} is too short for all items; --time {format_walltime(enough_s)} is enough"


def _idle(run: Run, ask: Ask) -> list[str]:
    """Return a warning if at least one node would find no unit; the list is not open for more."""
    from hpc_toolkit.results.status import living_workers  # a program of its own has no run

    view = run.view
    if not all(stage.log.sealed for stage in view.stages.values()):
        return []
    alive = living_workers(view, SystemClock())
    units = sum(
        stage.holders([name]).isdisjoint(alive)
        for stage in view.stages.values()
        for name in stage.state.open
    )
    useful = max(1, math.ceil(units / ask.node.workers))
    if useful >= ask.nodes:
        return []
    workers = counted(ask.nodes * ask.node.workers)
    enough = f"{counted(useful, 'node')} {'is' if useful == 1 else 'are'} enough"
    return [f"nodes will be idle: {counted(units, 'unit')} for {workers}; {enough}"]


def _forecaster(run: Run) -> tuple[Forecaster | None, int]:
    """Return the forecaster of a run, None before the first result; and the items left."""
    counts = run.status(forecast=False).stages.values()
    if not any(one.done for one in counts):
        return None, sum(one.left for one in counts)
    # Only here, because numpy costs more than the rest of 'hpctk submit'.
    from hpc_toolkit.planning.forecast import DRAWS, Forecaster
    from hpc_toolkit.planning.reading import read_work

    work = read_work(run.view, SystemClock(), given=str(run.root))
    known = work.left and all(stage.seen for stage in work.stages)
    draws = DRAWS if work.left <= _MANY else DRAWS // 4
    return Forecaster(work, draws=draws) if known else None, work.left


def sized(run: Run, ask: Ask, within_s: float) -> tuple[int, int]:
    """Return the fewest nodes that are likely to finish a run within a time, and a time limit.

    Raises ConfigError: nothing was measured, or no number of nodes is likely to finish in time.
    """
    forecaster, left = _forecaster(run)
    if forecaster is None:
        message = f"--size-for: no item of {run.root} has a result, so durations are unknown"
        hint = "run some items first, for example in a short job; or choose --nodes and --time"
        raise ConfigError(message, hint=hint)
    able: dict[int, Choice] = {}

    def is_able(nodes: int) -> bool:
        able[nodes] = choose(forecaster, ask.node, nodes, limit_s=ask.most_s, within_s=within_s)
        return bool(able[nodes].in_a_row) and (able[nodes].forecast.within or 0.0) >= SURE

    most = math.ceil(sum(len(s.state.open) for s in run.view.stages.values()) / ask.node.workers)
    most = max(1, min(most, ask.most_nodes or most))
    if not is_able(most):
        took = format_duration(able[most].forecast.time_s.high)
        message = f"--size-for {format_duration(within_s)}: {counted(left, 'item')} are left, and"
        message += f" {counted(most, 'node')} may take {took}"
        raise ConfigError(message, hint="no more nodes can be used: give it more time")
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_able(middle) else (middle, high)
    return high, able[high].ask_s
