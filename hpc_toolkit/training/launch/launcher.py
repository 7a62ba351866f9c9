"""``hpctk launch``: run the same training script on a laptop and on the nodes of a job.

A task that srun started becomes a rank itself, and no agent runs beside it. A child of rank 0
serves the store in which the ranks meet. Rank 0 takes the port before it publishes it, so that two
jobs on a node cannot choose the same port.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.batch.node import usable_gpus
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.training.launch import meeting
from hpc_toolkit.training.launch import plan as plans
from hpc_toolkit.training.launch.meeting import Address
from hpc_toolkit.training.launch.plan import Step
from hpc_toolkit.training.launch.rank import ignore_warnings
from hpc_toolkit.training.launch.ranks import rank_variables
from hpc_toolkit.training.launch.rendezvous import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.training.launch.outcome import Outcome
    from hpc_toolkit.training.launch.plan import Plan, Request


def launch(request: Request, *, replace: bool = False) -> Outcome:
    """Start the ranks of this node, or become one of them, and wait until they have ended.

    Args:
        request: the script and its options.
        replace: this process has no other purpose. If srun started every rank, it becomes one
            and does not return; otherwise signals do not end it once the outcome is known.

    Raises HpcToolkitError if the launch cannot start; nothing was started.
    """
    plan = planned(request)
    if importlib.util.find_spec("torch") is None:
        message = "launch needs torch, which is not installed"
        raise ConfigError(message, hint=how_to_add(extra="torch"))
    environ = {**os.environ, **surroundings(plan, os.environ)}
    if plan.form == "task":
        if not replace:
            message = "srun has started every rank here, so 'hpctk launch' has nothing to start"
            hint = "start one task per node with srun, or call the script directly"
            raise ConfigError(message, hint=hint)
        become(command(request), {**environ, **join_ranks(plan)})
    if told := plans.left_out(request, plan):
        sys.stderr.write(f"warning: {told}\n")
    from hpc_toolkit.training.launch.agent import run_agent

    return run_agent(plan, command(request), environ, last=replace)


def planned(request: Request) -> Plan:
    """Return the plan of :func:`launch` for this process, without starting anything.

    Raises:
        HpcToolkitError: as in :func:`launch`.
    """
    request = plans.check_request(request)
    step = plans.Step.from_environ()
    gpus = usable_gpus(os.environ)
    backend = request.backend or ("nccl" if gpus and _has_driver() else "gloo")
    if step is not None and not step.per_node:
        return plans.task_plan(request, step, backend=backend)
    if (asked := request.options.get("nproc_per_node")) is not None:
        ranks = count_ranks(str(asked))
    elif step is not None:
        granted = os.environ.get("SLURM_GPUS_ON_NODE", "")
        ranks = max(1, gpus or (int(granted) if granted.isdecimal() else 0))
    else:
        ranks = 1
    return plans.make_plan(request, step=step, ranks=ranks, backend=backend)


def command(request: Request) -> list[str]:
    """Return the command line of one rank."""
    if request.options.get("no_python"):
        return [request.script, *request.arguments]
    module = ["-m"] if request.options.get("module") else []
    return [sys.executable, "-u", *module, request.script, *request.arguments]


def surroundings(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every rank of this node gets in addition to torchrun's."""
    found = {"HPCTK_BACKEND": plan.backend}
    if plan.run_dir is not None:
        found["HPCTK_RUN_DIR"] = str(plan.run_dir)
    if end := environ.get("SLURM_JOB_END_TIME"):
        found["HPCTK_DEADLINE"] = end
    if "OMP_NUM_THREADS" not in environ:
        # Each srun task has its own CPUs; the ranks of an agent share the agent's CPUs.
        sharing = plan.ranks if plan.form == "agent" else 1
        found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // sharing))
    return found


def count_ranks(text: str) -> int:
    """Return the number of ranks that ``--nproc-per-node`` means on this node.

    Raises ConfigError if it means none.
    """
    count = int(text) if text.isdecimal() else 0
    if text in ("gpu", "auto"):
        import torch

        count = torch.cuda.device_count()
    if text == "cpu" or (text == "auto" and not count):
        count = len(os.sched_getaffinity(0))
    if not count:
        message = f"--nproc-per-node {text} starts no rank"
        raise ConfigError(message, hint="write a number above 0, cpu, gpu or auto")
    return count


def _has_driver() -> bool:
    """Return whether there is a GPU driver: Slurm may grant GPUs that do not exist, as in a lab."""
    return any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def join_ranks(plan: Plan) -> dict[str, str]:
    """Return torchrun's variables for this rank.

    Rank 0 starts a child that serves the store in which the ranks meet, and publishes its address
    in the run directory.

    Raises RunError if rank 0 did not publish its address in time, or the launch's name is taken.
    """
    step = Step.from_environ()
    assert step is not None
    if step.task == 0:
        served, _ = meeting.serve_apart("", plan.start_timeout_s, plan.rendezvous)
        address = Address(meeting.own_host(), served.port)
        meeting.publish(plan.rendezvous, address)
    else:
        address = meeting.find(plan.rendezvous, timeout_s=plan.start_timeout_s)
    place = Place(address, step.task - step.local, sum(step.tasks))
    return rank_variables(plan, place, step.local)


def become(command: list[str], environ: dict[str, str]) -> NoReturn:
    """Replace this process with the program.

    Raises ConfigError if the program cannot be started.
    """
    ignore_warnings()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environ)  # noqa: S606 - as in rank
    except OSError as error:
        message = f"{command[0]} cannot be started: {error.strerror}"
        raise ConfigError(message, hint="check that it exists on every node") from error
