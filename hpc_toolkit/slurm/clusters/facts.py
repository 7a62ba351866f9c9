"""The facts of a site that a job script depends on, merged from cluster files and variables.

A file states facts and where they come from. Nothing here asks a scheduler, so that a script is the
same on a laptop and on the login node.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.slurm.clusters.files import (
    cluster_files,
    files_called,
    parse_table,
    read_table,
    with_earlier,
)
from hpc_toolkit.slurm.clusters.keys import key_problems
from hpc_toolkit.slurm.clusters.merge import MergedFacts
from hpc_toolkit.system import tomltable as t

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.slurm.clusters.files import ClusterFile
    from hpc_toolkit.slurm.clusters.keys import Backend, ContainerRuntime, GpuRequest, MemStyle
    from hpc_toolkit.slurm.clusters.merge import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One partition of a site. None means: as the cluster, or unknown where it does not say."""

    name: str
    """Its name in Slurm."""
    max_walltime_s: int | None = None
    """Longest job that it accepts, in seconds; None where unknown or without limit."""
    nodes: int | None = None
    """How many nodes one job can get there at most."""
    min_nodes: int | None = None
    """How many nodes a job must ask for there."""
    gpus_per_node: int | None = None
    """Physical GPUs of a node."""
    gpu_type: str | None = None
    """The type in a GPU request."""
    cpus_per_node: int | None = None
    """CPUs of a node that a job can have, as Slurm counts them."""
    mem_per_node_mib: int | None = None
    """Memory of a node that a job can have, in MiB."""
    price_per_node_hour: float | None = None
    """What an hour of a node there costs."""
    price_per_gpu_hour: float | None = None
    """What an hour of a GPU there costs."""
    watts_per_node: float | None = None
    """Power of a node there that works, its GPUs left out."""
    watts_per_gpu: float | None = None
    """Power of a GPU there that works."""
    restricted: bool = False
    """Whether only some may use it; it is never chosen, only taken where a job names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The facts of one site. None means unknown, and an unknown limit is not checked."""

    name: str
    """The name for ``--cluster``; the stem of the file."""
    file: str
    """Where the facts are written, in the first place; errors name it."""
    argument: str = ""
    """What ``--cluster`` takes to find these facts again; empty if they were not found by it."""
    extends: str | None = None
    """The cluster whose facts hold where this one says nothing."""
    description: str = ""
    """One line for people."""
    source: str = ""
    """The page, file or command that the facts were taken from."""
    checked: str = ""
    """Date of that look, ISO 8601."""
    verified: bool = False
    """Whether a job has run there with these facts."""
    identify: tuple[tuple[str, str], ...] = ()
    """By what the site is recognized: Slurm's ClusterName, ``NAME=VALUE`` in the environment, or a
    pattern of the host's name."""
    nodes: int | None = None
    """How many nodes one job can get at most."""
    min_nodes: int | None = None
    """How many nodes a job must ask for."""
    gpus_per_node: int | None = None
    """Physical GPUs of a node; 0 for a site without any."""
    gpu_type: str | None = None
    """The type in a GPU request, as in ``l40s:4``; None for an untyped request."""
    gpu_request: GpuRequest = "gpus-per-node"
    """The one form in which a script asks for GPUs; Slurm refuses a mix of them."""
    cpus_per_node: int | None = None
    """CPUs of a node that a job can have, as Slurm counts them."""
    mem_per_node_mib: int | None = None
    """Memory of a node that a job can have, in MiB."""
    price_per_node_hour: float | None = None
    """What an hour of a node costs, in the currency; added to the price of its GPUs."""
    price_per_gpu_hour: float | None = None
    """What an hour of a GPU costs, in the currency."""
    watts_per_node: float | None = None
    """Power of a node that works, in watts, its GPUs left out."""
    watts_per_gpu: float | None = None
    """Power of a GPU that works, in watts."""
    currency: str = ""
    """In what prices are told, such as USD, or SU for units of an allocation."""
    mem_style: MemStyle = "mem"
    """The option in which this site wants memory asked for; "none" where it sets memory itself."""
    max_walltime_s: int | None = None
    """Longest job, in seconds."""
    account_required: bool = False
    """Whether sbatch refuses a job without ``--account``."""
    account_hint: str = ""
    """What an account looks like there."""
    choose_partition: bool = False
    """Whether a script names the first partition that fits, where the user names none."""
    partitions: tuple[Partition, ...] = ()
    """Partitions whose limits are known, in the order in which they are tried; the list may be
    incomplete. Where there are any, the cluster's own limits stand for what they leave open."""
    forbidden_submit_dirs: tuple[str, ...] = ()
    """Directories below which sbatch refuses to take jobs; ``~`` is the home directory."""
    modules: tuple[str, ...] = ()
    """Environment modules that every script loads."""
    setup: tuple[str, ...] = ()
    """Commands that every script runs before its step."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables that every script exports."""
    node_setup: tuple[str, ...] = ()
    """Commands that every script runs once on each node before its step."""
    gpu_backend: Backend = "nccl"
    """What joins the ranks of a training that has GPUs."""
    nccl: tuple[tuple[str, str], ...] = ()
    """What NCCL and its transports must be told about this site's network."""
    login_shell: bool = False
    """Whether scripts need ``bash -l``, so that ``module`` is defined."""
    conda_base: str | None = None
    """Where the site's conda is installed."""
    container_runtime: ContainerRuntime | None = None
    """What runs containers there; None where unknown."""
    binds: tuple[str, ...] = ()
    """Directories that every container sees, ``FROM[:TO[:ro]]``."""
    max_array_size: int | None = None
    """Slurm's MaxArraySize: the highest index of an array is one less."""
    shrink_jobs: bool = False
    """Whether a running job may give nodes back."""
    defaults: tuple[tuple[str, str | int], ...] = ()
    """Values of sbatch options for a script that does not say otherwise."""
    facts: tuple[tuple[str, str], ...] = ()
    """What else a user should know; shown, never interpreted."""

    origins: tuple[tuple[str, Origin], ...] = ()
    """Where each key is written, those of a table one by one: ``defaults.time``."""

    def written(self, key: str) -> str:
        """Where a fact is written, for an error: ``clusters/lab.toml: gpus_per_node``."""
        origins = dict(self.origins)
        if key in origins:
            return str(origins[key])
        files = {origins[one].file for one in origins if one.startswith(f"{key}.")}
        return f"{', '.join(sorted(files)) or self.file}: {key}"

    def stated(self) -> dict[str, Any]:
        """The facts without those that nobody stated, and without where they are written."""
        return {
            name: value
            for name, value in _stated(self).items()
            if name not in ("file", "argument", "origins")
        }


def cluster_names() -> list[str]:
    """Names of the clusters in reach, sorted."""
    return sorted({found.name for found in cluster_files()})


def load_cluster(name: str) -> Cluster:
    """The cluster called ``name``, or the one in a TOML file (a path has "/" or ".toml").

    Merged key by key, later ones winning: the cluster that it extends, its files in the order of
    ``cluster_files``, variables ``HPCTK_...``. Raises ConfigError: unknown name, unreadable or
    unsafe file, unknown key, value out of range.
    """
    return _load(files_called(name), name, os.environ)


def parse_cluster(text: str, *, file: str, name: str) -> Cluster:
    """The site that ``text`` alone describes; ``file`` is what errors call it.

    Raises ConfigError.
    """
    merged = MergedFacts()
    merged.add(parse_table(text, file), file)
    return _build(merged, name, file=file)


def problems(found: ClusterFile) -> list[HpcToolkitError]:
    """Everything that is wrong with a file; if it is right, with what it makes of earlier ones."""
    try:
        errors = key_problems(read_table(found), found.file)
        if not errors:
            _load(with_earlier(found), found.name, {})
    except HpcToolkitError as error:
        return [error]
    return errors


def _load(files: list[ClusterFile], argument: str, environ: Mapping[str, str]) -> Cluster:
    merged = MergedFacts()
    _add_files(merged, files, (argument,))
    merged.add_variables(environ)
    return _build(merged, files[-1].name, file=files[0].file, argument=argument)


def _add_files(merged: MergedFacts, files: list[ClusterFile], extending: tuple[str, ...]) -> None:
    """Add files of a cluster after those that it extends; ``extending`` is how it was reached."""
    tables = [(read_table(found), found.file) for found in files]
    # Checked here, since the cluster that it names is looked for before the rest is.
    bases = [t.word(one["extends"], f"{file}: extends") for one, file in tables if "extends" in one]
    if bases:
        chain = (*extending, bases[-1])
        if bases[-1] in extending:
            msg = f"{' extends '.join(chain)}: a circle"
            raise ConfigError(msg, hint="remove one 'extends'")
        _add_files(merged, files_called(bases[-1]), chain)
        merged.forget("identify")
    for table, file in tables:
        merged.add(table, file)


def _build(merged: MergedFacts, name: str, *, file: str, argument: str = "") -> Cluster:
    """The cluster that the merged facts describe, checked as a whole."""
    values: dict[str, Any] = {
        field: tuple(value.items()) if isinstance(value, dict) else value
        for field, value in merged.values.items()
    }
    values["partitions"] = tuple(Partition(**one) for one in values.get("partitions", ()))
    cluster = Cluster(
        name=t.word(name, f"{file}: its name"),
        file=file,
        argument=argument,
        origins=tuple(merged.origins.items()),
        **values,
    )
    if cluster.choose_partition and not cluster.partitions:
        msg = f"{cluster.written('choose_partition')}: there are no [[partitions]]"
        raise ConfigError(msg, hint="list them, or remove choose_partition")
    return cluster


def _stated(facts: Any) -> dict[str, Any]:
    found = {one.name: (getattr(facts, one.name), one.default) for one in fields(facts)}
    return {
        name: [_stated(one) if is_dataclass(one) else one for one in value]
        if isinstance(value, tuple)
        else value
        for name, (value, default) in found.items()
        if value != default
    }
