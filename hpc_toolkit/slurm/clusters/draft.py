"""Draft a cluster file from Slurm's settings, with comments on facts that Slurm does not know.

A person must review the draft: Slurm knows nothing about modules, networks and site rules.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.slurm.clusters.facts import parse_cluster
from hpc_toolkit.slurm.clusters.files import SUFFIX, user_directory
from hpc_toolkit.slurm.clusters.probe import offers
from hpc_toolkit.system.quantities import HOUR_S, format_mem, format_walltime

if TYPE_CHECKING:
    import datetime as dt

    from hpc_toolkit.slurm.clusters.probe import Offer, Shape, SlurmFacts

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


def write_draft(name: str, text: str, *, out: str | None, force: bool) -> Path:
    """Write a draft, by default to the user's cluster files, and return its path.

    Raises ConfigError if the file exists and ``force`` is not set, or if it cannot be written.
    """
    directory = Path(out).parent if out else user_directory()
    if directory is None:
        msg = "this user has no home directory"
        raise ConfigError(msg, hint="choose a file with -o")
    path = directory / (Path(out).name if out else f"{name}{SUFFIX}")
    if path.exists() and not force:
        msg = f"{path}: the file exists"
        raise ConfigError(msg, hint="--force overwrites it; -o FILE writes another")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [text.encode()])
    except OSError as error:
        msg = f"{path}: cannot be written: {error.strerror}"
        raise ConfigError(msg, hint="give another file with -o") from None
    return path


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
