"""``hpctk launch``: run the same training script on a laptop and on the nodes of a job."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.batch.node import usable_gpus
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.training.launch import plan as plans

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
        from hpc_toolkit.training.launch import task

        task.become(command(request), {**environ, **task.join_ranks(plan)})
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
