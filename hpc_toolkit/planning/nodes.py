"""Nodes as a job gets them, and what a submission requests and costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.queue.left import pending_needs
from hpc_toolkit.queue.wants import may_need
from hpc_toolkit.slurm.clusters.choice import fitting_site, named_site
from hpc_toolkit.slurm.clusters.fitting import Needs, kinds_of, number_of_nodes, with_gpus
from hpc_toolkit.system.binding import equal_part
from hpc_toolkit.system.quantities import HOUR_S, counted, format_mem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.render.spec import ScriptSpec

_MUCH_MIB = 256 * 1024
"""Memory of a node that many sites do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node as a job gets it. None means unknown."""

    gpus: int
    cpus: int | None
    mem_mib: int | None
    workers: int
    per_task: int = 1
    """Workers that divide the resources of one task."""
    spans: int = 1
    """Nodes on which the items of the job's only task may start steps."""
    why: str
    price_per_hour: float | None
    """Price of the node with its GPUs."""
    currency: str

    @classmethod
    def of(cls, site: Cluster, gpus: int, workers: int, why: str) -> Node:
        """Return a node of a cluster with some of its GPUs, or all if it is billed as a whole."""
        if site.whole_nodes:
            every = [sum(n or 0 for _, n in kind.gpus or ()) for kind in kinds_of(site)]
            gpus, why = max(gpus, *every), f"{why}; complete nodes are billed"
        node, gpu = site.price_per_node_hour, site.price_per_gpu_hour
        known = node is not None or (gpu is not None and gpus)
        return cls(
            gpus=gpus,
            cpus=site.cpus_per_node,
            mem_mib=site.mem_per_node_mib,
            workers=workers,
            why=why,
            price_per_hour=(node or 0.0) + (gpu or 0.0) * gpus if known else None,
            currency=site.currency,
        )


def site_for(
    cluster: Cluster,
    partition: str | None,
    *,
    nodes: int,
    gpus: int | None,
    gpu_type: str | None,
    time_s: int | None = None,
) -> Cluster:
    """Return the cluster as a job sees it: the facts and the prices of its partition, and the kinds
    of nodes that the request fits.

    ``partition`` may name several; None is the first that takes the job. Raises ConfigError for a
    partition that the file does not list, and RenderError for a request beyond its limits.
    """
    names = tuple(partition.split(",")) if partition else ()
    known = [one.name for one in cluster.partitions]
    if unknown := [one for one in names if one not in known]:
        message = f"--partition: {cluster.name} lists no partition {unknown[0]}"
        hint = near_miss(unknown[0], known) if known else f"describe it in {cluster.file}"
        raise ConfigError(message, hint=hint)
    first = named_site(cluster, names[0] if names else None)
    each = gpus if gpus is not None else with_gpus(first, None).gpus_per_node or 0
    needs = Needs(
        nodes=nodes, gpus_per_node=each, cpus=1, mem_mib=0, time_s=time_s or 0, gpu_type=gpu_type
    )
    site = fitting_site(cluster, names, needs)
    # Facts without kinds stay so: they may leave the number of GPUs open.
    return replace(site, kinds=site.kinds if first.kinds else (), partitions=())


def node_of(cluster: Cluster, *, gpus: int | None = None, workers: int | None = None) -> Node:
    """Return a node of a cluster, or of a partition given as a cluster of its own.

    ``gpus`` are those to use on each node, by default all, and ``workers`` those to start, by
    default one for each GPU, else CPU. If every partition with these GPUs gives complete nodes, all
    GPUs of a node are billed. Raises ConfigError if a node has fewer GPUs.
    """
    site = with_gpus(cluster, gpus)
    most = site.gpus_per_node
    if gpus is not None and most is not None and gpus > most:
        message = f"--gpus-per-node: {gpus} is more than {site.name} has"
        key = "kinds" if site.kinds else "gpus_per_node"
        raise ConfigError(message, hint=f"{site.written(key)} = {most}")
    count = gpus if gpus is not None else most or 0
    sites = [named_site(cluster, one.name) for one in cluster.partitions if not one.restricted]
    able = [one for one in sites if any((k.amount("gpu") or 0) >= count for k in kinds_of(one))]
    if able and all(one.whole_nodes for one in able):
        site = replace(site, whole_nodes=True)
    if workers is not None:
        return Node.of(site, count, workers, "as requested")
    each = counted(count, "GPU") if count else counted(site.cpus_per_node or 1, "CPU")
    if not count and site.cpus_per_node is None:
        return Node.of(site, 0, 1, "nothing is known of the node; see --workers-per-node")
    return Node.of(site, count, count or site.cpus_per_node or 1, f"one for each of {each}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one submission requests from Slurm, without a look at a run."""

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
    remarks: tuple[str, ...] = ()
    """What else a user should know about the request."""

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
        return self.nodes // self.node.spans * self.node.workers


def ask_of(spec: ScriptSpec, cluster: Cluster, *, jobs: int = 1) -> Ask:
    from hpc_toolkit.slurm.render.directives import complete, cpus, memory_mib, site_of
    from hpc_toolkit.slurm.render.values import parse_array

    full = complete(spec, cluster)
    site, fitting = named_site(cluster, full.partition), site_of(full, cluster)
    gpus = full.gpus_per_node
    if full.exclusive is True:
        fitting = replace(fitting, whole_nodes=True)
    # Slurm starts jobs of one name one after another.
    at_once = 1 if "singleton" in (spec.dependency or "") else jobs
    if spec.array is not None:
        array = parse_array(spec.array, "--array")
        jobs = len(array.indices)
        at_once = min(jobs, int(array.at_once or jobs))
    needs = Needs(
        nodes=full.nodes,
        gpus_per_node=gpus,
        cpus=cpus(full),
        mem_mib=memory_mib(full),
        time_s=full.time or 0,
        gpu_type=full.gpu_type,
    )
    node = Node.of(fitting, gpus, 1, "as the script says")
    return Ask(
        needs=needs,
        node=_granted(node, full, needs),
        most_s=site.max_walltime_s,
        most_nodes=number_of_nodes(fitting) if site.kinds else site.nodes,
        jobs=jobs,
        at_once=at_once,
        array=spec.array is not None,
        remarks=tuple(_remarks(spec, full, cluster, fitting)),
    )


def _granted(node: Node, full: ScriptSpec, needs: Needs) -> Node:
    """The node with what a job gets of it, and the workers that the script starts there."""
    from hpc_toolkit.slurm.render.directives import ranks

    per_task = full.workers_per_task or 1
    # Ranks have what their job requests, and not what the node has.
    node = replace(node, cpus=needs.cpus, mem_mib=needs.mem_mib or node.mem_mib)
    if full.one_rank:
        return replace(node, workers=per_task, per_task=per_task, spans=full.nodes)
    return replace(node, workers=ranks(full) * per_task, per_task=per_task)


def _remarks(
    spec: ScriptSpec, full: ScriptSpec, cluster: Cluster, fitting: Cluster
) -> Iterator[str]:
    from hpc_toolkit.slurm.render.directives import memory_mib
    from hpc_toolkit.slurm.render.spec import MEMORY_OPTIONS

    site, listed = named_site(cluster, full.partition), {one.name for one in cluster.partitions}
    if listed and full.partition and (others := set(full.partition.split(",")) - listed):
        yield f"not checked: {cluster.name} lists no partition {', '.join(sorted(others))}"
    if len(site.kinds) > 1:
        nodes = (" ".join(filter(None, (str(k.nodes or ""), k.name))) for k in fitting.kinds)
        yield f"nodes that fit: {', '.join(nodes)}"
    if fitting.whole_nodes:
        yield "complete nodes are billed"
    assumed = [f"defaults.{key}" for key, _ in site.defaults if key in MEMORY_OPTIONS]
    given = any(getattr(spec, name) is not None for name in MEMORY_OPTIONS)
    if assumed and not given and not fitting.mem_per_node_mib and memory_mib(full) > _MUCH_MIB:
        said = f"{format_mem(memory_mib(full))} of memory on each node ({site.written(assumed[0])})"
        yield f"{said}; --mem SIZE or --mem none changes that"


def asked_line(ask: Ask) -> str:
    """Return the request of a submission, with its cost if all of the time is used."""
    each = f"each of {ask.jobs} jobs requests" if ask.jobs > 1 else "requests"
    if ask.array:
        some = f" ({ask.at_once} at once)" if ask.at_once < ask.jobs else ""
        each = f"each of {counted(ask.jobs, 'job')} of the array{some} requests"
    hours = ask.needs.nodes * ask.needs.time_s / HOUR_S
    together = f"; together {costs(ask, hours * ask.jobs)}" if ask.jobs > 1 else ""
    remarks = "".join(f"; {remark}" for remark in ask.remarks)
    return f"{each} {ask.needs}: up to {costs(ask, hours)}{together}{remarks}"


def unmet_by(node: Node, time_s: float | None, view: RunView) -> list[str]:
    """Return warnings of stages whose items no worker of jobs of ``time_s`` could hold.

    What is not known of a node, free names and features are left out.
    """
    if any(may_need(stage.spec) for stage in view.stages.values()):
        view.poll()
    found = []
    for name, stage in view.stages.items():
        wanted = [one.needs for one in pending_needs(stage)] or [stage.spec.needs or {}]
        some = "some of " * (len(wanted) > 1)
        each = () if stage.complete else filter(None, (lacks(node, time_s, w) for w in wanted))
        found += [f"stage {name}: {some}its items {why}" for why in each]
    return found


def lacks(node: Node, time_s: float | None, needs: Mapping[str, Any]) -> str:
    """Why no worker of such a job holds items with these needs; "" if one may."""
    from hpc_toolkit.system.needs import unmet  # few runs have needs

    has = [_has(node, worker, time_s) for worker in range(node.per_task)[:2]]
    why = unmet({key: one for key, one in needs.items() if key in has[0]}, has)
    return why.replace("no worker", "no worker of this job")


def _has(node: Node, worker: int, time_s: float | None) -> dict[str, Any]:
    """What one worker of a task has; other than the second, the first has the remainders too."""
    each = {"gpus": node.gpus, "cpus": node.cpus, "memory": node.mem_mib and node.mem_mib << 20}
    tasks = node.workers // node.per_task
    task = {key: one / tasks for key, one in each.items() if one is not None}
    has = {"nodes": 1 if worker else node.spans, **task}
    for key in ("gpus", "cpus") if node.per_task > 1 else ():
        if key in task:
            has[key] = equal_part(int(task[key]), node.per_task, worker)
    if "memory" in task and node.per_task > 1:  # each CPU brings an equal part
        part = has["cpus"] / task["cpus"] if task.get("cpus") else 1 / node.per_task
        has["memory"] = task["memory"] * part
    return {**has, "time": math.inf if time_s is None else time_s}


def costs(ask: Ask, node_hours: float) -> str:
    """Return node-hours or GPU-hours, with their price if it is known."""
    gpus, price = ask.node.gpus, ask.node.price_per_hour
    text = f"{number(node_hours * (gpus or 1))} {'GPU' if gpus else 'node'}-hours"
    return text if price is None else f"{text}, {number(node_hours * price)} {ask.node.currency}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
