"""Choose the cluster, and the partition of it that takes a job.

The cluster is chosen by option, by variable, by signs of this machine, or is ``generic``. The
limits of partitions decide which of them takes a job, and explain why the others do not.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from hpc_toolkit.errors import ConfigError, HpcToolkitError, RenderError
from hpc_toolkit.slurm.clusters.facts import Cluster, Origin, load_cluster
from hpc_toolkit.slurm.clusters.files import Layer, cluster_files, read_table
from hpc_toolkit.slurm.clusters.fitting import Excess, Fit, Needs, equipped, exceeded, fit, kinds_of
from hpc_toolkit.slurm.clusters.keys import (
    NODE_KEYS,
    PARTITION_KEYS,
    SHAPE_KEYS,
    Partition,
    identify,
)
from hpc_toolkit.slurm.render.spec import rivals_of

FALLBACK = "generic"
CONFIG_FILES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Files that Slurm's programs read without ``SLURM_CONF``; the second is for configless sites."""

_CLUSTER_NAME = re.compile(
    r"^[ \t]*ClusterName[ \t]*=[ \t]*([\w.-]+)", re.IGNORECASE | re.MULTILINE
)


class Resolved(NamedTuple):
    cluster: Cluster
    notes: tuple[str, ...]
    """Lines for stderr on how it was found."""


def resolve_cluster(option: str | None) -> Resolved:
    """Load the cluster of ``--cluster``, else of ``HPCTK_CLUSTER``, else the recognized one.

    Without any of them it is ``generic``, which states no limits. Runs no program. Raises
    ConfigError if the cluster cannot be loaded, or if two match the same evidence.
    """
    name = option or os.environ.get("HPCTK_CLUSTER")
    notes: list[str] = []
    if not name:
        name, notes = _recognized()
    return Resolved(cluster=load_cluster(name or FALLBACK), notes=tuple(notes))


class _Signs(NamedTuple):
    name: str
    layer: int
    file: str
    signs: dict[str, str]


def _recognized() -> tuple[str, list[str]]:
    """Return the cluster whose ``[identify]`` matches this machine, or "", and notes."""
    clusters, notes = _known_signs()
    evidence: dict[str, Callable[[str], bool]] = {
        # The best evidence first: sbatch submits to the cluster of slurm.conf.
        "slurm_cluster": lambda name: name.lower() == slurm_cluster_name(os.environ),
        "env": lambda text: os.environ.get(text.partition("=")[0]) == text.partition("=")[2],
        "hostname": lambda pattern: fnmatch.fnmatchcase(os.uname().nodename, pattern),
    }
    for sign, holds in evidence.items():
        here = [one for one in clusters if sign in one.signs and holds(one.signs[sign])]
        latest = [one for one in here if one.layer == max(other.layer for other in here)]
        if len(latest) > 1:
            names = " and ".join(one.name for one in latest)
            msg = f"{names} both match this machine, by identify.{sign}"
            raise ConfigError(msg, hint="choose one with --cluster or HPCTK_CLUSTER")
        if latest:
            one = latest[0]
            why = f"{one.file}: identify.{sign} = {one.signs[sign]}"
            return one.name, [*notes, f"cluster {one.name}, recognized by {why}"]
    return "", notes


def _known_signs() -> tuple[list[_Signs], list[str]]:
    found: dict[str, _Signs] = {}
    notes = []
    for one in cluster_files():
        try:
            table = read_table(one).get("identify", {})
            signs = dict(identify(table, f"{one.file}: identify"))
        except HpcToolkitError as error:
            # A broken file of another cluster must not stop a job for this one.
            notes.append(f"passed over: {error.message}")
            continue
        if signs:
            before = found[one.name].signs if one.name in found else {}
            layer = get_args(Layer).index(one.layer)
            found[one.name] = _Signs(one.name, layer, one.file, {**before, **signs})
    return list(found.values()), notes


def slurm_cluster_name(environ: Mapping[str, str]) -> str:
    """Return ClusterName from this machine's slurm.conf in lower case; "" if there is none.

    Files that slurm.conf includes are not read.
    """
    named = environ.get("SLURM_CONF")
    for path in [named] if named else CONFIG_FILES:
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        match = _CLUSTER_NAME.search(text)
        return match[1].lower() if match else ""
    return ""


class _Words(NamedTuple):
    asked: str
    """The option or quantity that violates the limit."""
    reason: str
    """Why a partition refuses; the limit's value follows."""
    way_out: str
    """What to request instead."""
    relation: str = "more than {} has"
    """How the request differs from the limit; ``{}`` is the cluster's name."""


_NOT, _ALLOWED = "not what {} has", "more than {} allows"
_CPUS, _MEMORY, _GPUS = "--ntasks-per-node x --cpus-per-task", "memory per node", "--gpus-per-node"
_UNTYPED = "ambiguous: {} has complete GPUs and parts of them"
_WORDS = {
    "accounts": _Words("--account", "accounts are", "another --account", "not for {}"),
    "denied_accounts": _Words("--account", "it refuses", "another --account", "not for {}"),
    "allowed_qos": _Words("--qos", "QOS are", "another --qos", "not for {}"),
    "denied_qos": _Words("--qos", "it refuses", "another --qos", "not for {}"),
    "constraint": _Words("--sbatch constraint", "features are", "other features", _NOT),
    "gpu_type": _Words("--gpu-type", "its GPUs are", "another type of GPU", _NOT),
    "untyped": _Words(_GPUS, "its GPUs are", "a type of GPU: --gpus-per-node TYPE:N", _UNTYPED),
    "gres": _Words("--sbatch gres", "of this resource a node has at most", "less of it"),
    "nodes": _Words("--nodes", "nodes at most", "fewer nodes"),
    "min_nodes": _Words("--nodes", "nodes at least", "more nodes", "less than {} takes"),
    "gpus": _Words(f"--nodes x {_GPUS}", "GPUs at most", "fewer GPUs", _ALLOWED),
    "cpus": _Words(f"--nodes x {_CPUS}", "CPUs at most", "fewer CPUs", _ALLOWED),
    "gpus_per_node": _Words(_GPUS, "GPUs a node at most", "fewer GPUs a node"),
    "cpus_per_node": _Words(_CPUS, "CPUs a node at most", "fewer CPUs a node"),
    "mem_per_node": _Words(_MEMORY, "memory a node at most", "less memory"),
    "max_cpus_per_node": _Words(_CPUS, "MaxCPUsPerNode", "fewer CPUs a node", _ALLOWED),
    "max_mem_per_node": _Words(_MEMORY, "MaxMemPerNode", "less memory", _ALLOWED),
    "max_mem_per_cpu": _Words(
        *("memory per CPU", "MaxMemPerCPU", "more --cpus-per-task or less memory"), _ALLOWED
    ),
    "max_walltime": _Words("--time", "time at most", "less time"),
}


def choose_partition(cluster: Cluster, needs: Needs) -> str:
    """Return the first unrestricted partition, in the order of the file, that takes the job.

    After the first of the file, partitions whose QOS may refuse the job come last, and those whose
    GPUs it would not use come after others. If none takes it, raises RenderError with the reason
    of each partition.
    """
    free = [one.name for one in cluster.partitions if not one.restricted]
    if not free:
        msg = f"{cluster.written('partitions')}: all partitions are restricted, so none is chosen"
        raise RenderError(msg, hint="name yours with --partition")
    # The first is Slurm's default, unless that is restricted.
    first = cluster.partitions[0].name
    free.sort(key=lambda name: (name != first, *_doubts(named_site(cluster, name), needs)))
    try:
        return first_fit(cluster, free, needs)[0]
    except RenderError as error:
        closed = [one for one in cluster.partitions if one.restricted]
        able = [one for one in closed if not any(exceeded(for_partition(cluster, one), needs))]
        if not able:
            raise
        said = [f"{one.name} accepts it, but is restricted ({one.restricted})" for one in able]
        raise RenderError(error.message, hint="; ".join([error.hint, *said])) from None


def _doubts(site: Cluster, needs: Needs) -> tuple[bool, bool]:
    """Return whether a QOS may refuse the job, and whether the job would leave GPUs unused."""
    # A QOS that the job must name, or whose limits are unknown, may refuse it.
    unnamed = site.allowed_qos and not (needs.qos or site.default_qos)
    unknown = site.partition_qos and site.partition_qos not in {qos.name for qos in site.qos}
    found = fit(site, needs)
    unused = not needs.gpus_per_node and isinstance(found, Fit) and any(k.gpus for k in found.kinds)
    return bool(unnamed or unknown), unused


def fitting_site(cluster: Cluster, names: tuple[str, ...], needs: Needs) -> Cluster:
    """Return the cluster with the limits of the first named partition that takes the job.

    Its kinds of nodes are those that fit; of several named partitions, those of all that take the
    job, because Slurm chooses among them. ``()`` names all partitions. If a cluster lists
    partitions, its own limits bind no job, because a partition may allow more. Returns the cluster
    itself if it lists none, or, unchecked, if one of ``names`` is not listed. Raises RenderError
    if nothing takes the job: Slurm would accept a job beyond its partition's limits and leave it
    pending for ever.
    """
    known = [one.name for one in cluster.partitions]
    if known and not set(known) >= set(names):
        return equipped(cluster, needs) if cluster.kinds else cluster
    first = first_fit(cluster, names, needs)[1]
    sites = [named_site(cluster, name) for name in names] if known else []
    able = [kinds_of(site) for site in sites if not any(exceeded(site, needs))]
    return equipped(replace(first, kinds=sum(able, ())), needs) if len(able) > 1 else first


def first_fit(cluster: Cluster, names: Sequence[str], needs: Needs) -> tuple[str, Cluster]:
    """Return the first partition of these, or of all, that takes the job, and its site."""
    names = names or [one.name for one in cluster.partitions] or [""]
    sites = {name: named_site(cluster, name) for name in names}
    for name, site in sites.items():
        if not any(exceeded(site, needs)):
            return name, equipped(site, needs)
    raise _refusal(cluster, sites, needs)


def named_site(cluster: Cluster, partition: str | None) -> Cluster:
    named = [one for one in cluster.partitions if one.name == partition]
    return for_partition(cluster, named[0]) if named else cluster


def for_partition(cluster: Cluster, partition: Partition) -> Cluster:
    """Return ``cluster`` with the limits and the nodes of one of its partitions.

    Values that the partition does not state stay. ``written`` shows the origin of each value.
    """
    origins = dict(cluster.origins)
    file = origins["partitions"].file if "partitions" in origins else cluster.file
    stated: dict[str, Any] = {}
    for key, (name, _) in PARTITION_KEYS.items():
        value = getattr(partition, name)
        if hasattr(cluster, name) and key not in ("name", "defaults") and value not in (None, ()):
            stated[name] = value
            origins[key] = Origin(file=file, key=f"partitions.{partition.name}.{key}")
    defaults = dict(cluster.defaults)
    for option, value in partition.defaults:
        key = f"defaults.{option}"
        # A variable of the environment is nearer to the user than any file.
        if not (key in origins and origins[key].file.startswith("$")):
            defaults = {one: defaults[one] for one in defaults if one not in rivals_of(option)}
            defaults[option] = value
            origins[key] = Origin(file=file, key=f"partitions.{partition.name}.{key}")
    stated["defaults"] = tuple(defaults.items())
    kinds = {kind.name: kind for kind in cluster.kinds}
    if partition.kinds:
        stated["kinds"] = tuple(replace(kinds[name], nodes=n) for name, n in partition.kinds)
    elif any(NODE_KEYS[key][0] in stated for key in SHAPE_KEYS):
        stated["kinds"] = ()
    return replace(cluster, origins=tuple(origins.items()), **stated)


def _refusal(cluster: Cluster, sites: dict[str, Cluster], needs: Needs) -> RenderError:
    """Build the error for a job that no partition takes, nor a cluster without partitions."""
    excesses = {name: list(exceeded(site, needs)) for name, site in sites.items()}
    first = next(iter(sites))
    for one in excesses[first]:
        if all(one in others for others in excesses.values()):
            return _beyond(sites[first], one, needs)
    source = {key: f" than {where} says" for key, where in needs.sources.items()}
    ways = {
        one.key: f"{_WORDS[one.key].way_out}{source.get(one.key, '')}"
        for found in excesses.values()
        for one in found
    }
    reasons: dict[str, list[str]] = {}
    for name, found in excesses.items():
        reasons.setdefault(_reason(found[0]), []).append(name)
    said = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    msg = f"no partition of {cluster.name} offers {needs} ({cluster.written('partitions')}: {said})"
    hint = f"request {', or '.join(ways.values())}"
    if "max_walltime" in ways:
        hint += "; a job can requeue itself until its work is done"
    return RenderError(msg, hint=hint)


def _beyond(site: Cluster, one: Excess, needs: Needs) -> RenderError:
    """Build the error for a limit that the job violates in the same way in all partitions."""
    words = _WORDS[one.key]
    source = f" ({needs.sources[one.key]})" if one.key in needs.sources else ""
    relation = words.relation.format(site.name)
    msg = f"{words.asked}{source}: {one.wanted} is {relation}"
    if one.place:
        msg += f" ({site.written(one.place)}: {_reason(one)})"
    else:
        msg += f" ({site.written(one.key)} = {one.limit})"
    hint = f"request {words.way_out}, or correct the cluster file"
    return RenderError(msg, hint=hint)


def _reason(one: Excess) -> str:
    return f"{_WORDS[one.key].reason} {one.limit}"
