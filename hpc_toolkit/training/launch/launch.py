"""``hpctk launch``: run the same training script on a laptop and on the nodes of a job."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.slurm.batch.preflight import usable_gpus
from hpc_toolkit.training.launch.options import all_options
from hpc_toolkit.training.launch.outcome import SAVED, Outcome, exit_code
from hpc_toolkit.training.launch.plan import (
    Plan,
    Request,
    Step,
    check_request,
    given_options,
    left_out,
    make_plan,
    task_plan,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed.launcher.api import LaunchConfig

_NEEDED = {
    *("event_log_handler", "numa_options", "signals_to_handle", "virtual_local_rank"),
    *("duplicate_stdout_filters", "duplicate_stderr_filters", "shutdown_timeout"),
}
"""Fields of LaunchConfig that early versions of torch lack."""
_OF_OUTPUT = {"redirects", "tee", "logs_specs"}
"""Options that set where the output of ranks goes."""


def launch(request: Request, *, replace: bool = False) -> Outcome:
    """Start the ranks of this node, or become one of them, and wait until they have ended.

    Args:
        request: the script and its options.
        replace: this process has no other purpose. If srun started every rank, it becomes one
            and does not return; otherwise signals do not end it once the outcome is known.

    Raises:
        HpcToolkitError: the launch cannot start; nothing was started.
    """
    check_request(request)
    with _surroundings():
        plan, namespace = _planned(request)
        os.environ.update(surroundings(plan, os.environ))
        if plan.form == "task":
            return _as_task(request, plan, replace=replace)
        if told := left_out(request, plan):
            sys.stderr.write(f"warning: {told.message} ({told.hint})\n")
        config, program, arguments = _configured(namespace, plan)
        from hpc_toolkit.training.launch.elastic import run_agent

        return run_agent(plan, config, program, arguments, last=replace)


def planned(request: Request) -> Plan:
    """Return the plan of :func:`launch` for this process, without starting anything.

    Raises:
        HpcToolkitError: as in :func:`launch`.
    """
    check_request(request)
    with _surroundings():
        return _planned(request)[0]


def command(request: Request) -> list[str]:
    """Return the command line of one rank."""
    if request.options.get("no_python"):
        return [request.script, *request.arguments]
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    module = ["-m"] if request.options.get("module") else []
    return [python, "-u", *module, request.script, *request.arguments]


def surroundings(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every rank of this node gets in addition to torch's own."""
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


def _planned(request: Request) -> tuple[Plan, Any]:
    step = Step.from_environ()
    gpus = usable_gpus(os.environ)
    backend = request.backend or ("nccl" if gpus and _has_driver() else "gloo")
    if step is not None and not step.per_node:
        return task_plan(request, step, backend=backend), None
    namespace = _namespace(request)
    given = "nproc_per_node" in request.options or "PET_NPROC_PER_NODE" in os.environ
    if step is not None and not given:
        granted = os.environ.get("SLURM_GPUS_ON_NODE", "")
        namespace.nproc_per_node = max(1, gpus or (int(granted) if granted.isdecimal() else 0))
    namespace.nproc_per_node = _ranks(namespace.nproc_per_node)
    plan = make_plan(request, namespace, step=step, backend=backend)
    if step is not None:
        namespace.nnodes, namespace.node_rank = str(plan.nodes), plan.node_rank
    return plan, namespace


def _has_driver() -> bool:
    """Return whether there is a GPU driver: Slurm may grant GPUs that do not exist, as in a lab."""
    return any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def _namespace(request: Request) -> Any:
    """Parse the options with torchrun's own parser, including its defaults and variables.

    Raises:
        ConfigError: torch is missing, or rejects a value.
    """
    try:
        from torch.distributed.run import get_args_parser
    except ImportError as error:
        message = f"launch needs torch: {error}"
        raise ConfigError(message, hint="pip install 'hpc-toolkit[torch]'") from error
    known, words = all_options(), []
    for name, value in request.options.items():
        if value is None or value is False:
            continue
        words += [known[name].spelling, *([] if value is True else [str(value)])]
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            parser = get_args_parser()
            if not _OF_OUTPUT & given_options(request):
                parser.set_defaults(tee="3")
            return parser.parse_args([*words, "--", request.script, *request.arguments])
    except (SystemExit, ValueError) as error:
        lines = told.getvalue().strip().splitlines() or [str(error)]
        _, _, message = lines[-1].rpartition("error: ")
        raise ConfigError(message, hint="see hpctk launch --help") from error


def _ranks(text: object) -> int:
    """Return the number of ranks that ``--nproc-per-node`` means on this node."""
    from torch.distributed.run import determine_local_world_size

    try:
        count: int = determine_local_world_size(str(text))
    except ValueError as error:
        message = f"--nproc-per-node {text}: {error}"
        raise ConfigError(message, hint="a number, cpu, gpu or auto") from error
    if count < 1:
        message = f"--nproc-per-node {text} starts no rank"
        raise ConfigError(message, hint="a number, cpu, gpu or auto")
    return count


def _configured(
    namespace: Any, plan: Plan
) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """Convert the options to torch's LaunchConfig; return it with the program and arguments.

    Raises:
        ConfigError: torch rejects an option, or is too old.
    """
    from torch.distributed.elastic.events.handlers import get_logging_handler
    from torch.distributed.run import config_from_args

    if plan.own_logs:
        # Otherwise torch creates a directory that nothing uses.
        namespace.log_dir = os.devnull
    if namespace.master_port is None:
        namespace.master_port = 29500
    if plan.meeting != "torch":
        # The static backend needs no further options; the plan decides how the nodes meet.
        namespace.rdzv_backend, namespace.rdzv_endpoint = "static", ""
    try:
        config, program, arguments = config_from_args(namespace)
    except (ValueError, AssertionError, OSError) as error:
        raise ConfigError(str(error), hint="see hpctk launch --help") from error
    lacking = sorted(_NEEDED - vars(config).keys())
    if lacking:
        message = f"launch needs a newer torch: this one's launcher has no {', '.join(lacking)}"
        raise ConfigError(message, hint="pip install --upgrade torch; 2.13 and 2.15 were tried")
    try:
        get_logging_handler(config.event_log_handler)
    except KeyError as error:
        message = f"--event-log-handler: torch has none called {config.event_log_handler!r}"
        raise ConfigError(message, hint="null or console") from error
    if not config.monitor_interval > 0:
        message = f"--monitor-interval: {config.monitor_interval:g} s is not above 0 s"
        raise ConfigError(message, hint="such as --monitor-interval 100ms")
    if config.numa_options is not None:
        _check_gpus(config.nproc_per_node)
    return config, program, list(arguments)


def _check_gpus(ranks: int) -> None:
    """Reject --numa-binding with fewer GPUs than ranks; torch would fail only at the start."""
    import torch

    seen = torch.cuda.device_count()
    if ranks > seen:
        message = f"--numa-binding: torch sees fewer GPUs ({seen}) than there are ranks ({ranks})"
        raise ConfigError(message, hint="leave it out; in a job srun's --cpu-bind binds tasks")


def _as_task(request: Request, plan: Plan, *, replace: bool) -> Outcome:
    from hpc_toolkit.training.launch import task

    step = Step.from_environ()
    assert step is not None
    place, keeper = task.task_environment(plan, step)
    environ = {**os.environ, **place}
    program, *arguments = command(request)
    try:
        if replace:
            task.become(program, arguments, environ)
        code = exit_code(task.run_child(program, arguments, environ, keeper))
    except OSError as error:
        message = f"{program} cannot be started: {error.strerror}"
        raise ConfigError(message, hint="is it there on every node?") from error
    told = HpcToolkitError(f"rank {step.task} ended with exit code {code}")
    return Outcome(code, told if code not in (0, SAVED) else None)


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    """Restore this process's environment variables at the end."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
