"""What a script asks Slurm for: a request, completed from a cluster's facts, and held to them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import HpcToolkitError, RenderError
from hpc_toolkit.quantities import (
    HOUR_S,
    format_mem,
    format_walltime,
    parse_mem_mib,
    parse_walltime,
)
from hpc_toolkit.scriptspec import ScriptSpec, check_environment

if TYPE_CHECKING:
    from hpc_toolkit.clusters import Cluster

Directive = tuple[str, str | None]
"""A long option of sbatch without its dashes, and its value; None for an option without one."""

FALLBACK_TIME = "1:00:00"
FALLBACK_SIGNAL_S = 300
"""How long before the time limit the ranks start to drain, where the limit is an hour or more."""

_MEMORY = ("mem", "mem_per_cpu", "mem_per_gpu")


def complete(spec: ScriptSpec, cluster: Cluster) -> ScriptSpec:
    """``spec`` with every value that the script needs, and which ``cluster`` can give.

    Precedence: the request, the cluster's defaults, shares of the cluster's node.
    Raises RenderError for a request beyond a limit, naming the limit and its file.
    """
    check_environment(cluster.modules, cluster.setup, cluster.env, where=f"{cluster.file}: ")
    full = _with_defaults(spec, cluster)
    full = replace(full, ntasks_per_node=full.ntasks_per_node or full.gpus_per_node or 1)
    full = replace(full, cpus_per_task=full.cpus_per_task or _cpus_share(full, cluster))
    if not any(getattr(full, name) for name in _MEMORY):
        full = replace(full, **_memory_share(full, cluster))
    full = replace(full, time=format_walltime(parse_walltime(full.time or FALLBACK_TIME)))
    full = replace(full, signal=full.signal or _signal(_time_s(full)))
    _check_request(full, cluster)
    _check_limits(full, cluster)
    _check_partitions(full, cluster)
    return full


def directives(full: ScriptSpec, cluster: Cluster) -> list[Directive]:
    """The ``#SBATCH`` options of a complete request, in the order in which a script shows them."""
    options: list[tuple[str, object]] = [
        ("job-name", full.job_name),
        ("comment", full.comment),
        ("account", full.account),
        ("partition", full.partition),
        ("qos", full.qos),
        ("reservation", full.reservation),
        ("constraint", full.constraint),
        ("nodelist", full.nodelist),
        ("exclude", full.exclude),
        ("nodes", full.nodes),
        ("ntasks-per-node", full.ntasks_per_node),
        *_gpu_directives(full, cluster),
        ("cpus-per-task", full.cpus_per_task),
        *((name.replace("_", "-"), getattr(full, name)) for name in _MEMORY),
        ("exclusive", full.exclusive),
        ("time", full.time),
        ("signal", full.signal),
        # A site may set JobRequeue to either, so the script always says which.
        ("requeue" if full.requeue else "no-requeue", True),
        # A lost node costs the items that its ranks held, not the other nodes' work.
        ("no-kill", True),
        # A requeued job would otherwise empty the log of its first attempt.
        ("open-mode", "append"),
        ("output", full.output),
        ("mail-type", full.mail_type),
        ("mail-user", full.mail_user),
    ]
    return [
        (name, None if value is True else str(value))
        for name, value in options
        if value is not None and value is not False
    ]


def _with_defaults(spec: ScriptSpec, cluster: Cluster) -> ScriptSpec:
    has_memory = any(getattr(spec, name) for name in _MEMORY)
    missing: dict[str, Any] = {
        name: value
        for name, value in cluster.defaults
        if getattr(spec, name) is None and not (has_memory and name in _MEMORY)
    }
    try:
        return replace(spec, **missing)
    except HpcToolkitError as error:
        msg = f"{cluster.written('defaults')}: {error.message}"
        raise RenderError(msg, hint=error.hint) from None


def _cpus_share(full: ScriptSpec, cluster: Cluster) -> int:
    ranks = full.ntasks_per_node or 1
    if not (cluster.cpus_per_node and cluster.gpus_per_node and full.gpus_per_node):
        return 1
    return max(1, cluster.cpus_per_node * full.gpus_per_node // cluster.gpus_per_node // ranks)


def _memory_share(full: ScriptSpec, cluster: Cluster) -> dict[str, Any]:
    """The memory that belongs to the requested part of a node, in the form that the site wants."""
    total, cpus, gpus = cluster.mem_per_node_mib, cluster.cpus_per_node, cluster.gpus_per_node
    if total is None or cluster.mem_style == "none":
        return {}
    if gpus and full.gpus_per_node:
        per_node, per_gpu = total * full.gpus_per_node // gpus, total // gpus
    elif cpus:
        per_node, per_gpu = total * _cpus(full) // cpus, None
    else:
        return {}
    if cluster.mem_style == "mem-per-gpu" and per_gpu:
        return {"mem_per_gpu": format_mem(per_gpu)}
    if cluster.mem_style == "mem":
        return {"mem": format_mem(max(1, per_node))}
    return {"mem_per_cpu": format_mem(max(1, per_node // _cpus(full)))}


def _signal(time_s: int) -> str:
    return f"B:USR1@{FALLBACK_SIGNAL_S if time_s >= HOUR_S else max(1, time_s // 10)}"


def _gpu_directives(full: ScriptSpec, cluster: Cluster) -> list[tuple[str, object]]:
    gpus, kind = full.gpus_per_node, f"{cluster.gpu_type}:" if cluster.gpu_type else ""
    if not gpus:
        return []
    if cluster.gpu_request == "gres":
        return [("gres", f"gpu:{kind}{gpus}")]
    if cluster.gpu_request == "gpus-per-node":
        return [("gpus-per-node", f"{kind}{gpus}")]
    ranks = full.ntasks_per_node or 1
    if gpus % ranks:
        msg = f"--gpus-per-node: {gpus} GPUs cannot be shared evenly by {ranks} ranks"
        raise RenderError(msg, hint=f"{cluster.written('gpu_request')} asks for GPUs per task")
    return [("gpus-per-task", f"{kind}{gpus // ranks}")]


def _cpus(full: ScriptSpec) -> int:
    return (full.ntasks_per_node or 1) * (full.cpus_per_task or 1)


def _time_s(full: ScriptSpec) -> int:
    return parse_walltime(full.time or FALLBACK_TIME)


def _memory_mib(full: ScriptSpec) -> int:
    """Memory of one node that the request comes to, in MiB; 0 for all of it."""
    if full.mem_per_cpu:
        return parse_mem_mib(full.mem_per_cpu) * _cpus(full)
    if full.mem_per_gpu:
        return parse_mem_mib(full.mem_per_gpu) * full.gpus_per_node
    return parse_mem_mib(full.mem or "0", zero=True)


def _check_request(full: ScriptSpec, cluster: Cluster) -> None:
    if cluster.account_required and not full.account:
        written = cluster.written("account_required")
        msg = f"--account: {cluster.name} takes no job without one ({written} = true)"
        raise RenderError(msg, hint=f"--account {cluster.account_hint or 'NAME'}")
    if full.mem_per_gpu and not full.gpus_per_node:
        msg = "--mem-per-gpu: the job asks for no GPU"
        raise RenderError(msg, hint="use --mem or --mem-per-cpu, or --gpus-per-node")
    warning_s = int((full.signal or "@0").rpartition("@")[2])
    if warning_s >= _time_s(full):
        msg = f"--signal: {warning_s} s before the end do not fit into --time {full.time}"
        raise RenderError(msg, hint="warn later, or ask for more time")


def _check_limits(full: ScriptSpec, cluster: Cluster) -> None:
    cpus = "--ntasks-per-node x --cpus-per-task"
    for label, key, wanted, limit, shown in (
        ("--nodes", "nodes", full.nodes, cluster.nodes, str),
        ("--gpus-per-node", "gpus_per_node", full.gpus_per_node, cluster.gpus_per_node, str),
        (cpus, "cpus_per_node", _cpus(full), cluster.cpus_per_node, str),
        (
            "memory per node",
            "mem_per_node",
            _memory_mib(full),
            cluster.mem_per_node_mib,
            format_mem,
        ),
        ("--time", "max_walltime", _time_s(full), cluster.max_walltime_s, format_walltime),
    ):
        if limit is not None and wanted > limit:
            msg = (
                f"{label}: {shown(wanted)} is more than {cluster.name} has"
                f" ({cluster.written(key)} = {shown(limit)})"
            )
            hint = f"ask for at most {shown(limit)}, or correct the file where it is wrong"
            raise RenderError(msg, hint=hint)


def _check_partitions(full: ScriptSpec, cluster: Cluster) -> None:
    # A job beyond its partition's limits is no error for Slurm: it stays pending for ever.
    names = full.partition.split(",") if full.partition else None
    known = {partition.name for partition in cluster.partitions}
    if not known or (names is not None and not known.issuperset(names)):
        return
    of_job = [p for p in cluster.partitions if names is None or p.name in names]
    long_enough = [p for p in of_job if p.max_walltime_s >= _time_s(full)]
    if any(p.nodes is None or p.nodes >= full.nodes for p in long_enough):
        return
    limits = ", ".join(
        f"{p.name} {format_walltime(p.max_walltime_s)}"
        + (f" on {p.nodes} nodes" if p.nodes else "")
        for p in of_job
    )
    msg = (
        f"no partition of {cluster.name} gives {full.nodes} nodes for {full.time}"
        f" ({cluster.written('partitions')}: {limits})"
    )
    raise RenderError(
        msg, hint="ask for less time and let the job requeue itself, or for fewer nodes"
    )
