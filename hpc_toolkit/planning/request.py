"""The request of a submission: its nodes, jobs and cost, without looking at a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpc_toolkit.planning.choices import Node, price_of
from hpc_toolkit.planning.page import number
from hpc_toolkit.slurm.clusters.partitions import Needs, named_site
from hpc_toolkit.slurm.render.directives import complete, cpus, memory_mib, ranks
from hpc_toolkit.slurm.render.grammar import parse_array
from hpc_toolkit.system.quantities import HOUR_S, counted

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.render.spec import ScriptSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one submission requests from Slurm."""

    needs: Needs
    """Of each job."""
    node: Node
    most_s: int | None
    """The cluster's longest job."""
    most_nodes: int | None
    """The most nodes of one job there."""
    jobs: int = 1
    """Number of jobs; of an array, its elements."""
    at_once: int = 1
    """How many of these jobs may run at the same time."""
    array: bool = False

    @property
    def nodes(self) -> int:
        """Nodes that work at once."""
        return self.needs.nodes * self.at_once

    @property
    def in_a_row(self) -> int:
        """How often all of these nodes work for the complete time limit, one job after another."""
        return max(1, self.jobs // self.at_once)

    @property
    def workers(self) -> int:
        return self.nodes * self.node.workers


def ask_of(spec: ScriptSpec, cluster: Cluster, *, jobs: int = 1, chain: bool = False) -> Ask:
    # Its indices may be more than one array can have; 'hpctk submit' sends several arrays then.
    full = complete(replace(spec, array=None), cluster)
    site = named_site(cluster, full.partition)
    gpus = full.gpus_per_node
    # Slurm starts jobs of one name one after another.
    at_once = 1 if chain or "singleton" in (spec.dependency or "") else jobs
    if spec.array is not None:
        array = parse_array(spec.array, "--array")
        jobs = len({index for part in array.ranges for index in part})
        at_once = min(jobs, int(array.at_once or jobs))
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
        at_once=at_once,
        array=spec.array is not None,
    )


def asked_line(ask: Ask) -> str:
    """Return the request of a submission, with its cost if all of the time is used."""
    each = f"each of {ask.jobs} jobs asks" if ask.jobs > 1 else "asks"
    if ask.array:
        some = f" ({ask.at_once} at once)" if ask.at_once < ask.jobs else ""
        each = f"each of {counted(ask.jobs, 'job')} of the array{some} asks"
    hours = ask.needs.nodes * ask.needs.time_s / HOUR_S
    together = f"; together {costs(ask, hours * ask.jobs)}" if ask.jobs > 1 else ""
    return f"{each} for {ask.needs}: up to {costs(ask, hours)}{together}"


def costs(ask: Ask, node_hours: float) -> str:
    """Return node-hours or GPU-hours, with their price if it is known."""
    gpus, price = ask.node.gpus, ask.node.price_per_hour
    text = f"{number(node_hours * (gpus or 1))} {'GPU' if gpus else 'node'}-hours"
    return text if price is None else f"{text}, {number(node_hours * price)} {ask.node.currency}"
