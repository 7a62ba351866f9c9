"""Compare what a job needs with the limits and the kinds of nodes of a cluster or partition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from hpc_toolkit.slurm.clusters import NodeKind, format_count, has_features, is_slice, read_gres
from hpc_toolkit.system.quantities import counted, format_mem, format_walltime
from hpc_toolkit.system.tomltable import MAX_COUNT

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.clusters.keys import Qos

KINDS = "kinds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The nodes, the resources per node and the time that a job requests."""

    nodes: int
    gpus_per_node: int
    cpus: int
    """CPUs of each node, at least."""
    mem_mib: int
    """Memory of each node in MiB, at least; 0 for all of it, or if the job does not say."""
    time_s: int
    mem_per_cpu_mib: int = 0
    """Memory for each CPU in MiB; 0 if the CPUs or the memory are still open."""
    gpu_type: str | None = None
    """The type that the GPUs must have; None for any complete GPU."""
    constraint: str = ""
    """Features that the nodes must have, as sbatch reads them."""
    gres: str = ""
    """Other generic resources of each node, as sbatch reads them."""
    account: str | None = None
    qos: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    """Origins of the values that the user did not give, by the keys of their limits."""

    def __str__(self) -> str:
        kind = self.gpu_type or ("GPU" if self.gpus_per_node == 1 else "GPUs")
        gpus = f" with {self.gpus_per_node} {kind}" if self.gpus_per_node else ""
        return f"{counted(self.nodes, 'node')}{gpus} for {format_walltime(self.time_s)}"


class Excess(NamedTuple):
    """A limit that a job violates, by its key in a cluster file; the other two are values."""

    key: str
    wanted: str
    limit: str
    place: str = ""
    """The key of the kinds of nodes, or of the QOS, from which the limit follows."""


def exceeded(site: Cluster, needs: Needs) -> Iterator[Excess]:
    """Yield the limits that a job violates; ``site`` may be a partition from ``for_partition``.

    A limit that the site does not state is not checked.
    """
    name = needs.qos or site.default_qos
    for key, word, listed, taken in (
        ("accounts", needs.account, site.accounts, True),
        ("denied_accounts", needs.account, site.denied_accounts, False),
        ("allowed_qos", name, site.allowed_qos, True),
        ("denied_qos", name, site.denied_qos, False),
    ):
        if word and listed and (word.lower() in map(str.lower, listed)) is not taken:
            yield Excess(key, word, ", ".join(listed))
    limits = limiting_qos(site, needs.qos)
    yield from _beyond_qos(limits, needs)
    if any(qos.overrides_partition for qos in limits):
        site = replace(site, nodes=None, min_nodes=None, max_walltime_s=None)
    if site.max_mem_per_cpu_mib and not needs.mem_per_cpu_mib:
        # A script requests as many CPUs as its memory needs.
        each = -(-needs.mem_mib // (site.max_mem_per_cpu_mib * (needs.cpus or 1)))
        needs = replace(needs, cpus=needs.cpus * max(1, each))
    if needs.nodes < (site.min_nodes or 1):
        yield Excess("min_nodes", str(needs.nodes), str(site.min_nodes))
    for key, wanted, limit, shown in (
        ("nodes", needs.nodes, site.nodes, str),
        ("max_cpus_per_node", needs.cpus, site.max_cpus_per_node, str),
        ("max_mem_per_node", needs.mem_mib, site.max_mem_per_node_mib, format_mem),
        ("max_mem_per_cpu", needs.mem_per_cpu_mib, site.max_mem_per_cpu_mib, format_mem),
    ):
        if limit is not None and wanted > limit:
            yield Excess(key, shown(wanted), shown(limit))
    found = fit(site, needs)
    if isinstance(found, Excess):
        yield found
    if site.max_walltime_s is not None and needs.time_s > site.max_walltime_s:
        limit_s = format_walltime(site.max_walltime_s)
        yield Excess("max_walltime", format_walltime(needs.time_s), limit_s)


def limiting_qos(site: Cluster, asked: str | None) -> list[Qos]:
    """Return the QOS whose limits bind a job: that of the partition first, unless the job's QOS
    overrides it, then that of the job."""
    known = {qos.name.lower(): qos for qos in site.qos}
    names = [(one or "").lower() for one in (site.partition_qos, asked or site.default_qos)]
    found = [known[one] for one in names if one in known]
    return found[::-1] if found and found[-1].overrides_partition_qos else found


def _beyond_qos(limits: list[Qos], needs: Needs) -> Iterator[Excess]:
    gpu_type = (needs.gpu_type or "").lower()
    gpus = [dict(one.gpu_types).get(gpu_type, one.gpus) for one in limits]
    for key, wanted, limit, shown in (
        ("max_walltime", needs.time_s, [one.max_walltime_s for one in limits], format_walltime),
        ("nodes", needs.nodes, [one.nodes for one in limits], str),
        ("gpus", needs.nodes * needs.gpus_per_node, gpus, str),
        ("cpus", needs.nodes * needs.cpus, [one.cpus for one in limits], str),
    ):
        for qos, most in zip(limits, limit, strict=True):
            if most is not None:
                if wanted > most:
                    yield Excess(key, shown(wanted), shown(most), f"qos.{qos.name}")
                break


def kinds_of(site: Cluster) -> tuple[NodeKind, ...]:
    """Return the kinds of a site's nodes; without ``kinds``, the one that its own keys describe."""
    if site.kinds:
        return site.kinds
    number, gpu_type = site.gpus_per_node, site.gpu_type
    known = number is not None or gpu_type
    gpus = ((gpu_type or "", number),) if known and number != 0 else None if number is None else ()
    return (NodeKind(cpus=site.cpus_per_node, mem_mib=site.mem_per_node_mib, gpus=gpus),)


class Fit(NamedTuple):
    kinds: tuple[NodeKind, ...]
    """Kinds whose nodes can serve a job."""
    gpu_type: str | None
    """The type of GPUs to request; None if Slurm may give any."""


def fit(site: Cluster, needs: Needs) -> Fit | Excess:
    """Return the kinds whose nodes can serve the job, or what they lack."""
    given = (needs.gpu_type or "").lower()
    spelled = [one for one in _types(site) if one.lower() == given]
    if given and spelled and needs.gpu_type not in spelled:
        needs = replace(needs, gpu_type=spelled[0])
    kinds = kinds_of(site)
    if needs.constraint:
        known = frozenset(feature for kind in kinds for feature in kind.features)
        kinds = tuple(kind for kind in kinds if has_features(needs.constraint, kind, known))
        if not kinds:
            return Excess("constraint", needs.constraint, ", ".join(sorted(known)), KINDS)
    gres = read_gres(needs.gres)
    resources = [(f"{name}:{kind}".rstrip(":"), "gres", number) for name, kind, number in gres]
    if needs.gpus_per_node:
        gpu = f"gpu:{needs.gpu_type}" if needs.gpu_type else "gpu"
        resources.insert(0, (gpu, "gpus_per_node", needs.gpus_per_node))
    resources += [("cpus", "cpus_per_node", needs.cpus), ("mem", "mem_per_node", needs.mem_mib)]
    reachable = kinds
    for resource, key, number in resources:
        most = max(kind.amount(resource) or 0 for kind in kinds)
        able = _able(kinds, resource, number)
        # A generic resource that no kind lists may be on any node.
        if not able and (most or key != "gres"):
            return _lacking(site, needs, key, number, most)
        kinds = able or kinds
        if key != "gpus_per_node":
            reachable = _able(reachable, resource, number) or reachable
    if short := _short(needs, kinds):
        return short
    if needs.gpus_per_node and not needs.gpu_type:
        return _with_type(needs, kinds, reachable)
    # CPU jobs take the share of nodes without GPUs, if these nodes are enough.
    plain = tuple(kind for kind in kinds if not kind.gpus)
    enough = not needs.gpus_per_node and not _short(needs, plain)
    return Fit(plain if enough else kinds, needs.gpu_type)


def _able(kinds: tuple[NodeKind, ...], resource: str, number: int) -> tuple[NodeKind, ...]:
    return tuple(one for one in kinds if (has := one.amount(resource)) is None or has >= number)


def _with_type(
    needs: Needs, kinds: tuple[NodeKind, ...], reachable: tuple[NodeKind, ...]
) -> Fit | Excess:
    """Choose the type of a request without one, if only one type fits, or if Slurm might give
    it a part of a GPU or mix the types of a node. Slurm chooses among the ``reachable`` kinds."""
    number = needs.gpus_per_node
    types = list(dict.fromkeys(one for kind in kinds for one in kind.complete_gpus(number)))
    unsafe = any(
        any(is_slice(one) for one, _ in kind.gpus or ())
        or (number > 1 and len(kind.gpus or ()) > 1)
        for kind in reachable
        if sum(number if n is None else n for _, n in kind.gpus or ()) >= number
    )
    if not unsafe and len(types) > 1:
        return Fit(kinds, None)
    if unsafe and types == [""]:
        named = dict.fromkeys(one for kind in reachable for one, _ in kind.gpus or () if one)
        return Excess("untyped", str(number), ", ".join(named), KINDS)
    able = {one: tuple(k for k in kinds if one in k.complete_gpus(number)) for one in types if one}
    for one, own in able.items():
        if not _short(needs, own):
            return Fit(own, one)
    most = max(able.values(), key=_total, default=())
    return (_short(needs, most) if able else None) or Fit(kinds, None)


def _short(needs: Needs, kinds: tuple[NodeKind, ...]) -> Excess | None:
    """Return what these kinds lack if their nodes are too few."""
    if _total(kinds) >= needs.nodes:
        return None
    limit = f"{_total(kinds)} ({', '.join(kind.name for kind in kinds)})"
    return Excess("nodes", str(needs.nodes), limit, KINDS)


def _total(kinds: tuple[NodeKind, ...]) -> int:
    """Return the number of nodes of all kinds; very many if one is unknown."""
    return sum(MAX_COUNT if kind.nodes is None else kind.nodes for kind in kinds)


def _lacking(site: Cluster, needs: Needs, key: str, number: int, most: int) -> Excess:
    place = KINDS if site.kinds else ""
    types = dict.fromkeys(one or "without a type" for one in _types(site))
    if key == "gpus_per_node" and not most and types:
        if needs.gpu_type:
            return Excess("gpu_type", needs.gpu_type, ", ".join(types), place)
        return Excess(key, str(number), f"0; name the type of a part: {', '.join(types)}", place)
    shown = {"mem_per_node": format_mem, "gres": format_count}.get(key, str)
    return Excess(key, shown(number), shown(most), place)


def equipped(site: Cluster, needs: Needs) -> Cluster:
    """Return the site with the kinds of nodes that fit, and with what all of them have.

    ``gpu_type`` is the type to request. A site on which the job does not fit is a partition that
    the file does not list, of whose nodes nothing is known.
    """
    found = fit(site, needs)
    if isinstance(found, Excess):
        return replace(site, kinds=())
    kinds, gpu_type = found
    if not site.kinds:
        return replace(site, kinds=kinds, gpu_type=gpu_type or site.gpu_type)
    cpus = [kind.cpus for kind in kinds if kind.cpus]
    memory = [kind.mem_mib for kind in kinds if kind.mem_mib]
    gpus = [sum(n or 0 for _, n in kind.gpus) for kind in kinds if kind.gpus]
    return replace(
        site,
        kinds=kinds,
        gpu_type=gpu_type,
        gpus_per_node=min(gpus, default=0),
        cpus_per_node=min(cpus, default=None),
        mem_per_node_mib=min(memory, default=None),
    )


def with_gpus(site: Cluster, number: int | None) -> Cluster:
    """Return the site with the kinds of nodes that have ``number`` GPUs, else the most GPUs.

    Only complete GPUs count. Without a number it gets its first kind with GPUs. A site without
    ``kinds`` is returned as it is.
    """
    if not site.kinds:
        return site
    totals = {kind: kind.amount("gpu") or 0 for kind in site.kinds}
    if number is None:
        kinds = [kind for kind, total in totals.items() if total][:1] or site.kinds[:1]
    else:
        most = min(number, max(totals.values()))
        kinds = [kind for kind, total in totals.items() if total >= most]
    gpus = min(totals[kind] for kind in kinds)
    needs = Needs(nodes=1, gpus_per_node=0, cpus=0, mem_mib=0, time_s=0)
    return replace(equipped(replace(site, kinds=tuple(kinds)), needs), gpus_per_node=gpus)


def number_of_nodes(site: Cluster) -> int | None:
    """Return how many nodes one job can get there at most; None if that is unknown."""
    numbers = [kind.nodes for kind in site.kinds]
    total = None if None in numbers else sum(n or 0 for n in numbers)
    return least(site.nodes, total)


def _types(site: Cluster) -> list[str]:
    return [one for kind in kinds_of(site) for one, _ in kind.gpus or ()]


def least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number), default=None)
