"""One node's part of a launch: the agent, its logs, its signals and its outcome."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import PASSING, ConfigError, HpcToolkitError
from hpc_toolkit.system.ranks import host_name
from hpc_toolkit.training.launch import agent as agents
from hpc_toolkit.training.launch.outcome import (
    SAVED,
    Outcome,
    exit_code,
    failure_error,
    root_cause,
    saved,
)
from hpc_toolkit.training.launch.rank import WARNINGS, wrapped
from hpc_toolkit.training.launch.ranklogs import (
    PREFIX,
    log_path,
    make_next,
    make_rank_logs,
    whole_lines,
)
from hpc_toolkit.training.launch.rendezvous import FAREWELL_S, ended_message, make_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.launcher.api import LaunchConfig

    from hpc_toolkit.training.launch.plan import Plan


@contextlib.contextmanager
def signals(names: str, warn: Callable[[int], None], *, last: bool) -> Iterator[Callable[[], None]]:
    """Call ``warn`` on a warning signal; raise torch's SignalException on a signal of ``names``.

    Yield a function that ignores all of them from then on, for when only the exit is left. The
    earlier handlers are restored afterwards, unless the process does nothing else (``last``).
    Outside the main thread, which alone gets signals, nothing changes.

    Raises:
        ConfigError: a name is not a signal, or no process can handle that signal.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    ending = {_signal(name.strip()) for name in names.split(",") if name.strip()}

    def end(number: int, _frame: object) -> None:
        found = signal.Signals(number)
        message = f"{found.name} came"
        raise SignalException(message, sigval=found)

    def over() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    before = {number: signal.getsignal(number) for number in {*ending, *WARNINGS}}
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = names
    for number in WARNINGS:
        signal.signal(number, lambda number, _frame: warn(number))
    for number in ending:
        signal.signal(number, end)
    try:
        yield over
    finally:
        for number, handler in before.items() if not last else ():
            signal.signal(number, handler)


def _signal(name: str) -> signal.Signals:
    try:
        found = signal.Signals[name]
    except KeyError as error:
        message = f"--signals-to-handle: there is no signal {name!r}"
        raise ConfigError(message, hint="such as SIGTERM,SIGINT") from error
    if found in (signal.SIGKILL, signal.SIGSTOP):
        message = f"--signals-to-handle: no process can handle {name}"
        raise ConfigError(message, hint="such as SIGTERM,SIGINT")
    return found


class _Here:
    """The agent of this process, once it exists."""

    agent: Any = None

    def warn(self, number: int) -> None:
        """Forward a warning signal to the ranks."""
        agents.forward(self.agent, number)


def run_agent(
    plan: Plan,
    config: LaunchConfig,
    program: Callable[..., Any] | str,
    arguments: list[str],
    *,
    last: bool,
) -> Outcome:
    """Start the ranks of this node and wait until they have ended for good.

    With ``last`` this process does nothing afterwards. Signals then stay ignored once the outcome
    is known, so that the exit code reports how the ranks ended.

    Raises:
        ConfigError: torch cannot use one of the options.
    """
    logs, temporary = _redirect(plan, config)
    if isinstance(program, str):
        program, arguments = wrapped(program, arguments, agent=os.getpid())
    here = _Here()
    names = config.signals_to_handle
    with (
        whole_lines(),
        signals(names, here.warn, last=last) as over,
        contextlib.ExitStack() as stack,
    ):
        outcome = _ended(lambda: _take_part(plan, config, (program, arguments), here, stack), here)
        failed = outcome is None
        if outcome is None:
            outcome = _failed(here.agent, logs)
        over()
        rounds = here.agent.rounds if here.agent is not None else None
        if rounds is not None:
            if outcome.code:
                rounds.end(outcome.code, outcome.error.message if outcome.error else "saved")
            # Ranks of other nodes may still be saving their state.
            rounds.leave(_patience_s(config, outcome), together=outcome.code == SAVED)
    if temporary and not (failed and outcome.error):
        shutil.rmtree(temporary, ignore_errors=True)
    return outcome


def _patience_s(config: LaunchConfig, outcome: Outcome) -> float:
    """Return how many seconds other nodes may take to leave.

    The monitor interval is part of it: a node notices an ending only when it checks its ranks.
    """
    leaving_s = config.shutdown_timeout if outcome.code == SAVED else FAREWELL_S
    return float(leaving_s or 0) + config.monitor_interval


def _redirect(plan: Plan, config: LaunchConfig) -> tuple[Path | None, Path | None]:
    """Redirect the ranks' output to files; return their directory, and it again if temporary."""
    if not plan.own_logs:
        return None, None
    asked: Any = config.logs_specs
    temporary = None
    if plan.log_dir is None:
        temporary = Path(tempfile.mkdtemp(prefix="hpctk-launch-"))
    directory = plan.log_dir or temporary
    assert directory is not None
    if temporary is None and plan.nodes == 1:
        # An earlier launch in the same step has the same name.
        directory = make_next(directory)
    config.logs_specs = make_rank_logs(
        directory,
        redirects=asked._redirects,
        tee=asked._tee,
        local_ranks=asked._local_ranks_filter,
    )
    return directory, temporary


def _take_part(
    plan: Plan,
    config: LaunchConfig,
    command: tuple[Callable[..., Any] | str, list[str]],
    here: _Here,
    stack: contextlib.ExitStack,
) -> Any:
    """Meet the other nodes and run the ranks; return the result of torch's agent."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    handler, rounds = make_handler(plan, config, stack)
    host, port = _static_address(config) if plan.meeting == "torch" else (None, None)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command[0],
        args=tuple(command[1]),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=host,
        master_port=port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
    agent = agents.agent_class()(
        spec=spec,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template or PREFIX,
        shutdown_timeout=config.shutdown_timeout,
    )
    agent.rounds = rounds
    here.agent = agent
    try:
        return agent.run()
    finally:
        handler.shutdown()


def _ended(run: Callable[[], Any], here: _Here) -> Outcome | None:
    """Run an agent to its end; return None if a rank failed for good."""
    from torch.distributed.elastic.multiprocessing import SignalException

    try:
        result = run()
    except SignalException as end:
        if here.agent is not None and saved(agents.ended_codes(here.agent)):
            return Outcome(SAVED)
        rounds = here.agent.rounds if here.agent is not None else None
        if rounds is not None and (ending := rounds.ended(at_once=True)) is not None:
            # srun ended this task because another node failed: exit with that node's code.
            return Outcome(ending.code, HpcToolkitError(ended_message(ending)))
        name = end.sigval.name
        return Outcome(128 + end.sigval, HpcToolkitError(f"ended by {name}, and its ranks with it"))
    except agents.NodeEndedError as error:
        return Outcome(error.ending.code if error.ending else 1, error)
    except (HpcToolkitError, OSError) as error:
        return _stopped(error)
    return None if result is not None and result.is_failed() else Outcome(0)


def _stopped(error: HpcToolkitError | OSError) -> Outcome:
    """Turn an error of this node, such as a full disk, into an outcome for the other nodes."""
    if isinstance(error, HpcToolkitError):
        return Outcome(error.exit_code, error)
    if error.errno not in PASSING:
        raise error
    where = f"{error.filename}: " if error.filename else ""
    told = HpcToolkitError(f"{where}{error.strerror}", hint="fix that, and start it again")
    return Outcome(SAVED, told)


def _failed(agent: Any, directory: Path | None) -> Outcome:
    """Return the outcome of ranks that failed for good, with the error of the root cause."""
    failures = agents.rank_failures(agent)
    if saved(failure.code for failure in failures):
        return Outcome(SAVED)
    restarts = agent.get_worker_group().spec.max_restarts - agent._remaining_restarts
    logs: dict[int, Path] = {}
    for failure in failures if directory is not None else ():
        log = log_path(directory, failure.rank, restarts, "err")  # type: ignore[arg-type] # above
        if log.exists():
            logs[failure.rank] = log
    cause = root_cause(
        [
            replace(failure, said_at=logs[failure.rank].stat().st_mtime)
            if failure.rank in logs
            else failure
            for failure in failures
        ]
    )
    error = failure_error(cause, host=host_name(), restarts=restarts, log=logs.get(cause.rank))
    return Outcome(exit_code(cause.code), error)


def _static_address(config: LaunchConfig) -> tuple[str | None, int | None]:
    """Return the address that torch's static rendezvous gives to ranks, if it is used."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    if config.rdzv_backend != "static" or not config.rdzv_endpoint:
        return None, None
    return parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=29500)
