"""Draft a cluster file from what Slurm shows of its partitions and nodes.

The draft has comments on facts that Slurm does not know. A person must review it: Slurm knows
nothing about modules, networks and site rules.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.client import ask
from hpc_toolkit.slurm.clusters import NodeKind, kinds_of_records, number_of, rights
from hpc_toolkit.slurm.clusters.facts import parse_cluster
from hpc_toolkit.slurm.clusters.files import SUFFIX
from hpc_toolkit.slurm.clusters.keys import PARTITION_NAME
from hpc_toolkit.slurm.controller import host_names, slurm_config
from hpc_toolkit.slurm.records import parse_records
from hpc_toolkit.system.quantities import HOUR_S, format_mem, format_walltime, parse_walltime
from hpc_toolkit.system.tomltable import MAX_COUNT

_ANSWER_S = 60.0
"""Seconds for an answer: ten thousand nodes are ten megabytes of text."""

_ASK = """
# What Slurm does not know: ask your site, and remove the '#' of what holds there. What each key
# means: docs/reference/cluster-file.md.
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
_LINE = 100
_DOWN = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING"}
"""States of nodes that run no new jobs; nodes that Slurm powers up for a job are others."""
_ONLY_CHECK = {"logging", "require_timelimit", "throttle"}
"""Plugins of JobSubmitPlugins that change no job."""
_NO_ACCOUNTING = "accounting_storage/none"


@dataclass(frozen=True, slots=True)
class SlurmFacts:
    """The answers of ``scontrol show``, as text, and the user who asks."""

    config: dict[str, str]
    partitions: tuple[dict[str, str], ...]
    nodes: tuple[dict[str, str], ...]
    user: rights.User = rights.NOBODY


def ask_slurm() -> SlurmFacts:
    """Ask the controller for its configuration, partitions and nodes.

    Reads the plain output, because JSON output needs a later version of Slurm and a plugin.
    Raises SlurmError: Slurm is not installed here, or does not answer.
    """
    show = ["scontrol", "--oneliner", "show"]
    config = slurm_config(timeout_s=_ANSWER_S)
    accounting = config.get("AccountingStorageType", "") not in ("", _NO_ACCOUNTING)
    partitions = parse_records(ask([*show, "partition"], timeout_s=_ANSWER_S))
    user = rights.this_user(config.get("ClusterName", ""), accounting=accounting)
    for record in partitions:
        if not rights.takes_from(hosts := record.get("AllocNodes", "ALL"), user):
            record["AllocNodes"] = ",".join(host_names(hosts)) or hosts
    return SlurmFacts(
        config=config,
        partitions=partitions,
        nodes=parse_records(ask([*show, "node"], timeout_s=_ANSWER_S)),
        user=user,
    )


@dataclass(frozen=True, slots=True)
class Offer:
    """A partition that takes jobs."""

    record: Mapping[str, str]
    default: bool
    """Whether jobs without a partition go there."""
    kinds: tuple[NodeKind, ...]
    """The kinds of its nodes with their numbers, the most frequent first."""
    remarks: tuple[str, ...]
    """Remarks for the reader of the file: preemption, nodes that are down."""
    closed: str
    """Why the user cannot use it; "" if nothing excludes them."""

    @property
    def max_walltime_s(self) -> int | None:
        with suppress(ConfigError):
            return parse_walltime(self.record.get("MaxTime", "UNLIMITED"))
        return None


def offers(facts: SlurmFacts) -> tuple[list[Offer], list[str]]:
    """Return the partitions that take jobs, and why the others do not.

    The default partition comes first, preempted and restricted ones last. Partitions that have no
    nodes, are not up, or are only for root are left out.
    """
    found, left_out = [], []
    nodes = [node for node in facts.nodes if "FUTURE" not in node.get("State", "")]
    kinds = kinds_of_records(nodes)
    for record in facts.partitions:
        name = record.get("PartitionName", "")
        pairs = zip(nodes, kinds, strict=True)
        own = [pair for pair in pairs if name in pair[0].get("Partitions", "").split(",")]
        if why := _unusable(record) or ("" if own else "no nodes"):
            left_out.append(f"{name!r}: {why}")
            continue
        numbers = Counter(kind for _, kind in own).most_common()
        default, preempted = record.get("Default") == "YES", record.get("PreemptMode", "OFF")
        remarks = ["the default partition"] if default else []
        states = (set(re.findall("[A-Z_]+", node.get("State", ""))) for node, _ in own)
        if down := sum(1 for state in states if _DOWN & state):
            remarks.append(f"{down} of {len(own)} nodes are down or drained now")
        if preempted != "OFF":
            remarks.append(f"PreemptMode={preempted}: jobs here may have to give way to others")
        most_first = tuple(replace(kind, nodes=n) for kind, n in numbers)
        why = rights.closed(record, facts.user)
        found.append(Offer(record, default, most_first, tuple(remarks), why))
    # The sort is stable, so that other partitions keep Slurm's order.
    found.sort(
        key=lambda o: (not o.default, bool(o.closed), o.record.get("PreemptMode", "OFF") != "OFF")
    )
    return found, left_out


def _unusable(record: Mapping[str, str]) -> str:
    name, state = record.get("PartitionName", ""), record.get("State", "UP")
    if not re.fullmatch(PARTITION_NAME, name):
        return "a name with characters that no script takes"
    if state != "UP":
        return f"State={state}"
    return "RootOnly=YES" if record.get("RootOnly") == "YES" else ""


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
    slurm, version = facts.config.get("ClusterName", ""), facts.config.get("SLURM_VERSION", "")
    lines = [
        "# Written by 'hpctk cluster init' from what Slurm says of itself. Read it, correct it,",
        "# and set verified = true once a job has run with it.",
        f"description = {_text(f'{slurm or name}, as its Slurm {version} describes it')}",
        f"source = {_text(f'hpctk cluster init {name} --from-slurm')}",
        f"checked = {today.isoformat()}",
        "verified = false",
        *_site(facts, usable),
        *_accounts(facts),
        *_choice(facts, usable),
        _ASK.rstrip(),
        *([f"\n[identify]\nslurm_cluster = {_text(slurm)}"] if slurm else []),
        "\n# Nodes that are equal to a job; partitions say how many of each they have.\n[kinds]",
        *(_kind(kind) for kind in _distinct(usable)),
        *_qos(facts),
        *(_partition(one, facts) for one in usable),
        *(f"\n# Left out: {one}" for one in left_out),
        *(f"\n[defaults]\n{time}" for time in _short_time(usable[0], facts)),
        f"\n[facts]\nslurm = {_text(version)}",
        # Newer versions of Slurm print "(null)" if there is no accounting.
        f"accounting = {_text(facts.config.get('AccountingStorageType') or _NO_ACCOUNTING)}",
        _ASK_NETWORK,
    ]
    # TOML allows no control characters, not even in comments.
    text = "".join(c for c in "\n".join(lines) if c.isprintable() or c == "\n")
    parse_cluster(text, file=name, name=name)
    if name.endswith(SUFFIX):
        msg = f"{name!r}: a cluster's name that ends in {SUFFIX} would be read as a path"
        raise ConfigError(msg, hint=f"hpctk cluster init {name.removesuffix(SUFFIX)}; -o FILE")
    return text


def _distinct(usable: list[Offer]) -> list[NodeKind]:
    numbers: Counter[NodeKind] = Counter()
    for one in usable:
        for kind in one.kinds:
            numbers[replace(kind, nodes=None)] += kind.nodes or 0
    return [kind for kind, _ in numbers.most_common()]


def _kind(kind: NodeKind) -> str:
    stated = _stated(
        cpus=kind.cpus,
        mem=format_mem(kind.mem_mib) if kind.mem_mib else None,
        gpus=",".join(f"{gpu}:{n}".strip(":") for gpu, n in kind.gpus or ()) or None,
        gres=",".join(f"{name}:{number}" for name, number in kind.gres) or None,
        features=list(kind.features) or None,
    )
    return f"{kind.name} = {{ {', '.join(stated)} }}"


def _site(facts: SlurmFacts, usable: list[Offer]) -> list[str]:
    times = [one.max_walltime_s for one in usable if one.max_walltime_s is not None]
    limited = len(times) == len(usable)
    # sbatch's options --gpus-... need this plugin.
    form = "gpus-per-node" if facts.config.get("SelectType", "") == "select/cons_tres" else "gres"
    gpus = any(kind.gpus for one in usable for kind in one.kinds)
    lines = _stated(
        max_walltime=format_walltime(max(times)) if limited else None,
        gpu_request=form if gpus else None,
    )
    if not gpus:
        lines.append(
            "# No node has gpu in its Gres. If nodes have GPUs, add them to their [kinds] and:"
        )
        lines.append('# gpu_request = "none"')
    if not limited:
        lines.append("# max_walltime: not every partition has a limit")
    if not _shares_memory(facts):
        lines.append("# Slurm does not share out memory here (SelectTypeParameters).")
        lines += _stated(mem_style="none")
    size = facts.config.get("MaxArraySize", "")
    shrinks = "disable_job_shrink" not in facts.config.get("SchedulerParameters", "")
    limit = min(int(size), MAX_COUNT) if size.isdecimal() else 0
    return [*lines, *_stated(max_array_size=limit or None, shrink_jobs=shrinks)]


def _accounts(facts: SlurmFacts) -> list[str]:
    enforced = facts.config.get("AccountingStorageEnforce", "")
    if not enforced or enforced == "none":
        return ["account_required = false"]
    user = facts.user
    if not user.associations:
        return [
            f"# AccountingStorageEnforce={enforced}: true for users without a default account.",
            "# account_required = true",
        ]
    # Accounts may differ in both; the file states what is true for every account.
    defaults = {row.get("defaultqos", "") for row in user.associations}
    submit = {number_of(row, "maxsubmit") or 0 for row in user.associations}
    return [
        f"# Your accounts: {', '.join(user.own('account'))}.",
        "# account_required = true" if _router(facts) else "account_required = false",
        *_stated(
            default_qos=min(defaults) or None if len(defaults) == 1 else None,
            max_submit_jobs=min(max(submit), MAX_COUNT) if min(submit) else None,
        ),
    ]


def _router(facts: SlurmFacts) -> str:
    """Return the plugins that may change a job's partition and account."""
    plugins = facts.config.get("JobSubmitPlugins", "").split(",")
    return ",".join(one for one in plugins if one.rpartition("/")[2] not in _ONLY_CHECK)


def _choice(facts: SlurmFacts, usable: list[Offer]) -> list[str]:
    plugin = _router(facts)
    free = [one for one in usable if not one.closed]
    if plugin:
        return [f"# choose_partition: left to the site (JobSubmitPlugins={plugin})"]
    # Slurm itself sends a job without a partition to the default one.
    chosen = len(free) > 1 or (free and not free[0].default)
    return ["choose_partition = true"] if chosen else []


def _partition(one: Offer, facts: SlurmFacts) -> str:
    record, total = one.record, sum(kind.nodes or 0 for kind in one.kinds)
    nodes, cpus = number_of(record, "MaxNodes"), number_of(record, "MaxCPUsPerNode")
    least = number_of(record, "MinNodes")
    # A partition's own limit overrides those of the cluster.
    limits = ("MaxMemPerNode", "MaxMemPerCPU")
    source = record if any(number_of(record, key) for key in limits) else facts.config
    mem, mem_per_cpu = (number_of(source, key) for key in limits)
    most_cpus = max((kind.cpus or 0 for kind in one.kinds), default=0)
    most_mem = max((kind.mem_mib or 0 for kind in one.kinds), default=0)
    stated = _stated(
        name=record["PartitionName"],
        max_walltime=one.max_walltime_s and format_walltime(one.max_walltime_s),
        nodes=nodes if nodes and nodes < total else None,
        min_nodes=least if least and least > 1 else None,
        max_cpus_per_node=cpus if cpus and cpus < most_cpus else None,
        max_mem_per_node=format_mem(mem) if mem and mem < most_mem else None,
        max_mem_per_cpu=format_mem(mem_per_cpu) if mem_per_cpu else None,
        mem_style=_mem_style(record, facts.config) if _shares_memory(facts) else None,
        whole_nodes=_whole_nodes(record, facts.config) or None,
        restricted=one.closed or None,
        **_rights(record, facts),
    )
    stated += [f"defaults = {{ {time} }}" for time in _short_time(one, facts)]
    remarks = [f"# {remark}" for remark in one.remarks]
    counts = [f"{kind.name} = {kind.nodes}" for kind in one.kinds]
    inline = f"kinds = {{ {', '.join(counts)} }}"
    kinds = [inline] if len(inline) <= _LINE else ["[partitions.kinds]", *counts]
    return "\n" + "\n".join([*remarks, "[[partitions]]", *stated, *kinds])


def _whole_nodes(record: Mapping[str, str], config: Mapping[str, str]) -> bool:
    shared, select = record.get("OverSubscribe", ""), config.get("SelectType", "")
    # select/linear, also below select/cray_aries, shares nodes only if OverSubscribe says so.
    of_cray = "cray" in select and "OTHER_CONS" not in config.get("SelectTypeParameters", "")
    linear = select == "select/linear" or of_cray
    # Later than 25.05, the record has Exclusive=NODE instead.
    exclusive = "EXCLUSIVE" in shared or "NODE" in record.get("Exclusive", "").upper()
    return exclusive or (linear and not shared.startswith(("FORCE", "YES")))


def _shares_memory(facts: SlurmFacts) -> bool:
    return "MEMORY" in facts.config.get("SelectTypeParameters", "").upper()


def _mem_style(record: Mapping[str, str], config: Mapping[str, str]) -> str | None:
    """Return the form in which the site gives memory by default; None if it gives nodes."""
    defaults = record.get("JobDefaults", "") + config.get("JobDefaults", "")
    if "DefMemPerGPU" in defaults:
        return "mem-per-gpu"
    keys = ("DefMemPerNode", "MaxMemPerNode", "DefMemPerCPU", "MaxMemPerCPU")
    source = record if any(number_of(record, key) for key in keys) else config
    return "mem-per-cpu" if any(number_of(source, key) for key in keys[2:]) else None


def _rights(record: Mapping[str, str], facts: SlurmFacts) -> dict[str, Any]:
    """Return the accounts and the QOS that the user's jobs may have, if these are not all."""
    user, qos = facts.user, record.get("QoS", "N/A")
    known, unlimited = user.associations, user.qos or qos in ("N/A", "(null)")
    accounts = rights.permitted(record, user, "Accounts", "account")
    allowed = rights.permitted(record, user, "Qos", "qos")
    return {
        "accounts": accounts if accounts and accounts != user.own("account") else None,
        "denied_accounts": None if known else rights.words(record.get("DenyAccounts", "")) or None,
        "allowed_qos": allowed if allowed and allowed != user.own("qos") else None,
        "denied_qos": None if known else rights.words(record.get("DenyQos", "")) or None,
        # If sacctmgr does not answer, the limits of this QOS are unknown.
        "partition_qos": qos if qos in _limited_qos(facts) or not unlimited else None,
    }


def _limited_qos(facts: SlurmFacts) -> dict[str, dict[str, Any]]:
    """Return the limits of the QOS that the user's jobs may have, if Slurm enforces them."""
    if not re.search("limits|safe|all", facts.config.get("AccountingStorageEnforce", "")):
        return {}
    names = [*facts.user.own("qos"), *(one.get("QoS", "") for one in facts.partitions)]
    found = {name: rights.qos_limits(facts.user, name) for name in dict.fromkeys(names)}
    # A limit of 0 is one as well, such as gres/gpu=0.
    return {name: its for name, its in found.items() if any(v is not None for v in its.values())}


def _qos(facts: SlurmFacts) -> list[str]:
    lines = []
    for name, limits in _limited_qos(facts).items():
        key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)
        lines.append(f"{key} = {{ {', '.join(_stated(**limits))} }}")
    return ["\n# Limits of each QOS for one job.\n[qos]", *lines] if lines else []


def _short_time(one: Offer, facts: SlurmFacts) -> list[str]:
    """Return the default time of a partition whose jobs end before the usual default."""
    of_qos = _limited_qos(facts).get(one.record.get("QoS", ""), {}).get("max_walltime")
    times = [one.max_walltime_s or HOUR_S, parse_walltime(of_qos) if of_qos else HOUR_S]
    return _stated(time=format_walltime(min(times))) if min(times) < HOUR_S else []


def _stated(**facts: Any) -> list[str]:
    """Lines of TOML for the facts that are not None."""
    return [f"{key} = {_text(value)}" for key, value in facts.items() if value is not None]


def _text(value: str | int | list[str] | dict[str, int]) -> str:
    # For printable text, a number or a bool, JSON is also TOML.
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_text(key)} = {_text(one)}' for key, one in value.items())} }}"
    printable = "".join(filter(str.isprintable, value)) if isinstance(value, str) else value
    return json.dumps(printable, ensure_ascii=False)
