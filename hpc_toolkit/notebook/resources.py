"""Resources that a job from a notebook can request, and their checks."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TypedDict

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.slurm.render.grammar import PASSED
from hpc_toolkit.slurm.render.spec import read_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.slurm.render.spec import ScriptSpec


class Resources(TypedDict, total=False):
    """Resources of a job, named as in ``hpctk render``; None leaves the choice to the cluster."""

    job_name: str | None
    """Name of the job."""
    account: str | None
    """Account to charge."""
    partition: str | None
    """Comma-separated partitions."""
    qos: str | None
    """Quality of service."""
    reservation: str | None
    """Comma-separated reservations."""
    constraint: str | None
    """Node features."""
    nodelist: str | None
    """Nodes that must be used."""
    prefer: str | None
    """Node features that are preferred but not required."""
    exclude: str | None
    """Nodes that must not be used."""
    licenses: str | None
    """Licences that the job holds."""
    wckey: str | None
    """Key under which the site accounts for the job."""
    nodes: int | None
    """Number of nodes."""
    ntasks_per_node: int | None
    """Ranks on each node; by default one per GPU."""
    gpus_per_node: int | None
    """GPUs on each node."""
    gpu_type: str | None
    """Type of the GPUs."""
    isolate_gpus: bool | None
    """Whether each rank sees its own GPUs only."""
    cpus_per_task: int | None
    """CPUs of a rank."""
    mem: str | None
    """Memory of each node with its unit, such as "480G"; "0" is all of it."""
    mem_per_cpu: str | None
    """Memory per CPU."""
    mem_per_gpu: str | None
    """Memory per GPU."""
    exclusive: bool | str | None
    """Share the nodes with no other job."""
    time: str | int | None
    """Time limit: minutes, or text as sbatch reads it."""
    dependency: str | None
    """Jobs that must have started or ended before, such as "afterok:123"."""
    requeue: bool | None
    """Whether the job may start again."""
    max_restarts: int | None
    """How often the job may start again because of its time limit."""
    comment: str | None
    """A remark that Slurm keeps."""
    mail_type: str | None
    """Events that send mail."""
    mail_user: str | None
    """Recipient of the mail."""
    modules: Sequence[str] | None
    """Environment modules to load, after the cluster's."""
    setup: Sequence[str] | None
    """Commands to run first, after the cluster's; the job ends when one fails."""
    env: dict[str, str] | None
    """Variables to export, after the cluster's."""


def requested(resources: Resources) -> ScriptSpec:
    """Check the resources and turn them into the request for a script.

    Raises ConfigError, RenderError: an unknown resource, or a value that no script could contain.
    """
    given: dict[str, Any] = {key: value for key, value in resources.items() if value is not None}
    known = list(Resources.__annotations__)
    for word in given:
        if word not in known:
            msg = f"{word}: no resource of a job is called so"
            raise ConfigError(msg, hint=near_miss(word.removeprefix("slurm_"), known))
    if "time" in given:
        given["time"] = _time_text(given["time"])
    for word in ("modules", "setup"):
        if not isinstance(given.get(word, ()), list | tuple):
            msg = f"{word}: {given[word]!r} is not a list"
            raise ConfigError(msg, hint=f"write [{str(given[word])!r}]")
        given[word] = tuple(given.get(word, ()))
    if not isinstance(given.get("env", {}), dict):
        msg = f"env: {given['env']!r} is not a dict of names and values"
        raise ConfigError(msg, hint="write {'NAME': 'value'}")
    given["env"] = tuple(given.get("env", {}).items())
    passed = tuple(
        f"{name}={given.pop(word)}" for name in PASSED if (word := name.replace("-", "_")) in given
    )
    # Not resolved: Python uses a virtual environment only if it is started by the link in it.
    return read_spec({"python": os.path.abspath(sys.executable), "sbatch": passed, **given})


def _time_text(time: object) -> str:
    # type(), not isinstance(): True is not a time.
    if type(time) is int or isinstance(time, str):
        return str(time)
    msg = f"time: {time!r} is neither minutes nor text"
    raise ConfigError(msg, hint="write whole minutes, or '4:00:00'")
