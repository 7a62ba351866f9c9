"""The facts of a site that a job script depends on, read from one TOML file per site.

A file states facts and where they come from. Nothing here asks a scheduler, so that a script is the
same on a laptop and on the login node.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from hpc_toolkit import tomltable as t
from hpc_toolkit.errors import ConfigError, near_miss

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

GpuRequest = Literal["gpus-per-node", "gres", "gpus-per-task"]
MemStyle = Literal["mem", "mem-per-cpu", "mem-per-gpu", "none"]

DEFAULT_OPTIONS = ("time", "cpus_per_task", "mem", "mem_per_cpu", "partition", "qos", "constraint")
"""sbatch options that a site may give a default in its ``[defaults]`` table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One partition of a site."""

    name: str
    """Its name in Slurm."""
    max_walltime_s: int
    """Longest job that it accepts, in seconds."""
    nodes: int | None = None
    """How many nodes it has; None where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The facts of one site. None means unknown, and an unknown limit is not checked."""

    name: str
    """The name for ``--cluster``; the stem of the file."""
    file: str
    """Where the facts are written; errors name it."""
    description: str = ""
    """One line for people."""
    source: str = ""
    """URL of the page or file that the facts were taken from."""
    checked: str = ""
    """Date of that look, ISO 8601."""
    verified: bool = False
    """Whether a job of ours has run there with these facts."""
    nodes: int | None = None
    """How many nodes one job can get at most."""
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
    mem_style: MemStyle = "mem"
    """The option in which this site wants memory asked for; "none" where it sets memory itself."""
    max_walltime_s: int | None = None
    """Longest job, in seconds."""
    account_required: bool = False
    """Whether sbatch refuses a job without ``--account``."""
    account_hint: str = ""
    """What an account looks like there."""
    partitions: tuple[Partition, ...] = ()
    """Partitions whose limits are known; the list may be incomplete."""
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
    nccl: tuple[tuple[str, str], ...] = ()
    """What NCCL and its transports must be told about this site's network."""
    login_shell: bool = False
    """Whether scripts need ``bash -l``, so that ``module`` is defined."""
    conda_base: str | None = None
    """Where the site's conda is installed."""
    container_runtime: Literal["apptainer", "pyxis"] | None = None
    """What runs containers there; None where unknown."""
    binds: tuple[str, ...] = ()
    """Directories that every container sees, ``FROM[:TO[:ro]]``."""
    max_array_size: int | None = None
    """Slurm's MaxArraySize: the highest index of an array is one less."""
    shrink_jobs: bool = False
    """Whether a running job may give nodes back."""
    defaults: tuple[tuple[str, str | int], ...] = ()
    """Values of DEFAULT_OPTIONS for a script that does not say otherwise."""
    facts: tuple[tuple[str, str], ...] = ()
    """What else a user should know; shown, never interpreted."""

    def written(self, key: str) -> str:
        """Where a fact is written, for an error: ``clusters/lab.toml: gpus_per_node``."""
        return f"{self.file}: {key}"


def cluster_names() -> list[str]:
    """Names of the built-in sites, sorted."""
    files = [entry.name for entry in _builtin().iterdir()]
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def load_cluster(name: str) -> Cluster:
    """The site called ``name``: a built-in one, or the path of a TOML file (with "/" or ".toml").

    Raises ConfigError: unknown name, unreadable file, unknown key, value out of range.
    """
    if not name.isprintable():
        msg = f"--cluster: {name!r} holds a control character"
        raise ConfigError(msg, hint=f"known: {', '.join(cluster_names())}")
    if "/" in name or name.endswith(".toml"):
        path = Path(name)
        return parse_cluster(_read(path, name), file=name, name=path.name.removesuffix(".toml"))
    if name not in cluster_names():
        msg = f"--cluster: no cluster is called {name!r}"
        hint = f"{near_miss(name, cluster_names())}; or give the path of a TOML file"
        raise ConfigError(msg, hint=hint)
    file = f"clusters/{name}.toml"
    return parse_cluster(_read(_builtin() / f"{name}.toml", file), file=file, name=name)


@functools.cache
def _builtin() -> Traversable:
    return resources.files("hpc_toolkit") / "clusters"


def _read(source: Traversable | Path, file: str) -> str:
    try:
        return source.read_text(encoding="utf-8")
    except OSError as error:
        msg = f"{file}: cannot be read: {error.strerror}"
        raise ConfigError(msg, hint="'hpctk cluster list' shows the built-in ones") from None
    except UnicodeDecodeError:
        msg = f"{file}: is not UTF-8 text"
        raise ConfigError(msg, hint="a cluster file is TOML") from None


def parse_cluster(text: str, *, file: str, name: str) -> Cluster:
    """The site that ``text`` describes; ``file`` is what errors call it. Raises ConfigError."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        msg = f"{file}: {error}"
        raise ConfigError(msg, hint="a cluster file is TOML") from None
    values = t.convert(table, _KEYS, file)
    return Cluster(file=file, name=t.word(name, f"{file}: its name"), **values)


def _defaults(value: object, where: str) -> tuple[tuple[str, str | int], ...]:
    if not isinstance(value, dict):
        raise t.wrong(where, value, "a table")
    keys: dict[str, t.Key] = {option: (option, t.text) for option in DEFAULT_OPTIONS}
    keys["cpus_per_task"] = ("cpus_per_task", t.count)
    return tuple(t.convert(value, keys, where).items())


def _partitions(value: object, where: str) -> tuple[Partition, ...]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise t.wrong(where, value, "a list of [[partitions]] tables")
    for entry in value:
        if not {"name", "max_walltime"} <= entry.keys():
            msg = f"{where}: needs 'name' and 'max_walltime', but has {sorted(entry)}"
            raise ConfigError(msg, hint="remove the partition if its limit is not known")
    return tuple(Partition(**t.convert(entry, _PARTITION_KEYS, where)) for entry in value)


_PARTITION_KEYS: dict[str, t.Key] = {
    "name": ("name", t.word),
    "max_walltime": ("max_walltime_s", t.walltime),
    "nodes": ("nodes", t.count),
}

_KEYS: dict[str, t.Key] = {
    "description": ("description", t.text),
    "source": ("source", t.url),
    "checked": ("checked", t.date),
    "verified": ("verified", t.flag),
    "nodes": ("nodes", t.count),
    "gpus_per_node": ("gpus_per_node", t.count_or_zero),
    "gpu_type": ("gpu_type", t.word),
    "gpu_request": ("gpu_request", t.choice(get_args(GpuRequest))),
    "cpus_per_node": ("cpus_per_node", t.count),
    "mem_per_node": ("mem_per_node_mib", t.mem),
    "mem_style": ("mem_style", t.choice(get_args(MemStyle))),
    "max_walltime": ("max_walltime_s", t.walltime),
    "account_required": ("account_required", t.flag),
    "account_hint": ("account_hint", t.text),
    "partitions": ("partitions", _partitions),
    "forbidden_submit_dirs": ("forbidden_submit_dirs", t.texts),
    "modules": ("modules", t.texts),
    "setup": ("setup", t.texts),
    "env": ("env", t.pairs),
    "node_setup": ("node_setup", t.texts),
    "nccl": ("nccl", t.pairs),
    "login_shell": ("login_shell", t.flag),
    "conda_base": ("conda_base", t.text),
    "container_runtime": ("container_runtime", t.choice(("apptainer", "pyxis"))),
    "binds": ("binds", t.texts),
    "max_array_size": ("max_array_size", t.count),
    "shrink_jobs": ("shrink_jobs", t.flag),
    "defaults": ("defaults", _defaults),
    "facts": ("facts", t.pairs),
}
