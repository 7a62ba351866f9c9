"""Choose the cluster: by option, by variable, by signs of this machine, or ``generic``."""

from __future__ import annotations

import fnmatch
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.slurm.clusters.facts import Cluster, load_cluster
from hpc_toolkit.slurm.clusters.files import Layer, cluster_files, read_table
from hpc_toolkit.slurm.clusters.keys import identify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
