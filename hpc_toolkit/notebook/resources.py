"""Resources of workers' jobs, with the options and checks of ``hpctk render``."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TypedDict

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.slurm.clusters.choice import resolve_cluster
from hpc_toolkit.slurm.clusters.facts import Cluster
from hpc_toolkit.slurm.render.spec import DEFAULTS, read_spec
from hpc_toolkit.slurm.render.values import PASSED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.slurm.render.spec import ScriptSpec

LOCAL = "local"
"""The cluster name for this machine: the same calls, without Slurm."""


class Resources(TypedDict, total=False):
    """Resources of a job, named as in ``hpctk render``; None leaves the choice to the cluster."""

    job_name: str | None
    account: str | None
    partition: str | None
    qos: str | None
    reservation: str | None
    constraint: str | None
    nodelist: str | None
    prefer: str | None
    exclude: str | None
    licenses: str | None
    wckey: str | None
    nodes: int | None
    ntasks_per_node: int | None
    gpus_per_node: int | None
    gpu_type: str | None
    isolate_gpus: bool | None
    cpus_per_task: int | None
    mem: str | None
    """Of each node; sizes are text with a unit, such as "480G", and "0" is all of the memory."""
    mem_per_cpu: str | None
    mem_per_gpu: str | None
    exclusive: bool | str | None
    time: str | int | None
    """Time limit: minutes, or text as sbatch reads it."""
    dependency: str | None
    requeue: bool | None
    max_restarts: int | None
    comment: str | None
    mail_type: str | None
    mail_user: str | None
    modules: Sequence[str] | None
    setup: Sequence[str] | None
    env: dict[str, str] | None
    conda: str | None
    venv: str | None
    container: str | None
    bind: Sequence[str] | None
    node_setup: Sequence[str] | None
    teardown: Sequence[str] | None
    gres: str | None
    time_min: str | None
    idle_exit: str | None
    output: str | None
    chdir: str | None
    sbatch: Sequence[str] | None
    """Any other option of sbatch, such as "gpu-freq=low"."""


def resolved(cluster: str | Cluster | None) -> Cluster | None:
    """The facts of a ``cluster``; None for this machine.

    Raises ConfigError: no such cluster.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if (cluster or os.environ.get("HPCTK_CLUSTER")) == LOCAL:
        return None
    found = resolve_cluster(cluster)
    sys.stderr.writelines(f"note: {note}\n" for note in found.notes)
    return found.cluster


def requested(resources: Resources) -> ScriptSpec:
    """Check the resources and turn them into the request for a script.

    Raises ConfigError, RenderError: an unknown resource, or a value that no script could contain.
    """
    given: dict[str, Any] = {key: value for key, value in resources.items() if value is not None}
    known = list(Resources.__annotations__)
    for word in given:
        if word not in known:
            msg = f"{word}: unknown resource"
            raise ConfigError(msg, hint=near_miss(word.removeprefix("slurm_"), known))
    if type(given.get("time")) is int:  # True is not a time
        given["time"] = str(given["time"])
    lists = {word: (list, tuple) for word in known if type(DEFAULTS.get(word)) is tuple}
    kinds: dict[str, Any] = {**lists, "env": (dict,)}
    for word, wanted in kinds.items():
        value = given.get(word, wanted[0]())
        if not isinstance(value, wanted):
            msg = f"{word}: {value!r} is not a {wanted[0].__name__}"
            raise ConfigError(msg, hint="such as modules=['cuda/12'] or env={'NAME': 'value'}")
        given[word] = tuple(value.items() if isinstance(value, dict) else value)
    passed = tuple(
        f"{name}={given.pop(word)}" for name in PASSED if (word := name.replace("-", "_")) in given
    )
    # Not resolved: Python uses a virtual environment only if it is started by the link in it.
    python = os.path.abspath(sys.executable)
    return read_spec({"python": python, **given, "sbatch": (*given["sbatch"], *passed)})
