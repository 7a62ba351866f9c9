"""Draft a cluster file from what Slurm shows of its partitions and nodes.

The draft has comments on facts that Slurm does not know. A person must review it: Slurm knows
nothing about modules, networks and site rules.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.client import ask
from hpc_toolkit.slurm.clusters.facts import parse_cluster
from hpc_toolkit.slurm.clusters.files import SUFFIX
from hpc_toolkit.slurm.clusters.keys import PARTITION_NAME
from hpc_toolkit.slurm.controller import slurm_config
from hpc_toolkit.slurm.records import parse_records
from hpc_toolkit.system.quantities import (
    HOUR_S,
    counted,
    format_mem,
    format_walltime,
    parse_walltime,
)

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping

_ANSWER_S = 60.0
"""Seconds for an answer: ten thousand nodes are ten megabytes of text."""

_EVERYBODY = {
    "AllowAccounts": "ALL",
    "AllowGroups": "ALL",
    "AllowQos": "ALL",
    "AllocNodes": "ALL",
    "ReqResv": "NO",
    "DenyAccounts": "",
    "DenyQos": "",
}
"""Settings of a partition that all users may use, from any host and without a reservation."""

_ASK = """
# What Slurm does not know: ask your site, and remove the '#' of what holds there. What each key
# means: hpctk cluster schema.
# forbidden_submit_dirs = ["~"]
# login_shell = true
# modules = []
# conda_base = "/opt/conda"
# container_runtime = "apptainer"
"""
_ASK_NETWORK = """
# [nccl]
# NCCL_SOCKET_IFNAME = "ib0"
"""
_NO_ACCOUNTING = "accounting_storage/none"


@dataclass(frozen=True, slots=True)
class SlurmFacts:
    """The answers of ``scontrol show``, as text."""

    config: dict[str, str]
    partitions: tuple[dict[str, str], ...]
    nodes: tuple[dict[str, str], ...]


def ask_slurm() -> SlurmFacts:
    """Ask the controller for its configuration, partitions and nodes.

    Reads the plain output, because JSON output needs a later version of Slurm and a plugin.
    Raises SlurmError: Slurm is not installed here, or does not answer.
    """
    show = ["scontrol", "--oneliner", "show"]
    return SlurmFacts(
        config=slurm_config(timeout_s=_ANSWER_S),
        partitions=parse_records(ask([*show, "partition"], timeout_s=_ANSWER_S)),
        nodes=parse_records(ask([*show, "node"], timeout_s=_ANSWER_S)),
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """The resources that a job can get on one node."""

    gpus: int
    """GPUs of the type that is most frequent on the node."""
    gpu_type: str | None
    """That type; None if Slurm names none."""
    cpus: int | None
    """CPUs without those reserved for the system; None if unknown."""
    mem_mib: int | None
    """Memory in MiB without that reserved for the system; None if unknown."""

    def __str__(self) -> str:
        gpus = [f"{counted(self.gpus, 'GPU')} {self.gpu_type or ''}".rstrip()] if self.gpus else []
        cpus = [counted(self.cpus, "CPU")] if self.cpus else []
        return ", ".join([*gpus, *cpus, *([format_mem(self.mem_mib)] if self.mem_mib else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One partition and its most frequent node shape; if it has GPUs, the shape of a GPU node."""

    name: str
    default: bool
    """Whether jobs without a partition go there."""
    max_walltime_s: int | None
    nodes: int
    """Number of nodes with at least ``shape``, and at most the partition's MaxNodes."""
    min_nodes: int | None
    shape: Shape
    """That shape within the partition's limits; without a GPU type if the nodes have several."""
    remarks: tuple[str, ...]
    """Remarks for the reader of the file: other nodes, who may use it, preemption."""
    restricted: bool


def offers(facts: SlurmFacts) -> tuple[list[Offer], list[str]]:
    """Return the partitions that take jobs, and why the others do not.

    The default partition comes first, restricted ones last. Partitions that have no nodes, are not
    up, or are only for root are left out.
    """
    found, left_out = [], []
    for record in facts.partitions:
        name = record.get("PartitionName", "")
        shapes = Counter(
            _shape(n) for n in facts.nodes if name in n.get("Partitions", "").split(",")
        )
        if why := _unusable(record) or ("" if shapes else "no nodes"):
            left_out.append(f"{name!r}: {why}")
        else:
            found.append(_offer(record, shapes, facts.config))
    # The sort is stable, so that other partitions keep Slurm's order.
    return sorted(found, key=lambda one: (not one.default, one.restricted)), left_out


def gpus_of(gres: str) -> tuple[int, str | None]:
    """Return number and type of the GPUs in a node's ``Gres``; the most frequent type counts.

    ``gpu:l40s:4(S:0-1),nvme:1`` gives 4 and ``l40s``.
    """
    found: Counter[str] = Counter()
    for entry in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *words = entry.split(":")
        if kind == "gpu":
            count = words.pop() if words and words[-1].isdecimal() else "1"
            types = [word for word in words if word != "no_consume"]
            found[types[0] if types else ""] += int(count)
    if not found:
        return 0, None
    ((name, number),) = found.most_common(1)
    return number, name or None


def _offer(record: Mapping[str, str], shapes: Counter[Shape], config: Mapping[str, str]) -> Offer:
    with_gpus = Counter({shape: n for shape, n in shapes.items() if shape.gpus})
    ((shape, _),) = (with_gpus or shapes).most_common(1)
    count = sum(n for one, n in shapes.items() if _gives(one, shape))
    several = len({one.gpu_type for one in with_gpus}) > 1
    remarks = [f"other nodes: {n} x {one}" for one, n in shapes.most_common() if one != shape]
    limits = _limits(record)
    remarks += limits
    preempted = record.get("PreemptMode", "OFF")
    if preempted != "OFF":
        remarks.append(f"PreemptMode={preempted}: jobs here may have to give way to others")
    cpus = _number(record, "MaxCPUsPerNode")
    # A partition's own limit overrides that of the cluster.
    mem = _number(record, "MaxMemPerNode") or _number(config, "MaxMemPerNode")
    least = _number(record, "MinNodes") or 1
    return Offer(
        name=record["PartitionName"],
        default=record.get("Default") == "YES",
        max_walltime_s=_walltime(record.get("MaxTime", "UNLIMITED")),
        nodes=_least(count, _number(record, "MaxNodes")) or count,
        min_nodes=least if least > 1 else None,
        shape=Shape(
            shape.gpus,
            None if several else shape.gpu_type,
            _least(shape.cpus, cpus),
            _least(shape.mem_mib, mem),
        ),
        remarks=tuple(remarks),
        restricted=bool(limits),
    )


def _limits(record: Mapping[str, str]) -> list[str]:
    return [
        f"restricted: {key}={record[key]}"
        for key, everybody in _EVERYBODY.items()
        if record.get(key, everybody) != everybody
    ]


def _gives(one: Shape, wanted: Shape) -> bool:
    """Return whether a shape has at least the resources of another one, of any GPU type."""
    have, need = ((s.gpus, s.cpus or 0, s.mem_mib or 0) for s in (one, wanted))
    return all(a >= b for a, b in zip(have, need, strict=True))


def _unusable(record: Mapping[str, str]) -> str:
    name, state = record.get("PartitionName", ""), record.get("State", "UP")
    if not re.fullmatch(PARTITION_NAME, name):
        return "a name with characters that no script takes"
    if state != "UP":
        return f"State={state}"
    return "RootOnly=YES" if record.get("RootOnly") == "YES" else ""


def _shape(node: Mapping[str, str]) -> Shape:
    gpus, gpu_type = gpus_of(node.get("Gres", ""))
    # Since 22.05, CPUEfctv is the number of CPUs that CoreSpecCount leaves to jobs.
    cpus = _number(node, "CPUEfctv") or _number(node, "CPUTot")
    mem = _number(node, "RealMemory")
    kept = _number(node, "MemSpecLimit") or 0
    # Slurm shows RealMemory=1 if it is not configured.
    known = mem is not None and mem > max(1, kept)
    return Shape(gpus, gpu_type, cpus, mem - kept if mem and known else None)


def _number(record: Mapping[str, str], key: str) -> int | None:
    """Return a positive number; None for words such as UNLIMITED."""
    text = record.get(key, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _least(*numbers: int | None) -> int | None:
    return min(filter(None, numbers), default=None)


def _walltime(text: str) -> int | None:
    try:
        return parse_walltime(text)
    except ConfigError:
        return None


def draft(name: str, facts: SlurmFacts, today: dt.date) -> str:
    """Return the text of a valid cluster file with ``verified = false``.

    Raises ConfigError if Slurm shows no partition that takes jobs, or if ``--cluster`` could not
    find a file called ``name``.
    """
    usable, left_out = offers(facts)
    if not usable:
        why = f" ({'; '.join(left_out)})" if left_out else ""
        msg = f"Slurm shows no partition that accepts jobs{why}"
        raise ConfigError(msg, hint="run this on a login node, where 'sinfo' lists partitions")
    slurm, version = _setting(facts, "ClusterName"), _setting(facts, "SLURM_VERSION")
    main, gpu_type = _main(facts, usable), _common_gpu_type(usable)
    node = _known_of_all(main.shape, usable)
    lines = [
        "# Written by 'hpctk cluster init' from what Slurm says of itself. Read it, correct it,",
        "# and set verified = true once a job has run with it.",
        f"description = {_text(f'{slurm or name}, as its Slurm {version} describes it')}",
        f"source = {_text(f'hpctk cluster init {name} --from-slurm')}",
        f"checked = {today.isoformat()}",
        "verified = false",
        *_site(facts, usable, main.nodes, node, gpu_type),
        *_accounts(facts),
        *_choice(facts, usable),
        _ASK.rstrip(),
        *([f"\n[identify]\nslurm_cluster = {_text(slurm)}"] if slurm else []),
        *(_partition(one, node, gpu_type) for one in usable),
        *(f"\n# Left out: {one}" for one in left_out),
        *_defaults(main),
        f"\n[facts]\nslurm = {_text(version)}",
        # Newer versions of Slurm print "(null)" if there is no accounting.
        f"accounting = {_text(_setting(facts, 'AccountingStorageType') or _NO_ACCOUNTING)}",
        _ASK_NETWORK,
    ]
    # TOML allows no control characters, not even in comments.
    text = "".join(c for c in "\n".join(lines) if c.isprintable() or c == "\n")
    parse_cluster(text, file=name, name=name)
    if name.endswith(SUFFIX):
        msg = f"{name!r}: a cluster's name that ends in {SUFFIX} would be read as a path"
        raise ConfigError(msg, hint=f"hpctk cluster init {name.removesuffix(SUFFIX)}; -o FILE")
    return text


def _main(facts: SlurmFacts, usable: list[Offer]) -> Offer:
    """Return the partition whose nodes describe the cluster: Slurm's default partition.

    If a plugin of the site routes jobs, or there is no default, it is the one with most GPUs.
    """
    routed = _setting(facts, "JobSubmitPlugins")
    return max(
        usable, key=lambda one: (one.default and not routed, one.nodes * one.shape.gpus, one.nodes)
    )


def _common_gpu_type(usable: list[Offer]) -> str | None:
    types = {one.shape.gpu_type for one in usable if one.shape.gpus}
    return types.pop() if len(types) == 1 else None


def _known_of_all(shape: Shape, usable: list[Offer]) -> Shape:
    """Return ``shape`` without values that a partition lacks: it would inherit wrong ones."""
    shapes = [one.shape for one in usable]
    return replace(
        shape,
        cpus=shape.cpus if all(one.cpus for one in shapes) else None,
        mem_mib=shape.mem_mib if all(one.mem_mib for one in shapes) else None,
    )


def _site(
    facts: SlurmFacts, usable: list[Offer], nodes: int, node: Shape, gpu_type: str | None
) -> list[str]:
    times = [one.max_walltime_s for one in usable if one.max_walltime_s is not None]
    limited = len(times) == len(usable)
    # sbatch's options --gpus-... need this plugin.
    form = "gpus-per-node" if _setting(facts, "SelectType") == "select/cons_tres" else "gres"
    lines = _stated(
        nodes=nodes,
        max_walltime=format_walltime(max(times)) if limited else None,
        **_node(node),
        gpu_type=gpu_type,
        gpu_request=form if any(one.shape.gpus for one in usable) else None,
    )
    if not limited:
        lines.append("# max_walltime: not every partition has a limit")
    if "MEMORY" not in _setting(facts, "SelectTypeParameters").upper():
        lines.append("# Slurm does not share out memory here (SelectTypeParameters).")
        lines += _stated(mem_style="none")
    size = _setting(facts, "MaxArraySize")
    shrinks = "disable_job_shrink" not in _setting(facts, "SchedulerParameters")
    limit = int(size) if size.isdecimal() else 0
    return [*lines, *_stated(max_array_size=limit or None, shrink_jobs=shrinks)]


def _accounts(facts: SlurmFacts) -> list[str]:
    enforced = _setting(facts, "AccountingStorageEnforce")
    if not enforced or enforced == "none":
        return ["account_required = false"]
    return [
        f"# AccountingStorageEnforce={enforced}: true for users without a default account.",
        "# account_required = true",
    ]


def _choice(facts: SlurmFacts, usable: list[Offer]) -> list[str]:
    plugin = _setting(facts, "JobSubmitPlugins")
    free = [one for one in usable if not one.restricted]
    if plugin:
        return [f"# choose_partition: left to the site (JobSubmitPlugins={plugin})"]
    return ["choose_partition = true"] if len(free) > 1 else []


def _partition(one: Offer, node: Shape, gpu_type: str | None) -> str:
    limit, kind = one.max_walltime_s, one.shape.gpu_type
    known = _node(node)
    stated = _stated(
        name=one.name,
        max_walltime=None if limit is None else format_walltime(limit),
        nodes=one.nodes,
        min_nodes=one.min_nodes,
        **{key: value for key, value in _node(one.shape).items() if value != known[key]},
        gpu_type=kind if one.shape.gpus and kind != gpu_type else None,
        restricted=one.restricted or None,
    )
    default = ["the default partition"] if one.default else []
    remarks = [f"# {remark}" for remark in (*default, *one.remarks)]
    return "\n" + "\n".join([*remarks, "[[partitions]]", *stated])


def _node(shape: Shape) -> dict[str, Any]:
    memory = format_mem(shape.mem_mib) if shape.mem_mib else None
    return {"gpus_per_node": shape.gpus, "cpus_per_node": shape.cpus, "mem_per_node": memory}


def _defaults(main: Offer) -> list[str]:
    limit = main.max_walltime_s
    if limit is None or limit >= HOUR_S:
        return []
    return [f"\n[defaults]\ntime = {_text(format_walltime(limit))}"]


def _setting(facts: SlurmFacts, name: str) -> str:
    value = facts.config.get(name, "")
    return "" if value == "(null)" else value


def _stated(**facts: Any) -> list[str]:
    """Lines of TOML for the facts that are not None."""
    return [f"{key} = {_text(value)}" for key, value in facts.items() if value is not None]


def _text(value: str | int) -> str:
    # For printable text, a number or a bool, JSON is also TOML.
    printable = "".join(filter(str.isprintable, value)) if isinstance(value, str) else value
    return json.dumps(printable, ensure_ascii=False)
