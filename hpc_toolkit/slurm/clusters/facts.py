"""The facts of a site that a job script depends on, merged from cluster files and variables.

A file states facts and their source. This module asks no scheduler, so a script is the same on a
laptop and on the login node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.slurm.clusters import NodeKind, keys
from hpc_toolkit.slurm.clusters.files import (
    ClusterFile,
    cluster_files,
    files_called,
    parse_table,
    read_table,
)
from hpc_toolkit.slurm.clusters.keys import Limits, Partition, Qos, keyed
from hpc_toolkit.slurm.render.spec import DEFAULT_OPTIONS, OPTIONS, rivals_of
from hpc_toolkit.system import tomltable as t

VARIABLES = {f"HPCTK_{option.upper()}": option for option in DEFAULT_OPTIONS}
"""Environment variables that override a key of every cluster's ``[defaults]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Limits):
    """The facts of one site. None means unknown, and an unknown limit is not checked."""

    name: str
    """The name for ``--cluster``; the stem of the file."""
    file: str
    """The first file that states these facts; errors name it."""
    argument: str = ""
    """Value of ``--cluster`` that loads these facts again; empty for facts from a text."""
    extends: str | None = keyed(None, t.word)
    """The cluster whose facts apply where this one states none."""
    description: str = keyed("", t.text)
    """Description of the cluster on one line."""
    source: str = keyed("", t.text)
    """The page, file or command that the facts were taken from."""
    checked: str = keyed("", t.date)
    """Date when the facts were compared with the source, ISO 8601."""
    verified: bool = keyed(False, t.flag)
    """Whether a job has run there with these facts."""
    identify: tuple[tuple[str, str], ...] = keyed((), keys.identify)
    """How the site is recognized: Slurm's ClusterName, ``NAME=VALUE`` in the environment, or a
    pattern of the host name."""
    gpu_request: str | None = keyed("gpus-per-node", keys.gpu_request)
    currency: str = keyed("", t.word)
    """Currency of the prices, such as USD, or SU for units of an allocation."""
    mem_style: str | None = keyed("mem", keys.mem_style)
    kinds: tuple[NodeKind, ...] = keyed((), keys.kinds)
    """Kinds of nodes by name, in place of gpus_per_node, gpu_type, cpus_per_node and
    mem_per_node; a partition says how many nodes of each kind it has."""
    qos: tuple[Qos, ...] = keyed((), keys.qos)
    """QOS with limits, by name."""
    default_qos: str | None = keyed(None, t.word)
    """The QOS of jobs without one."""
    max_submit_jobs: int | None = keyed(None, t.count)
    """Most jobs, including elements of arrays, that a user may have submitted."""
    account_required: bool = keyed(False, t.flag)
    """Whether sbatch refuses a job without ``--account``."""
    account_hint: str = keyed("", t.text)
    """What an account name looks like there."""
    choose_partition: bool = keyed(False, t.flag)
    """Whether a script requests the first partition that fits if the user names none."""
    partitions: tuple[Partition, ...] = keyed((), keys.partitions)
    """Partitions with known limits, in the order in which they are tried; the list may be
    incomplete. The cluster's own limits apply where a partition states none."""
    forbidden_submit_dirs: tuple[str, ...] = keyed((), keys.directories)
    """Directories in and below which sbatch refuses to take jobs; ``~`` is the home directory."""
    modules: tuple[str, ...] = keyed((), keys.modules)
    """Environment modules that every script loads."""
    setup: tuple[str, ...] = keyed((), keys.commands)
    """Commands that every script runs before its step."""
    env: tuple[tuple[str, str], ...] = keyed((), keys.exports)
    """Variables that every script exports."""
    node_setup: tuple[str, ...] = keyed((), keys.commands)
    """Commands that every script runs once on each node before its step."""
    gpu_backend: str = keyed("nccl", keys.backend)
    """The communication backend of a training with GPUs."""
    nccl: tuple[tuple[str, str], ...] = keyed((), keys.nccl)
    """Variables of NCCL and its transports that this site's network needs."""
    login_shell: bool = keyed(False, t.flag)
    """Whether scripts need ``bash -l``, so that ``module`` is defined."""
    conda_base: str | None = keyed(None, t.path)
    """Where the site's conda is installed."""
    container_runtime: str | None = keyed(None, keys.runtime)
    """The program that runs containers there, or its path, and arguments for it."""
    binds: tuple[str, ...] = keyed((), keys.binds)
    """Directories that every container sees, ``FROM[:TO[:ro]]``."""
    max_array_size: int | None = keyed(None, t.count)
    """Slurm's MaxArraySize: the highest index of an array is one less."""
    shrink_jobs: bool = keyed(False, t.flag)
    """Whether a running job may give nodes back."""
    # As in a ScriptSpec: times in seconds, memory in MiB.
    defaults: tuple[tuple[str, Any], ...] = keyed((), keys.defaults)
    """Values of sbatch options that a request leaves open; 'defaults.sbatch' takes any option that
    '--sbatch' takes."""
    facts: tuple[tuple[str, str], ...] = keyed((), t.pairs)
    """Other facts for users; shown, never interpreted."""

    origins: tuple[tuple[str, Origin], ...] = ()
    """Where each key is written; the keys of a table have their own entries: ``defaults.time``."""

    def written(self, key: str) -> str:
        """Return where a fact is written, for errors: ``clusters/lab.toml: gpus_per_node``."""
        origins = dict(self.origins)
        if key in origins:
            return str(origins[key])
        files = {origins[one].file for one in origins if one.startswith(f"{key}.")}
        return f"{', '.join(sorted(files)) or self.file}: {key}"

    def stated(self) -> dict[str, Any]:
        """Return the facts that differ from their defaults, without their files and origins."""
        return {
            name: value
            for name, value in _stated(self).items()
            if name not in ("file", "argument", "origins")
        }


KEYS: dict[str, t.Key] = {
    **{key: one for key, one in keys.keys_of(Cluster).items() if key not in keys.NODE_KEYS},
    **keys.NODE_KEYS,
}
"""All keys of a cluster file."""


def cluster_names() -> list[str]:
    return sorted({found.name for found in cluster_files()})


def load_cluster(name: str) -> Cluster:
    """Load the cluster called ``name``, or a TOML file (a path has "/" or ".toml").

    Merges key by key, later sources override earlier ones: the cluster that it extends, its files
    in the order of ``cluster_files``, variables ``HPCTK_...``. Raises ConfigError: unknown name,
    unreadable or unsafe file, unknown key, value out of range.
    """
    files = files_called(name)
    merged = MergedFacts()
    _add_files(merged, files, (name,))
    merged.add_variables(os.environ)
    return _build(merged, files[-1].name, file=files[0].file, argument=name)


def parse_cluster(text: str, *, file: str, name: str) -> Cluster:
    """Build the cluster that ``text`` alone describes; errors call it ``file``.

    Raises ConfigError.
    """
    merged = MergedFacts()
    merged.add(parse_table(text, file), file)
    return _build(merged, name, file=file)


def _add_files(merged: MergedFacts, files: list[ClusterFile], extending: tuple[str, ...]) -> None:
    """Add the files of a cluster after those of the cluster that it extends.

    ``extending`` is the chain of clusters that led to this one; a circle raises ConfigError.
    """
    tables = [(read_table(found), found.file) for found in files]
    # Checked here, because the extended cluster is loaded before the other keys are checked.
    bases = [t.word(one["extends"], f"{file}: extends") for one, file in tables if "extends" in one]
    if bases:
        chain = (*extending, bases[-1])
        if bases[-1] in extending:
            raise ConfigError(f"{' extends '.join(chain)}: a circle", hint="remove one 'extends'")
        _add_files(merged, files_called(bases[-1]), chain)
    for table, file in tables:
        if len(extending) > 1:  # it is true of the extended cluster only
            table.pop("identify", None)
        merged.add(table, file)


def _build(merged: MergedFacts, name: str, *, file: str, argument: str = "") -> Cluster:
    """Build the cluster from merged facts, and check that they agree with each other."""
    values: dict[str, Any] = {
        field: tuple(value.items()) if isinstance(value, dict) else value
        for field, value in merged.values.items()
    }
    values["partitions"] = tuple(Partition(**one) for one in values.get("partitions", ()))
    values["qos"] = tuple(Qos(name=one, **dict(its)) for one, its in values.get("qos", ()))
    values["kinds"] = tuple(NodeKind(name=one, **dict(its)) for one, its in values.get("kinds", ()))
    cluster = Cluster(
        name=t.word(name, f"{file}: its name"),
        file=file,
        argument=argument,
        origins=tuple(merged.origins.items()),
        **values,
    )
    if cluster.choose_partition and not cluster.partitions:
        msg = f"{cluster.written('choose_partition')}: no [[partitions]] are listed"
        raise ConfigError(msg, hint="list them, or remove choose_partition")
    _check_kinds(cluster)
    return cluster


def _check_kinds(cluster: Cluster) -> None:
    known = [kind.name for kind in cluster.kinds]
    places: list[tuple[Cluster | Partition, str]] = [(cluster, cluster.written("kinds"))]
    for one in cluster.partitions:
        where = f"{cluster.written('partitions')}.{one.name}.kinds"
        places.append((one, where))
        if unknown := [name for name, _ in one.kinds if name not in known]:
            hint = near_miss(unknown[0], known)
            raise ConfigError(f"{where}: {unknown[0]!r} is not in [kinds]", hint=hint)
    for facts, where in places:
        for key in keys.SHAPE_KEYS:
            if facts.kinds and getattr(facts, keys.NODE_KEYS[key][0]) is not None:
                msg = f"{where}: kinds of nodes and {key} exclude each other"
                raise ConfigError(msg, hint=f"move {key} into the kinds, or remove it")


def _stated(facts: Any) -> dict[str, Any]:
    found = {one.name: (getattr(facts, one.name), one.default) for one in fields(facts)}
    return {
        name: [_stated(one) if is_dataclass(one) else one for one in value]
        if isinstance(value, tuple)
        else value
        for name, (value, default) in found.items()
        if value != default
    }


class Origin(NamedTuple):
    file: str
    """The file's name in errors, or a variable: ``$HPCTK_TIME``, which has no key."""
    key: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.key}" if self.key else self.file


class MergedFacts:
    """Fields of a cluster and their origins, while files are merged."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}

    def add(self, table: dict[str, Any], file: str) -> None:
        """Override earlier values with those of ``table``; inner tables merge key by key."""
        values = t.convert(table, KEYS, file)
        for key, stated in table.items():
            field = KEYS[key][0]
            if isinstance(stated, dict):
                for inner, value in values[field]:
                    # Of [defaults.sbatch] too, whose options may be fields of a request.
                    told = inner if inner in stated or "." in inner else f"sbatch.{inner}"
                    self.set_inner(field, inner, value, Origin(file=file, key=f"{key}.{told}"))
            else:
                self.values[field] = values[field]
                self.origins[key] = Origin(file=file, key=key)

    def add_variables(self, environ: Mapping[str, str]) -> None:
        """Override ``[defaults]`` with environment variables; empty ones are ignored."""
        for variable, option in VARIABLES.items():
            text = environ.get(variable)
            if text:
                where = f"${variable}"
                number = OPTIONS[option].value.word is int and re.fullmatch("[0-9]{1,9}", text)
                value = keys.Option(option)(int(text) if number else text, where)
                self.set_inner("defaults", option, value, Origin(where))

    def set_inner(self, field: str, inner: str, value: Any, origin: Origin) -> None:
        pairs: dict[str, Any] = self.values.setdefault(field, {})
        if field == "defaults":
            # Slurm takes only one memory option, so a later layer's replaces an earlier one.
            for other in rivals_of(inner):
                pairs.pop(other, None)
                self.origins.pop(f"{field}.{other}", None)
        pairs[inner] = value
        self.origins[f"{field}.{inner}"] = origin
