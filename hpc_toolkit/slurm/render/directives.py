"""Complete a request from a cluster's facts, check its limits, and derive its directives."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import HpcToolkitError, RenderError
from hpc_toolkit.slurm.clusters import NodeKind
from hpc_toolkit.slurm.clusters.choice import choose_partition, first_fit, fitting_site, named_site
from hpc_toolkit.slurm.clusters.facts import Cluster
from hpc_toolkit.slurm.clusters.fitting import Needs, kinds_of, least, limiting_qos
from hpc_toolkit.slurm.render.spec import (
    MEMORY_OPTIONS,
    OPTIONS,
    ScriptSpec,
    option,
    rivals_of,
    shown,
)
from hpc_toolkit.slurm.render.values import NO_MEMORY, SIGNALLED, file_name, left_out, parse_array
from hpc_toolkit.system.quantities import HOUR_S, format_walltime

Directive = tuple[str, str | None]
"""A long option of sbatch without its dashes, and its value; None if the option takes no value."""

FALLBACK_TIME_S = HOUR_S
FALLBACK_SIGNAL_S = 300
"""Seconds before the time limit at which ranks start to drain, for limits of an hour or more."""

LOG = "slurm/logs/%x-%j.out"
ARRAY_LOG = "slurm/logs/%x-%A_%a.out"
"""The log of an array element; %j would be a different number for each element."""

DIRECTIVES = sorted(
    (name for name, row in OPTIONS.items() if row.directive),
    key=lambda name: OPTIONS[name].directive,
)
"""Fields of which sbatch's options are made, in the order of a script."""

_FILLED_IN = r"\\|%[0-9]*[A-Za-z%]"
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+=,-]+")


def complete(spec: ScriptSpec, cluster: Cluster) -> ScriptSpec:
    """Return ``spec`` with every value that the script needs, checked against ``cluster``.

    Precedence: the request, the cluster's defaults, shares of a node of its partition.
    Raises RenderError for a request beyond a limit, naming the limit and its file.
    """
    full, sources = _opened(spec, cluster)
    if cluster.choose_partition and not full.partition:
        full = replace(full, partition=choose_partition(cluster, _needs(full, sources)))
    # Without a name, the job counts as one of the first partition that takes it.
    name = full.partition or first_fit(cluster, (), _needs(full, sources))[0]
    full, sources = _opened(replace(spec, partition=full.partition), named_site(cluster, name))
    if cluster.account_required and not full.account:
        written = cluster.written("account_required")
        msg = f"--account: {cluster.name} requires an account ({written} = true)"
        raise RenderError(msg, hint=f"--account {cluster.account_hint or 'NAME'}")
    _check_times(full, sources)
    _check_array(full, cluster)
    site = site_of(full, cluster, sources)
    # Slurm tells A100 from a100.
    if full.gpus_per_node and (full.gpu_type or "").lower() in ("", (site.gpu_type or "").lower()):
        full = replace(full, gpu_type=site.gpu_type)
    if not full.cpus_per_gpu:
        full = replace(full, cpus_per_task=full.cpus_per_task or cpus_share(full, site))
    if all(getattr(full, name) is None for name in MEMORY_OPTIONS):
        full = replace(full, **memory_share(full, site))
    site_of(full, cluster, sources)
    return full


def site_of(
    full: ScriptSpec, cluster: Cluster, sources: Mapping[str, str] | None = None
) -> Cluster:
    """Return the site with the kinds of nodes that the request, as far as it is complete, fits.

    Raises RenderError if there are none.
    """
    names = tuple(full.partition.split(",")) if full.partition else ()
    return fitting_site(cluster, names, _needs(full, sources or {}))


def directives(full: ScriptSpec, cluster: Cluster) -> list[Directive]:
    site = site_of(full, cluster)
    depends = "no" if full.kill_on_invalid_dep is False else "yes"
    of_several: dict[str, list[tuple[str, Any]]] = {
        "gpus_per_node": _gpu_directives(full, site),
        "mem": [("mem", None if full.mem == NO_MEMORY else shown("mem", full.mem))],
        "array": [("array", full.array and parse_array(full.array, "--array").text)],
        # Without this option, a job whose dependency can never be met stays pending for ever.
        "kill_on_invalid_dep": [("kill-on-invalid-dep", full.dependency and depends)],
        "requeue": [
            # Sites set JobRequeue differently, so the script always states it.
            ("requeue" if full.requeue else "no-requeue", True),
            # A queue survives a lost node: only its ranks' items are taken over. Any other program
            # has to start again on all nodes, also one that an item runs on several.
            ("no-kill", not (full.command or full.one_rank)),
        ],
    }
    options: list[tuple[str, Any]] = []
    for name in DIRECTIVES:
        value = shown(name, getattr(full, name))
        options += of_several.get(name, [(name.replace("_", "-"), value)])
    given = [
        (name, None if value is True else str(value))
        for name, value in options
        if value is not None and value is not False
    ]
    passed = [text.partition("=") for text in full.sbatch if not left_out(text)]
    return [*given, *((name, value if equals else None) for name, equals, value in passed)]


def directive_text(directive: Directive) -> str:
    """Return ``--name=value`` as sbatch reads it from a ``#SBATCH`` line. Raises RenderError.

    In double quotes, with a backslash before ``"``, ``\\`` and ``#``, sbatch reads every printable
    text exactly. This was tried on 22.05; get_argument of src/sbatch/opt.c is the same in all
    releases from 17.11 to 26.05. Outside quotes a space would end the value, and a ``#`` the line;
    single quotes and ``$`` have no meaning inside.
    """
    name, value = directive
    if value is None:
        return f"--{name}"
    if not value.isprintable():
        msg = f"{option(name)}: {value!r} cannot be part of an sbatch directive"
        raise RenderError(msg, hint="remove the control characters")
    if _PLAIN.fullmatch(value):
        return f"--{name}={value}"
    quoted = re.sub(r'(["\\#])', r"\\\1", value)
    return f'--{name}="{quoted}"'


def log_pattern(spec: ScriptSpec) -> str:
    usual = ARRAY_LOG if spec.array else LOG
    # Slurm would take a slash of the name for a directory.
    name = file_name(spec.job_name) if "/" in spec.job_name else "%x"
    return spec.output or usual.replace("%x", name)


def _opened(spec: ScriptSpec, site: Cluster) -> tuple[ScriptSpec, dict[str, str]]:
    """Return ``spec`` with the defaults of a site or partition, its ranks, log and warning."""
    full, sources = _with_defaults(spec, site)
    full = replace(
        full,
        time=full.time or FALLBACK_TIME_S,
        output=log_pattern(full),
        open_mode=full.open_mode or "append",
        **_ranks(full, site),
    )
    if not (full.signal or full.plain) and (full.launch or not full.command):
        # Not for other programs: the signal ends a program that does not handle it.
        time_s = full.time_min or full.time or FALLBACK_TIME_S
        warning_s = FALLBACK_SIGNAL_S if time_s >= HOUR_S else max(1, time_s // 10)
        full = replace(full, signal=f"{SIGNALLED}{warning_s}")
    return full, sources


def _with_defaults(spec: ScriptSpec, cluster: Cluster) -> tuple[ScriptSpec, dict[str, str]]:
    """Return ``spec`` with the cluster's defaults for open fields, and where these are written."""
    sources = {}
    given = {text.partition("=")[0] for text in spec.sbatch}
    for name, value in cluster.defaults:
        passed = name.removeprefix("sbatch.")
        if passed != name:
            # A training has options of srun with such names.
            if passed not in given and not getattr(spec, passed.replace("-", "_"), None):
                text = passed if value is True else f"{passed}={value}"
                spec = replace(spec, sbatch=(*spec.sbatch, text))
            continue
        row = OPTIONS[name]
        if name.replace("_", "-") in given:  # left out by --sbatch NAME=
            continue
        useless = (row.needs and not getattr(spec, row.needs)) or (spec.plain and not row.plain)
        others = (name, *rivals_of(name))
        if useless or any(getattr(spec, other) is not None for other in others):
            continue
        sources[name] = cluster.written(f"defaults.{name}")
        field: dict[str, Any] = {name: value}
        try:
            spec = replace(spec, **field)
        except HpcToolkitError as error:
            raise RenderError(f"{sources[name]}: {error.message}", hint=error.hint) from None
    return spec, sources


def _ranks(full: ScriptSpec, cluster: Cluster) -> dict[str, Any]:
    """Return the fields that set the ranks of a node and the GPUs that each rank sees."""
    gpus = full.gpus_per_node
    if full.ntasks_per_gpu:
        # Not --ntasks-per-gpu: 22.05 would allocate the CPUs of one rank to all ranks of a GPU.
        return {
            "ntasks_per_node": gpus * full.ntasks_per_gpu,
            "ntasks_per_gpu": None,
            "gpu_bind": f"single:{full.ntasks_per_gpu}",
        }
    even = full.ntasks is None or full.ntasks % full.nodes == 0
    fields: dict[str, Any] = {}
    if full.ntasks_per_node is None and even:
        spread = full.ntasks // full.nodes if full.ntasks else None
        fields["ntasks_per_node"] = spread or gpus or 1
    if full.isolate_gpus:
        # Not --gpus-per-task: with a GPU type, ranks on 22.05 see no GPU at all.
        per_rank = _gpus_of_rank(replace(full, **fields), "--isolate-gpus gives each its own")
        isolated = cluster.gpu_request == "gpus-per-task"
        fields["isolate_gpus"] = False
        fields["gpu_bind"] = None if isolated else f"per_task:{per_rank}"
    return fields


def _gpus_of_rank(full: ScriptSpec, why: str) -> int:
    per_rank, rest = divmod(full.gpus_per_node, ranks(full))
    if rest or not per_rank:
        gpus, count = full.gpus_per_node, ranks(full)
        msg = f"--gpus-per-node: {gpus} GPUs cannot be shared evenly by {count} ranks"
        raise RenderError(msg, hint=why)
    return per_rank


def _needs(full: ScriptSpec, sources: Mapping[str, str]) -> Needs:
    keys = {"cpus_per_task": "cpus_per_node", "time": "max_walltime"}
    known = full.cpus_per_task or full.cpus_per_gpu or full.mem_per_cpu
    keys |= dict.fromkeys(MEMORY_OPTIONS, "mem_per_node")
    return Needs(
        nodes=full.nodes,
        gpus_per_node=full.gpus_per_node,
        cpus=cpus(full),
        mem_mib=memory_mib(full),
        time_s=full.time or FALLBACK_TIME_S,
        mem_per_cpu_mib=memory_mib(full) // cpus(full) if known else 0,
        gpu_type=full.gpu_type,
        constraint=full.constraint or "",
        gres=full.gres or "",
        account=full.account,
        qos=full.qos,
        sources={keys[name]: source for name, source in sources.items() if name in keys},
    )


def _gpu_directives(full: ScriptSpec, site: Cluster) -> list[tuple[str, Any]]:
    """Return the GPU options in the site's form, and the other generic resources of a node."""
    number, form = full.gpus_per_node, site.gpu_request or "none"
    if not number or form == "none":
        return [("gres", full.gres)]
    if form == "gpus-per-task":
        number = _gpus_of_rank(full, f"{site.written('gpu_request')} requests GPUs per task")
    if form == "gpus":
        number *= full.nodes
    typed = f"{full.gpu_type}:{number}" if full.gpu_type else str(number)
    if form == "gres":
        return [("gres", ",".join(filter(None, (f"gpu:{typed}", full.gres))))]
    return [(form, typed), ("gres", full.gres)]


def forbidden(cluster: Cluster, directory: Path) -> str | None:
    """Return why no job should be submitted from ``directory``; None if there is no reason."""
    # The home directory may be a link, but the path of the current directory contains no links.
    forms = {directory, Path(os.path.realpath(directory))}
    for place in cluster.forbidden_submit_dirs:
        expanded = os.path.expanduser(place)
        places = (expanded, os.path.realpath(expanded))
        if any(form.is_relative_to(one) for form in forms for one in places):
            written = cluster.written("forbidden_submit_dirs")
            return f"{cluster.name} takes no jobs from below {place} ({written})"
    # Slurm (22.05 and newer) joins the directory and the log's pattern before it replaces symbols:
    # the job would end at once, without a log.
    if found := re.search(_FILLED_IN, str(directory)):
        return f"Slurm does not take {found[0]!r} literally in the directory of a log: {directory}"
    return None


def _check_times(full: ScriptSpec, sources: Mapping[str, str]) -> None:
    assert full.time
    shortest_s = full.time_min or full.time
    said = f"{sources.get('time', '--time')} {format_walltime(full.time)}"
    if shortest_s > full.time:
        msg = f"{option('time_min')}: {format_walltime(shortest_s)} is more than {said}"
        raise RenderError(msg, hint="--time-min must be at most the time limit")
    warning_s = int((full.signal or "@0").rpartition("@")[2])
    if warning_s >= shortest_s:
        msg = f"{option('signal')}: {warning_s} s before the end is longer than {said}"
        raise RenderError(msg, hint="choose a shorter warning, or a longer time limit")


def _check_array(full: ScriptSpec, site: Cluster) -> None:
    if full.array is None:
        return
    array, limit = parse_array(full.array, "--array"), (site.max_array_size or math.inf) - 1
    check_number(len(array.indices), full, site)
    if array.highest > limit:
        msg = f"--array: index {array.highest} is more than {site.name} has"
        msg += f" ({site.written('max_array_size')} = {site.max_array_size})"
        raise RenderError(
            msg, hint=f"submit parts: --array 0-{limit} --array-offset N; or use a run"
        )


def check_number(jobs: int, spec: ScriptSpec, cluster: Cluster, where: str = "--array") -> None:
    """Raise RenderError if these are more jobs than a user may have submitted at a time."""
    limits = {"max_submit_jobs": cluster.max_submit_jobs}
    for qos in limiting_qos(named_site(cluster, spec.partition), spec.qos):
        limits[f"qos.{qos.name}.max_submit_jobs"] = qos.max_submit_jobs
    for key, limit in limits.items():
        if limit is not None and jobs > limit:
            place = cluster.written(key.removesuffix(".max_submit_jobs"))
            msg = f"{where}: {jobs} jobs are more than a user of {cluster.name} may submit"
            hint = "use a run: a few jobs process any number of items; or submit it in parts"
            raise RenderError(f"{msg} ({place}: at most {limit})", hint=hint)


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
    return max(0, full.mem or 0)


def cpus_share(full: ScriptSpec, site: Cluster) -> int:
    """Return the CPUs per rank that belong to the requested GPUs on every node that fits.

    At least 1, as many as the requested memory needs, and no more than a QOS allows.
    """
    shares = [one for kind in kinds_of(site) if (one := _shares(full, site, kind)[0]) is not None]
    limits = [Fraction(one.cpus, full.nodes) for one in limiting_qos(site, full.qos) if one.cpus]
    share = int(min([*shares, *limits[:1]])) // ranks(full) if shares else 0
    most_mib, needed = site.max_mem_per_cpu_mib, 1
    if most_mib and (full.mem or full.mem_per_gpu):
        needed = -(-memory_mib(full) // (most_mib * ranks(full)))
    return max(1, share, needed)


def _shares(
    full: ScriptSpec, site: Cluster, kind: NodeKind
) -> tuple[Fraction | None, Fraction | None]:
    """Return the CPUs and the MiB that belong to the request on a node; None if unknown."""
    total = least(kind.mem_mib, site.max_mem_per_node_mib)
    node_cpus = least(kind.cpus, site.max_cpus_per_node)
    part = kind.share(full.gpu_type, full.gpus_per_node) if full.gpus_per_node else None
    of_cpus = node_cpus * part if node_cpus and part else None
    if part is None and node_cpus:
        part = Fraction(cpus(full), node_cpus)
    if site.whole_nodes:
        part = Fraction(1)
    return of_cpus, total * part if total and part else None


def memory_share(full: ScriptSpec, site: Cluster) -> dict[str, Any]:
    """Return the memory field for the part of a node that is requested, in the site's form.

    It is what every node that fits has, within the limits of the partition.
    """
    shares = [_shares(full, site, kind)[1] for kind in kinds_of(site)]
    known = [share for share in shares if share is not None]
    if not known or site.mem_style == "none":
        return {}
    per_node, most_mib, of_job = min(known), site.max_mem_per_cpu_mib, cpus(full)
    if site.whole_nodes and site.mem_style == "mem-per-cpu":
        # Slurm gives memory for each CPU of the node, not only for those that are requested.
        of_job = max([of_job, *(kind.cpus or 0 for kind in kinds_of(site))])
    if most_mib:
        per_node = min(per_node, Fraction(most_mib * of_job))
    if site.mem_style == "mem" or (site.whole_nodes and not most_mib):
        return {"mem": max(1, int(per_node))}
    if site.mem_style == "mem-per-gpu" and full.gpus_per_node:
        return {"mem_per_gpu": max(1, int(per_node / full.gpus_per_node))}
    return {"mem_per_cpu": max(1, int(per_node / of_job))}
