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
