"""Make submitit executors from a cluster's facts, with the options and checks of ``hpctk render``.

Every value passes through a :class:`~hpc_toolkit.slurm.render.spec.ScriptSpec` first, because
submitit writes values into the script unchecked, newlines included.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from hpc_toolkit.errors import ConfigError, RenderError, near_miss
from hpc_toolkit.slurm import client as slurm
from hpc_toolkit.slurm.clusters.choice import resolve_cluster
from hpc_toolkit.slurm.clusters.facts import Cluster
from hpc_toolkit.slurm.render.directives import complete, directives
from hpc_toolkit.slurm.render.spec import read_spec
from hpc_toolkit.slurm.render.surroundings import surroundings
from hpc_toolkit.slurm.render.values import PASSED
from hpc_toolkit.slurm.sbatch import sbatch, sbatch_argv
from hpc_toolkit.submit.send import check_directory, note_overrides
from hpc_toolkit.system.gpus import visible_gpus
from hpc_toolkit.system.quantities import MINUTE_S
from hpc_toolkit.system.ranks import without_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import submitit

    from hpc_toolkit.slurm.render.spec import ScriptSpec

LOCAL = "local"
"""The cluster name for this machine: the same calls, without Slurm."""

_YEAR_MIN = 60 * 24 * 365
_MAX_ARRAY_SIZE = 1001
"""Slurm's default of MaxArraySize; see slurm.conf(5)."""

_OWN_OPTIONS = (
    *("job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "no-kill"),
    *("signal", "open-mode", "output"),
)


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


def executor(
    cluster: str | Cluster | None = None, *, folder: str | Path, **resources: Unpack[Resources]
) -> submitit.AutoExecutor:
    """Make a submitit executor for jobs on ``cluster``, to ``submit`` and ``map_array`` as usual.

    A submission does not inherit the variables of a job around this process, and arrays are split
    at the cluster's limit. The parameters are fixed; another request needs another executor.

    Args:
        cluster: a name of ``hpctk cluster list``, the path of a TOML file, the facts themselves, or
            "local": processes on this machine, with the environment and GPUs of this process, for
            which most resources except ``time`` and ``gpus_per_node`` have no effect. None:
            ``$HPCTK_CLUSTER``, else the cluster that is recognized here.
        folder: where submitit keeps scripts, logs and pickles; must be shared with the nodes.
        resources: see :class:`Resources`.

    Raises ConfigError, RenderError: a value that no job can have, or that this cluster cannot
    provide.
    """
    request = requested(resources)
    place = _checked_folder(Path(folder))
    site = resolved(cluster)
    if site is None:
        return _local(request, place, gpus=resources.get("gpus_per_node"))
    if site.node_setup:
        msg = f"{site.written('node_setup')}: jobs from notebooks cannot run commands once per node"
        hint = "pass a cluster with node_setup=() if they are not needed, or render"
        raise ConfigError(msg, hint=f"{hint} a script")
    check_directory(site, Path.cwd())
    full = complete(request, site)
    made = _new("slurm", request, site, place, full.max_restarts if full.requeue else 0)
    made.configure(**slurm_parameters(full, site))
    # Sites that track these keys refuse jobs with an unknown key.
    made.parameters["wckey"] = None
    return made


def resolved(cluster: str | Cluster | None) -> Cluster | None:
    """The facts of the ``cluster`` given to :func:`executor`; None for this machine.

    Raises ConfigError: no such cluster.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if (cluster or os.environ.get("HPCTK_CLUSTER")) == LOCAL:
        return None
    found = resolve_cluster(cluster)
    sys.stderr.writelines(f"note: {note}\n" for note in found.notes)
    return found.cluster


def _checked_folder(folder: Path) -> Path:
    """The absolute path; refuses one that sbatch cannot read or that everybody can write to."""
    place = folder.expanduser().absolute()
    text = str(place)
    # Slurm expands % and the letter after it, and drops backslashes inside submitit's quotes.
    if not text.isprintable() or set(text) & set("\\%"):
        msg = f"folder: {text!r} cannot be part of an sbatch directive"
        raise RenderError(msg, hint="choose a path without '%', backslashes and control characters")
    # Pickles are loaded from there, on the nodes and here.
    if place.exists() and place.stat().st_mode & 0o002:
        msg = f"folder: {text!r} is world-writable, and files in it are executed"
        raise ConfigError(msg, hint=f"choose a directory below it, such as {place / 'jobs'}")
    return place


def slurm_parameters(full: ScriptSpec, site: Cluster) -> dict[str, Any]:
    options = dict(directives(full, site))
    for name, value in options.items():
        if value is not None and (not value.isprintable() or "\\" in value):
            msg = f"--{name}: {value!r} cannot be part of submitit's script"
            raise RenderError(msg, hint="remove backslashes and control characters")
    # Every other option is passed under its own name, as in a script: submitit would write
    # memory in other units, has no GPU type, and would keep two forms of a GPU request.
    # Without no-kill: a function on several nodes cannot go on after one of them is lost.
    for own in _OWN_OPTIONS:
        options.pop(own, None)
    return {
        "name": full.job_name,
        "nodes": full.nodes,
        "tasks_per_node": full.ntasks_per_node,
        "cpus_per_task": full.cpus_per_task,
        # Not text: submitit multiplies this number when the time limit comes.
        "timeout_min": -(-(full.time or 0) // MINUTE_S),
        "slurm_signal_delay_s": int((full.signal or "").rpartition("@")[2]),
        "slurm_setup": _setup(full, site),
        # From 22.05 to 23.02 srun ignores SLURM_CPUS_PER_TASK.
        "slurm_srun_args": [f"--cpus-per-task={full.cpus_per_task}"],
        # By default no more than 256 elements would run at a time.
        "slurm_array_parallelism": site.max_array_size or _MAX_ARRAY_SIZE,
        "slurm_additional_parameters": {
            name: True if value is None else value for name, value in options.items()
        },
    }


def _setup(full: ScriptSpec, site: Cluster) -> list[str]:
    """Lines before the step; each exits on failure, because submitit's script would go on."""
    around = surroundings(full, site, [], "command", None)
    lines = [
        # After 'sbatch --export=NONE' srun would start its tasks with an empty environment.
        "export SLURM_EXPORT_ENV=ALL",
        "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}",
    ]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in around.env]
    steps = [*around.preparation, *around.setup]
    if steps and site.login_shell:
        lines.append("source /etc/profile")
    for words, failure in steps:
        said = shlex.quote(f"hpctk: {failure}")
        lines.append(f"{shlex.join(words)} || {{ echo {said} >&2; exit 1; }}")
    return lines


def _local(request: ScriptSpec, folder: Path, *, gpus: int | None) -> submitit.AutoExecutor:
    if request.nodes > 1:
        msg = f"nodes: {request.nodes} nodes were requested, but this machine is one node"
        raise ConfigError(msg, hint="on a cluster, name it, such as cluster='generic'")
    if request.modules or request.setup or request.env:
        sys.stderr.write("note: modules, setup, env: local jobs have this notebook's environment\n")
    found = visible_gpus()
    if gpus is not None and gpus > len(found):
        sys.stderr.write(f"note: {gpus} GPUs were requested, and {len(found)} are here\n")
    used = found if gpus is None else found[:gpus]
    made = _new("local", request, None, folder, request.max_restarts if request.requeue else 0)
    made.configure(
        name=request.job_name,
        nodes=1,
        tasks_per_node=request.ntasks_per_node or 1,
        timeout_min=-(-request.time // MINUTE_S) if request.time else _YEAR_MIN,
    )
    # Not by update_parameters: it takes only numbers, but CUDA_VISIBLE_DEVICES may hold names.
    made.parameters.update(gpus_per_node=len(used), visible_gpus=tuple(used))
    return made


def _new(kind: str, request: ScriptSpec, site: Cluster | None, folder: Path, restarts: int) -> Any:
    try:
        made = _executor_class()(folder, cluster=kind, **{f"{kind}_max_num_timeout": restarts})
    except RuntimeError as error:
        msg = f"no Slurm here: {error}"
        raise ConfigError(msg, hint="use cluster='local' to work on this machine") from error
    made.request, made.site = request, site
    return made


@functools.cache
def _executor_class() -> type[Any]:
    # Made at the first call, because submitit is slow to import.
    import submitit

    class SiteExecutor(submitit.AutoExecutor):  # type: ignore[misc] # submitit is not followed
        """A submitit executor whose parameters come from a checked request."""

        request: ScriptSpec
        """The request, without defaults of the cluster."""
        site: Cluster | None
        """The cluster's facts; None for this machine."""

        def configure(self, **parameters: Any) -> None:
            super().update_parameters(**parameters)

        def update_parameters(self, **kwargs: Any) -> None:
            """Refuse every change, because nothing would check the values."""
            msg = f"{', '.join(kwargs)}: the parameters of this executor are fixed"
            hint = "create another executor with hpc_toolkit.notebook.executor"
            raise ConfigError(msg, hint=hint)

        def _internal_process_submissions(self, delayed_submissions: Sequence[Any]) -> list[Any]:
            size = (self.site.max_array_size if self.site else None) or _MAX_ARRAY_SIZE
            jobs: list[Any] = []
            try:
                with _new_job_environment(self.cluster):
                    for first in range(0, len(delayed_submissions), size):
                        part = delayed_submissions[first : first + size]
                        jobs += super()._internal_process_submissions(part)
            except slurm.SlurmError as error:
                hint = f"hpc_toolkit.notebook.preview shows the script; {error.hint}"
                if jobs:
                    arrays = ", ".join(dict.fromkeys(job.job_id.partition("_")[0] for job in jobs))
                    hint = f"{len(jobs)} elements were accepted and will run; 'scancel {arrays}'"
                    hint += f" cancels them; {error.hint}"
                raise type(error)(error.message, hint=hint) from error
            return jobs

    return SiteExecutor


def _submit_once(_: Any, script: Path) -> list[str]:
    """Submit for submitit, which reads the id from the output of the returned command."""
    accepted = sbatch(sbatch_argv(script), script.read_text(encoding="utf-8"))
    return ["echo", f"Submitted batch job {accepted.job}"]


@contextmanager
def _new_job_environment(kind: str) -> Iterator[None]:
    """Temporarily remove variables that a new job must not inherit, and submit with retries."""
    import submitit

    kept, submits = dict(os.environ), submitit.SlurmExecutor._make_submission_command
    inherited = without_rank()
    if kind == "slurm":
        # In the class, because submitit makes another executor for an array.
        submitit.SlurmExecutor._make_submission_command = _submit_once
        # It would rename the job, and a job with another name than recorded counts as foreign.
        os.environ.pop("SBATCH_JOB_NAME", None)
        note_overrides()
        inherited = slurm.clean_environment()
    for name in os.environ.keys() - inherited.keys():
        del os.environ[name]
    try:
        yield
    finally:
        submitit.SlurmExecutor._make_submission_command = submits
        os.environ.update(kept)


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
    kinds: dict[str, Any] = {"modules": (list, tuple), "setup": (list, tuple), "env": (dict,)}
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
    return read_spec({"python": os.path.abspath(sys.executable), "sbatch": passed, **given})
