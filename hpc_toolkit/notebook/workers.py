"""Submit workers of a run as submitit jobs: the shape of the jobs, their script, the submission."""

from __future__ import annotations

import shlex
import signal
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from hpc_toolkit.errors import ConfigError, HpcToolkitError, RunError
from hpc_toolkit.notebook.executors import LOCAL, Resources, requested, resolved
from hpc_toolkit.notebook.executors import executor as make_executor
from hpc_toolkit.notebook.jobs import WorkerJobs, submission_folder
from hpc_toolkit.notebook.rank import own_identity, work_rank
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.trust import refuse_untrusted
from hpc_toolkit.slurm.batch.step import NO_MPI
from hpc_toolkit.system.processes import handling
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.slurm.clusters.facts import Cluster

MAX_RANKS = 65536
"""Largest number of workers in one call; more is a mistake."""

# An array's id alone would mean all of its elements.
_SETUP = """\
hpctk_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
hpctk_job=${hpctk_job:-$SLURM_JOB_ID}
unset HPCTK_DEADLINE
hpctk_end=${SLURM_JOB_END_TIME:-} # older Slurms do not set it
if [[ -z $hpctk_end ]]; then
  hpctk_end=$(SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$hpctk_job" --format=%e)
fi
if [[ $hpctk_end =~ ^[0-9]+$ ]]; then export HPCTK_DEADLINE=$hpctk_end; fi"""

_TEARDOWN = """\
hpctk_rc=$?
hpctk_left=$({count_left}) || hpctk_left=unknown
echo "hpctk: the step ended with code $hpctk_rc, items left: $hpctk_left"
if [[ $hpctk_left == 0 ]]; then exit 0; fi
# 75: items are left. Above 128: a rank was killed. Any other is an error that would come again.
if (( hpctk_rc != 75 && hpctk_rc <= 128 )); then exit "$hpctk_rc"; fi
# The scheduler's count: a job that this one submits inherits the variable. A cancelled job must
# stay cancelled, and scontrol would requeue it too.
hpctk_answer=$(squeue --noheader --jobs="$hpctk_job" --Format=State:20,RestartCnt:10)
read -r hpctk_state hpctk_restarts <<< "$hpctk_answer"
if [[ $hpctk_state != RUNNING ]]; then exit 75; fi
if (( ${{hpctk_restarts:-0}} >= {restarts} )); then exit 75; fi
trap 'exit 0' TERM # requeueing ends this script
scontrol requeue "$hpctk_job" || exit 75
exit 0"""

_COUNT_LEFT = (
    "import pathlib, sys; from hpc_toolkit.slurm.batch.work import read_left; "
    "sys.stdout.write(str(read_left(pathlib.Path(sys.argv[1]), 0).items))"
)


def submit_workers(
    run: Run | str | Path,
    n: int,
    *,
    executor: Any = None,
    cluster: str | Cluster | None = None,
    folder: str | Path | None = None,
    array: bool = False,
    **resources: Unpack[Resources],
) -> WorkerJobs:
    """Submit ``n`` workers of a run: one job of ``n`` ranks, or an array of small jobs.

    A job starts again while items are left, as a rendered script does. Only one function of this
    package and the run's path are pickled. Local workers leave when this process ends.

    Args:
        run: the run, or its directory, which the nodes must see.
        n: number of workers; with GPUs one for each, unless the resources say otherwise.
        executor: from :func:`hpc_toolkit.notebook.executor`; None: made from the arguments below.
        cluster: as for ``executor``.
        folder: as for ``executor``; by default ``submitit`` below the run.
        array: submit jobs of one node each, which start and end independently of each other.
        resources: as for ``executor``; ``nodes`` follows from ``n`` if it is left out.

    Raises:
        ConfigError, RenderError: ``n`` workers cannot be submitted in this shape.
        RunError: the run is complete, or others could change what it executes.
        SlurmError: Slurm refused the job.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    refuse_untrusted(run.root)
    if run.status(forecast=False).complete:
        msg = f"{run.root} is complete: no items are left"
        raise RunError(msg, hint="run.retry() makes failed items pending")
    if type(n) is not int or not 1 <= n <= MAX_RANKS:
        msg = f"n: {n!r} is not a number of workers"
        raise ConfigError(msg, hint=f"a whole number from 1 to {MAX_RANKS}")
    if executor is None:
        site = resolved(cluster)
        place = folder if folder is not None else submission_folder(run)
        if site is not None:
            resources = _shape(n, resources, array=array)
        executor = make_executor(LOCAL if site is None else site, folder=place, **resources)
    elif resources or cluster is not None or folder is not None:
        msg = "executor: cannot be combined with a cluster, folder or resources"
        raise ConfigError(msg, hint="pass them to hpc_toolkit.notebook.executor")
    return WorkerJobs.submitted(run, n, executor, _submit(run, n, executor, array=array))


def preview(executor: Any, run: Run | str | Path | None = None) -> str:
    """The script that submitit would give to sbatch, ending in a newline.

    Args:
        executor: any executor of submitit.
        run: show what ``submit_workers(run, ...)`` would send; None: what ``submit`` would.

    Raises HpcToolkitError: this version of submitit does not show it.
    """
    import submitit

    inner = getattr(executor, "_executor", executor)
    try:
        with nullcontext() if run is None else _for_workers(executor, run):
            command = inner._submitit_command_str
            text = inner._make_submission_file_text(command, "preview")
    except (AttributeError, TypeError) as error:
        msg = f"submitit {submitit.__version__} does not show what it would submit: {error}"
        raise HpcToolkitError(msg, hint="submitit 1.5.4 does; submitting still works") from error
    if not text:
        return f"# processes on this machine; nothing is given to sbatch\n{command}\n"
    return f"{text.rstrip()}\n"


def _shape(n: int, resources: Resources, *, array: bool) -> Resources:
    """``resources`` with nodes and ranks per node for ``n`` workers, or for one job of an array."""
    # Refuse a wrong type before calculating with it.
    requested(resources)
    ranks, nodes = resources.get("ntasks_per_node"), resources.get("nodes")
    gpus = resources.get("gpus_per_node")
    if array:
        nodes, ranks = nodes or 1, ranks or gpus or 1
    elif nodes is None:
        ranks = ranks or gpus or n
        nodes = max(1, n // ranks)
    else:
        ranks = ranks or max(1, n // nodes)
    return {**resources, "nodes": nodes, "ntasks_per_node": ranks}


def _submit(run: Run, n: int, executor: Any, *, array: bool) -> list[Any]:
    root = str(run.root.absolute())
    with _for_workers(executor, run):
        if executor.cluster == LOCAL:
            # A notebook's interrupt reaches its kernel's whole process group.
            with handling([signal.SIGINT], signal.SIG_IGN):
                return [executor.submit(work_rank, root, n, own_identity())]
        request = executor.request
        ranks = request.nodes * request.ntasks_per_node
        if n % ranks or (n != ranks and not array):
            nodes = counted(request.nodes, "node")
            msg = f"n: {n} workers are not {nodes} x {request.ntasks_per_node} ranks"
            hint = "change n, nodes or ntasks_per_node; array=True submits several such jobs"
            raise ConfigError(msg, hint=hint)
        if n == ranks:
            return [executor.submit(work_rank, root)]
        return list(executor.map_array(work_rank, [root] * (n // ranks)))


@contextmanager
def _for_workers(executor: Any, run: Run | str | Path) -> Iterator[None]:
    """Temporarily set up ``executor`` to submit workers of ``run``."""
    if not hasattr(executor, "request"):
        msg = f"executor: {type(executor).__name__} was not made by hpc_toolkit"
        raise ConfigError(msg, hint="create it with hpc_toolkit.notebook.executor")
    root = run.root if isinstance(run, Run) else Path(run)
    kept = dict(executor.parameters)
    if executor.cluster == LOCAL:
        executor.parameters["tasks_per_node"] = 1
    else:
        executor.parameters.update(_worker_parameters(executor, str(root.absolute())))
    try:
        yield
    finally:
        executor.parameters.clear()
        executor.parameters.update(kept)


def _worker_parameters(executor: Any, root: str) -> dict[str, Any]:
    old, request = executor.parameters, executor.request
    count_left = shlex.join([request.python, "-P", "-c", _COUNT_LEFT, root])
    restarts = request.max_restarts if request.requeue else 0
    # If a rank exits for lack of work, or a rank or node is lost, the other ranks must go on.
    going_on = [NO_MPI, "--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
    return {
        "setup": [*old["setup"], _SETUP],
        "teardown": [_TEARDOWN.format(count_left=count_left, restarts=restarts)],
        "srun_args": [*old["srun_args"], *going_on],
        "additional_parameters": {**old["additional_parameters"], "no-kill": True},
    }
