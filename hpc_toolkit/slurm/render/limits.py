"""Check a request against the cluster's general limits; errors say where a limit is written.

``clusters.partitions`` checks the resources of a node and the longest time limit.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.render.grammar import parse_array
from hpc_toolkit.slurm.render.rules import option
from hpc_toolkit.system.quantities import format_walltime

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.render.spec import ScriptSpec

_FILLED_IN = r"\\|%[0-9]*[A-Za-z%]"


def check_limits(full: ScriptSpec, site: Cluster, sources: Mapping[str, str]) -> None:
    """Raise RenderError for a request that ``site`` cannot accept.

    ``sources`` are the origins of values that the user did not give; errors name them.
    """
    if site.account_required and not full.account:
        msg = f"--account: {site.name} takes no job without one"
        msg += f" ({site.written('account_required')} = true)"
        raise RenderError(msg, hint=f"--account {site.account_hint or 'NAME'}")
    _check_times(full, sources)
    _check_array(full, site)


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
        raise RenderError(msg, hint="Slurm lowers the limit, it never raises it")
    warning_s = int((full.signal or "@0").rpartition("@")[2])
    if warning_s >= shortest_s:
        msg = f"{option('signal')}: {warning_s} s before the end do not fit into {said}"
        raise RenderError(msg, hint="warn later, or ask for more time")


def _check_array(full: ScriptSpec, site: Cluster) -> None:
    if full.array is None or site.max_array_size is None:
        return
    highest, limit = parse_array(full.array, "--array").highest, site.max_array_size - 1
    if highest > limit:
        msg = f"--array: index {highest} is more than {site.name} has"
        msg += f" ({site.written('max_array_size')} = {site.max_array_size})"
        raise RenderError(msg, hint=f"indices end at {limit}; 'hpctk submit' makes several arrays")
