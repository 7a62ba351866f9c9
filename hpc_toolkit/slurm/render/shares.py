"""Compute the resources that a request takes on one node, and its proportional share of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.render.spec import ScriptSpec


def ranks(full: ScriptSpec) -> int:
    """Return the number of ranks per node; the largest if they cannot be spread evenly."""
    if full.ntasks_per_node or full.ntasks is None:
        return full.ntasks_per_node or 1
    return -(-full.ntasks // full.nodes)


def cpus_of_rank(full: ScriptSpec) -> int:
    if full.cpus_per_gpu:
        return max(1, full.cpus_per_gpu * full.gpus_per_node // ranks(full))
    return full.cpus_per_task or 1


def cpus(full: ScriptSpec) -> int:
    if full.cpus_per_gpu:
        return full.cpus_per_gpu * full.gpus_per_node
    return ranks(full) * (full.cpus_per_task or 1)


def memory_mib(full: ScriptSpec) -> int:
    """Return the memory that the request takes on each node, in MiB; 0 for all of it."""
    if full.mem_per_cpu:
        return full.mem_per_cpu * cpus(full)
    if full.mem_per_gpu:
        return full.mem_per_gpu * full.gpus_per_node
    return full.mem or 0


def cpus_share(full: ScriptSpec, site: Cluster) -> int:
    """Return the CPUs per rank in proportion to the requested GPUs of a node, at least 1."""
    if not (site.cpus_per_node and site.gpus_per_node and full.gpus_per_node):
        return 1
    return max(1, site.cpus_per_node * full.gpus_per_node // site.gpus_per_node // ranks(full))


def memory_share(full: ScriptSpec, site: Cluster) -> dict[str, Any]:
    """Return the memory field in proportion to the requested part of a node, in the site's form."""
    total, node_cpus, gpus = site.mem_per_node_mib, site.cpus_per_node, site.gpus_per_node
    if total is None or site.mem_style == "none":
        return {}
    if gpus and full.gpus_per_node:
        per_node, per_gpu = total * full.gpus_per_node // gpus, total // gpus
    elif node_cpus:
        per_node, per_gpu = total * cpus(full) // node_cpus, None
    else:
        return {}
    if site.mem_style == "mem-per-gpu" and per_gpu:
        return {"mem_per_gpu": per_gpu}
    if site.mem_style == "mem":
        return {"mem": max(1, per_node)}
    return {"mem_per_cpu": max(1, per_node // cpus(full))}
