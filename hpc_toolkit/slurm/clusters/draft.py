"""Draft a cluster file from Slurm's settings, with comments on facts that Slurm does not know.

A person must review the draft: Slurm knows nothing about modules, networks and site rules.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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
        msg = f"Slurm shows no partition that takes jobs{_because(left_out)}"
        raise ConfigError(msg, hint="is this a login node of the cluster? 'sinfo' should list them")
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
        msg = f"{name!r}: a cluster's name that ends in {SUFFIX} is taken for a path"
        raise ConfigError(msg, hint=f"hpctk cluster init {name.removesuffix(SUFFIX)}; -o FILE")
    return text


def write_draft(name: str, text: str, *, out: str | None, force: bool) -> Path:
    """Write a draft, by default to the user's cluster files, and return its path.

    Raises ConfigError if the file exists and ``force`` is not set, or if it cannot be written.
    """
    directory = Path(out).parent if out else user_directory()
    if directory is None:
        msg = "there is no home directory to write to"
        raise ConfigError(msg, hint="name a file with -o")
    path = directory / (Path(out).name if out else f"{name}{SUFFIX}")
    if path.exists() and not force:
        msg = f"{path}: there is a file already"
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
    lines = [f"nodes = {nodes}"]
    times = [one.max_walltime_s for one in usable if one.max_walltime_s is not None]
    if len(times) == len(usable):
        lines.append(f"max_walltime = {_text(format_walltime(max(times)))}")
    else:
        lines.append("# max_walltime: not every partition has a limit")
    lines += _node(node, None)
    if gpu_type:
        lines.append(f"gpu_type = {_text(gpu_type)}")
    if any(one.shape.gpus for one in usable):
        # sbatch's options --gpus-... need this plugin.
        typed = "gpus-per-node" if _setting(facts, "SelectType") == "select/cons_tres" else "gres"
        lines.append(f"gpu_request = {_text(typed)}")
    if "MEMORY" not in _setting(facts, "SelectTypeParameters").upper():
        lines.append("# Slurm does not share out memory here (SelectTypeParameters).")
        lines.append('mem_style = "none"')
    size = _setting(facts, "MaxArraySize")
    if size.isdecimal() and int(size) > 0:
        lines.append(f"max_array_size = {size}")
    shrinks = "disable_job_shrink" not in _setting(facts, "SchedulerParameters")
    return [*lines, f"shrink_jobs = {'true' if shrinks else 'false'}"]


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
    default = ["the default partition"] if one.default else []
    lines = [*(f"# {remark}" for remark in (*default, *one.remarks)), "[[partitions]]"]
    lines.append(f"name = {_text(one.name)}")
    if one.max_walltime_s is not None:
        lines.append(f"max_walltime = {_text(format_walltime(one.max_walltime_s))}")
    lines.append(f"nodes = {one.nodes}")
    if one.min_nodes:
        lines.append(f"min_nodes = {one.min_nodes}")
    lines += _node(one.shape, node)
    if one.shape.gpus and one.shape.gpu_type not in (None, gpu_type):
        lines.append(f"gpu_type = {_text(one.shape.gpu_type or '')}")
    if one.restricted:
        lines.append("restricted = true")
    return "\n" + "\n".join(lines)


def _node(shape: Shape, known: Shape | None) -> list[str]:
    lines = []
    if known is None or shape.gpus != known.gpus:
        lines.append(f"gpus_per_node = {shape.gpus}")
    if shape.cpus and (known is None or shape.cpus != known.cpus):
        lines.append(f"cpus_per_node = {shape.cpus}")
    if shape.mem_mib and (known is None or shape.mem_mib != known.mem_mib):
        lines.append(f"mem_per_node = {_text(format_mem(shape.mem_mib))}")
    return lines


def _defaults(main: Offer) -> list[str]:
    limit = main.max_walltime_s
    if limit is None or limit >= HOUR_S:
        return []
    return [f"\n[defaults]\ntime = {_text(format_walltime(limit))}"]


def _setting(facts: SlurmFacts, name: str) -> str:
    value = facts.config.get(name, "")
    return "" if value == "(null)" else value


def _because(left_out: list[str]) -> str:
    return f" ({'; '.join(left_out)})" if left_out else ""


def _text(value: str) -> str:
    # For printable text, a JSON string is also a TOML string.
    return json.dumps("".join(filter(str.isprintable, value)), ensure_ascii=False)
